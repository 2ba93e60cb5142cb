"""Held-out evaluation: its estimators against enumeration and repetition, and what is asked of every policy alike."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum

import numpy as np
import pytest
import torch
from scipy.stats import beta
from tokenizers.processors import TemplateProcessing

from posttrain.generation.engine import Engine, sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import StreamKey
from posttrain.models.policy import as_policy
from posttrain.options.training import EvaluationOptions
from posttrain.records import Group
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.function import reward_function
from posttrain.runs.intervals import bootstrap_interval, score_interval, share_interval
from posttrain.runs.reports import ScoredCompletions
from posttrain.tasks.base import Probe, Reading
from posttrain.training.evaluation import Questions, brief_evaluation, sample_answers
from posttrain.training.full_evaluation import completions_of_run, full_evaluation, num_completions
from tests.support.tiny import STOP_IDS, measures, request, some_prompts, tiny_model, tiny_policy, tokenizer


def test_the_interval_covers_the_truth_nineteen_times_in_twenty() -> None:
    # 300 evaluations of 100 problems, whose rates over 4 samples scatter as those of problems of unequal difficulty do.
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(300):
        chances = rng.beta(0.6, 1.4, size=100)  # mean 0.6 / 2.0
        low, high = bootstrap_interval(rng.binomial(4, chances) / 4)
        covered += low <= 0.3 <= high
    # Binomial(300, 0.95) is 285 with deviation 3.8; percentile intervals of 100 values cover about 94%.
    assert 0.90 <= covered / 300 <= 0.98
    # √(.5 · .5 / 400) = .025, and 1.96 of it on either side
    assert bootstrap_interval(np.array([0.0, 1.0] * 200)) == pytest.approx((0.451, 0.549), abs=0.004)
    assert bootstrap_interval(np.full(9, 0.3)) == pytest.approx((0.3, 0.3))
    assert bootstrap_interval(np.array([0.2, 0.9])) == bootstrap_interval(np.array([0.2, 0.9]))


@pytest.mark.parametrize("problems", [8, 32])
@pytest.mark.parametrize("share", [0.02, 0.95])
def test_the_interval_of_few_or_extreme_shares_covers_the_truth_too(problems: int, share: float) -> None:
    # The bootstrap's covered it in 15% (8 problems at .02) to 78% (32 at .95) of evaluations.
    right = np.random.default_rng(5).random((200, problems)) < share
    intervals = [share_interval(each.astype(float)) for each in right]
    assert np.mean([low <= share <= high for low, high in intervals]) >= 0.91
    assert all(low < high for low, high in intervals)


def test_nothing_solved_is_no_proof_of_0_and_equal_scores_are_no_point() -> None:
    """Resampling equal ones gives a point, as though no other problem could score otherwise."""
    for problems in (1, 8, 32):
        end = pytest.approx(beta.ppf(0.975, 0.5, problems + 0.5), abs=1e-4)  # of 8 it is .262
        assert share_interval(np.zeros(problems)) == (0.0, end)
    low, high = share_interval(np.array([0.5, 0.0, 0.25, 0.0]))  # .1875 of four
    assert (low, high) == pytest.approx(beta.ppf([0.025, 0.975], 0.75 + 0.5, 3.25 + 0.5), abs=1e-4)
    many, solved, lengths = np.array([0.0, 1.0] * 200), np.zeros((4, 2)), np.full((4, 2), 7.0)
    assert share_interval(many) == bootstrap_interval(many), "of many problems it is the bootstrap's"
    assert score_interval(solved.mean(axis=1), solved) == share_interval(np.zeros(4))
    assert score_interval(lengths.mean(axis=1), lengths) is None
    lengths[0, 0], lengths[1, 1] = 9.0, np.nan
    means = np.nanmean(lengths, axis=1)
    assert score_interval(means, lengths) == bootstrap_interval(means)


def even(completion_ids: list[list[int]]) -> list[float]:
    """Right where more than half of the tokens are even."""
    return [float(sum(token % 2 == 0 for token in ids) > len(ids) / 2) for ids in completion_ids]


QUESTIONS = Questions(prompts=some_prompts([3, 5, 2, 4]), judge=reward_function(even), max_completion_tokens=6, seed=3)
NOTHING = reward_function(lambda completions: [None] * len(completions), name="none")


def evaluated(samples: int = 8, *, engine: Engine | None = None, **changes: object) -> tuple[dict, tuple[Group, ...]]:
    """A full evaluation, of a tiny policy unless there is an engine, with changed questions."""
    engine = engine or InProcessEngine(tiny_policy())
    return full_evaluation(engine, replace(QUESTIONS, **changes), measures(samples))


def said_in(groups: Sequence[Group]) -> list[list[tuple[int, ...]]]:
    return [[rollout.tokens for rollout in group.rollouts] for group in groups]


def tokens(answers: object) -> list[tuple[int, ...]]:
    return [rollout.tokens for group in answers.groups for rollout in group.rollouts]


def test_the_same_seed_asks_every_policy_with_the_same_random_numbers() -> None:
    policy, flat, also_flat = tiny_policy(), tiny_policy(seed=1), tiny_policy("llama", seed=2)
    for uniform in (flat, also_flat):
        with torch.no_grad():
            uniform.output_layer.matrix.zero_()
    first = tokens(sample_answers(InProcessEngine(policy), QUESTIONS, samples=3))
    assert tokens(sample_answers(InProcessEngine(policy, max_rows=2), QUESTIONS, samples=3)) == first
    assert tokens(sample_answers(InProcessEngine(policy), replace(QUESTIONS, seed=4), samples=3)) != first
    # Two different models that find every token equally likely say the same, for all that differs is the streams.
    said = tokens(sample_answers(InProcessEngine(flat), QUESTIONS, samples=3))
    assert said == tokens(sample_answers(InProcessEngine(also_flat), QUESTIONS, samples=3)) != first


def test_an_evaluation_in_brief_is_the_beginning_of_the_full_one() -> None:
    engine, questions = InProcessEngine(tiny_policy()), replace(QUESTIONS, prompts=some_prompts([3, 5, 2, 4] * 3))
    full = sample_answers(engine, questions, samples=3)
    brief = brief_evaluation(engine, questions, problems=9)
    assert 0 < brief["eval/accuracy_sampled"] == full.correct[:9, 0].mean() < 1
    assert brief["eval/accuracy_sampled_low"] < brief["eval/accuracy_sampled"] < brief["eval/accuracy_sampled_high"]
    assert brief["eval/mean_length"] == np.mean([len(group.rollouts[0].tokens) for group in full.groups[:9]])


def test_results_so_far_are_those_of_the_problems_so_far_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.training.evaluation.PORTION", 2)
    said: list[str] = []
    asked = {"prompts": some_prompts([3, 5, 2, 4, 3]), "rewards": (reward_function(even, weight=2.0),)}
    (whole, groups), (shown, same) = evaluated(4, **asked), evaluated(4, **asked, so_far=said.append)
    assert (shown, said_in(same)) == (whole, said_in(groups))
    right = np.array([even(row) for row in said_in(groups)])
    assert said[:3] == [f"sampled: accuracy {right[:count].mean():.3f} on {count} problems" for count in (2, 4, 5)]
    assert said[-1] == f"greedy: accuracy {whole['accuracy_greedy']:.3f} on 5 problems"


def test_what_could_not_be_scored_is_neither_right_nor_wrong() -> None:
    def seldom(completion_ids: list[list[int]]) -> list[float | None]:
        return [
            None if ids[0] % 3 == 0 else score for ids, score in zip(completion_ids, even(completion_ids), strict=True)
        ]

    engine, questions = InProcessEngine(tiny_policy()), replace(QUESTIONS, judge=reward_function(seldom))
    results, groups = full_evaluation(engine, questions, measures(8))
    scores = [seldom(row) for row in said_in(groups)]
    scored = [[score for score in row if score is not None] for row in scores]
    assert 0 < sum(map(len, scored)) < 32
    assert results["accuracy_sampled"] == pytest.approx(np.mean([np.mean(row) for row in scored if row]))
    greedy = sample_answers(engine, questions, samples=1, greedy=True)
    assert results["num_unscored"] == 32 - sum(map(len, scored)) + greedy.num_unscored
    full = [row for row in scored if len(row) == 8]
    assert results["pass_at_8"] == (pytest.approx(np.mean([any(row) for row in full])) if full else None)

    nothing = replace(QUESTIONS, judge=NOTHING)
    results, _ = full_evaluation(engine, nothing, measures(8))
    assert results["accuracy_sampled"] is results["accuracy_greedy"] is results["pass_at_8"] is None
    assert results["num_unscored"] == 36
    assert brief_evaluation(engine, nothing, problems=3) == {"eval/num_unscored": 3}


def test_the_full_evaluation_reports_the_answers_it_got() -> None:
    engine = InProcessEngine(tiny_policy())
    results, groups = evaluated(engine=engine)
    right = np.array([even(row) for row in said_in(groups)])
    assert 0 < right.mean() < 1
    assert results["accuracy_sampled"] == right.mean()
    assert results["pass_at_8"] == right.any(axis=1).mean()
    low, high = results["accuracy_sampled_interval"]
    assert low < right.mean() < high
    other_seed = replace(QUESTIONS, seed=99)  # no seed changes the likeliest token
    assert results["accuracy_greedy"] == sample_answers(engine, other_seed, samples=1, greedy=True).correct.mean()
    few, _ = evaluated(2, engine=engine)
    assert few["pass_at_8"] is None
    none, nobody = evaluated(prompts=[])
    assert none["num_problems"] == 0
    assert none["accuracy_sampled"] is none["mean_length"] is None
    assert nobody == ()


def test_pass_at_8_of_the_first_problems_is_what_eight_samples_of_each_would_give() -> None:
    engine, kept = InProcessEngine(tiny_policy()), list[ScoredCompletions]()
    options = EvaluationOptions(samples=3, pass_at_8_problems=2)
    results, groups = full_evaluation(engine, QUESTIONS, options, keep=kept.append)
    whole, eight = evaluated(engine=engine)
    right = np.array([even(row) for row in said_in(eight)])
    assert results["pass_at_8"] == right[:2].any(axis=1).mean()
    assert results["accuracy_sampled"] == right[:, :3].mean() != whole["accuracy_sampled"]
    assert said_in(groups) == [row[:3] for row in said_in(eight)]
    assert [[len(group.rollouts) for group in each.groups] for each in kept] == [[3] * 4, [5] * 2, [1] * 4]
    assert {rollout.sample for group in kept[1].groups for rollout in group.rollouts} == {3, 4, 5, 6, 7}
    assert results["measured_on"] == {
        "accuracy_sampled": {"problems": 4, "completions": 12},
        "accuracy_greedy": {"problems": 4, "completions": 4},
        "pass_at_8": {"problems": 2, "completions": 16},
    }
    assert whole["measured_on"]["pass_at_8"] == {"problems": 4, "completions": 32}


def test_a_probe_that_samples_asks_the_first_problems() -> None:
    questions = replace(QUESTIONS, probes={"never_giving_up": NEVER_GIVING_UP})
    options, counted = replace(measures(1), probe_problems=3), list[int]()
    results, _ = full_evaluation(InProcessEngine(tiny_policy()), questions, options, advance=counted.append)
    assert results["measured_on"]["accuracy_never_giving_up"] == {"problems": 3, "completions": 3}
    assert sum(counted) == num_completions(questions, options) == 4 + 4 + 3


def test_what_the_judge_logs_of_held_out_answers_is_in_the_results() -> None:
    def telling(completion_ids: list[list[int]], log_metric: Callable[[str, float], None]) -> list[float]:
        log_metric("seen", 2.5)
        return even(completion_ids)

    results, _ = evaluated(2, judge=reward_function(telling))
    assert results["logged"] == {"telling/seen": 2.5}
    assert "logged" not in evaluated(2)[0]


def length(completion_ids: list[list[int]]) -> list[float | None]:
    """Its tokens; nothing to say of a completion of one token."""
    return [float(len(ids)) if len(ids) > 1 else None for ids in completion_ids]


def paid(group: Group) -> list[float]:
    """even + .5 length, worked out again."""
    (said,) = said_in([group])
    return [e + 0.5 * (n or 0.0) for e, n in zip(even(said), length(said), strict=True)]


def test_the_held_out_reward_is_the_weighted_sum_of_training_and_a_judge_that_is_in_it_is_asked_once() -> None:
    asked: list[int] = []

    def judge(completion_ids: list[list[int]]) -> list[float]:
        asked.append(len(completion_ids))
        return even(completion_ids)

    # Its weight ends at 1, and a clip at 1 changes nothing of 0 and 1: both come after the score that the judge gives.
    first = reward_function(judge, weight=3.0, weight_to=1.0, over_steps=9, clip=(0, 1))
    rewards = (first, reward_function(length, weight=0.5))
    questions = replace(QUESTIONS, judge=first.unconditional(), rewards=rewards)
    results, groups = full_evaluation(InProcessEngine(tiny_policy()), questions, measures(3))
    assert asked == [12, 4]  # sampled ones, then greedy ones
    means = np.array([np.mean(paid(group)) for group in groups])
    assert results["reward"] == pytest.approx(means.mean(), abs=1e-12)
    assert results["reward_interval"] == pytest.approx(bootstrap_interval(means))
    alone, _ = evaluated(3)
    assert alone["reward"] is alone["reward_interval"] is None
    without = [
        {name: each[name] for name in each if "reward" not in name and name != "measured_on"}
        for each in (alone, results)
    ]
    assert without[0] == without[1]
    brief = brief_evaluation(InProcessEngine(tiny_policy()), questions, problems=2)
    assert brief["eval/reward"] == pytest.approx(np.mean([paid(group)[0] for group in groups[:2]]))
    low, high = brief.get("eval/reward_low"), brief.get("eval/reward_high")
    assert (low is None and high is None) or low <= brief["eval/reward"] <= high


def test_a_gate_changes_what_is_paid_and_not_what_is_right() -> None:
    gated = reward_function(even, gate="long")
    gate = reward_function(lambda completion_ids: [float(len(i) > 5) for i in completion_ids], name="long", weight=0.0)
    results, groups = evaluated(judge=gated.unconditional(), rewards=(gated, gate))
    right = np.array([even(row) for row in said_in(groups)])
    long = np.array([[len(ids) > 5 for ids in row] for row in said_in(groups)])
    assert results["accuracy_sampled"] == right.mean()
    assert results["reward"] == pytest.approx((right * long).mean())
    assert results["reward"] < results["accuracy_sampled"]


def test_a_reward_without_a_judge_is_measured_too() -> None:
    questions = replace(QUESTIONS, judge=NOTHING, rewards=(NOTHING, reward_function(length)))
    results, _ = full_evaluation(InProcessEngine(tiny_policy()), questions, measures(2))
    assert results["accuracy_sampled"] is None
    assert results["reward"] is not None
    brief = brief_evaluation(InProcessEngine(tiny_policy()), questions, problems=3)
    assert brief.keys() - {"eval/reward_low", "eval/reward_high"} == {"eval/reward", "eval/num_unscored"}


def test_a_score_of_one_or_more_is_right_and_part_of_one_is_wrong() -> None:
    partial = iter([0.0, 0.999, 1.0, 2.5])
    judge = reward_function(lambda completions: [next(partial) for _ in completions], name="partial")
    answers = sample_answers(InProcessEngine(tiny_policy()), replace(QUESTIONS, judge=judge), samples=1)
    assert answers.correct.tolist() == [[0.0], [0.0], [1.0], [1.0]]


def found_share(groups: Sequence[Group]) -> dict[str, float]:
    """A search ends with `0` or a stop token; what went on to the token limit has found something."""
    said = [rollout.tokens for group in groups for rollout in group.rollouts]
    (tag,) = tokenizer().encode("0", add_special_tokens=False)
    lasting = [len(ids) == QUESTIONS.max_completion_tokens and not {tag, *STOP_IDS} & {*ids} for ids in said]
    return {"accuracy_never_giving_up": sum(lasting) / len(lasting)}


NEVER_GIVING_UP = Probe(
    readings={"accuracy_never_giving_up": Reading("accuracy if never allowed to give up")},
    measure=found_share,
    suppressed=("0",),
    endless=True,
)


def never_giving_up(engine: Engine, questions: Questions, probe: Probe = NEVER_GIVING_UP) -> float | None:
    """The probe's number in a full evaluation; None where it is not there."""
    results, _ = full_evaluation(engine, replace(questions, probes={"never_giving_up": probe}), measures(1))
    return results.get("accuracy_never_giving_up")


def test_a_policy_that_may_not_give_up_goes_on_to_the_limit() -> None:
    engine = InProcessEngine(tiny_policy())
    questions = replace(QUESTIONS, prompts=some_prompts([3] * 24))
    free = sample_answers(engine, questions, samples=1).groups
    (tag,) = tokenizer().encode("0", add_special_tokens=False)
    said = [group.rollouts[0].tokens for group in free]
    # Left alone it gives up in both ways.
    assert any(tag in tokens for tokens in said)
    assert any(tokens[-1] in STOP_IDS for tokens in said)
    assert never_giving_up(engine, questions) == 1.0
    # A tag is one token also to a tokenizer that begins every text with a token of its own.
    beginning = copy.deepcopy(tokenizer())
    beginning.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", beginning.convert_tokens_to_ids("<|end|>"))]
    )
    assert len(beginning.encode("0")) == 2
    assert never_giving_up(InProcessEngine(as_policy(tiny_model("qwen3"), beginning)), questions) == 1.0


def test_without_a_tag_of_one_token_or_without_problems_nobody_can_say_whether_it_gave_up() -> None:
    engine = InProcessEngine(tiny_policy())
    assert "accuracy_never_giving_up" not in evaluated(1, engine=engine)[0]
    assert never_giving_up(engine, replace(QUESTIONS, prompts=[])) is None
    assert never_giving_up(engine, QUESTIONS, replace(NEVER_GIVING_UP, suppressed=("0", "00"))) is None


@pytest.mark.parametrize("probes", [{}, {"never_giving_up": NEVER_GIVING_UP}], ids=["without_tags", "with_tags"])
def test_a_full_evaluation_samples_as_many_completions_as_it_says(probes: dict[str, Probe]) -> None:
    counted: list[int] = []
    questions = replace(QUESTIONS, probes=probes)
    results, _ = full_evaluation(InProcessEngine(tiny_policy()), questions, measures(3), advance=counted.append)
    # Three at temperature 1 and a greedy one for each of four problems; with closing tags another.
    assert sum(counted) == num_completions(questions, measures(3)) == (20 if probes else 16)
    assert ("accuracy_never_giving_up" in results) == bool(probes)


def test_the_evaluations_of_a_run_sample_as_many_completions_as_its_plan_counts_on() -> None:
    options = EvaluationOptions(every_steps=3, samples=8, brief_problems=2)
    assert completions_of_run(QUESTIONS, replace(options, samples=5, pass_at_8_problems=3), 0) == 2 * (24 + 3 * 3)
    # Before and after 4 problems × (8 + 1), and after steps 3, 6 and 9 the first two problems.
    assert completions_of_run(QUESTIONS, options, 11) == 2 * 36 + 3 * 2
    assert completions_of_run(QUESTIONS, replace(options, brief_problems=99), 3) == 2 * 36 + 4
    assert completions_of_run(QUESTIONS, replace(options, every_steps=0), 11) == 2 * 36
    assert completions_of_run(replace(QUESTIONS, prompts=[]), options, 11) == 0


def test_a_probe_that_suppresses_nothing_reads_the_sampled_completions() -> None:
    seen: list[Sequence[Group]] = []

    def watching(groups: Sequence[Group]) -> dict[str, float]:
        seen.append(groups)
        return {"number": 2.5}

    questions = replace(QUESTIONS, probes={"some": Probe(readings={"number": Reading("a number")}, measure=watching)})
    counted: list[int] = []
    results, groups = full_evaluation(InProcessEngine(tiny_policy()), questions, measures(3), advance=counted.append)
    assert seen == [groups]
    assert results["number"] == 2.5
    assert sum(counted) == num_completions(questions, measures(3)) == 16


class Verdict(StrEnum):
    EVEN = "even"
    BOTH = "both"
    ODD = "odd"


def test_the_shares_of_outcomes_are_of_the_completions_that_have_one() -> None:
    told = iter([Verdict.ODD, Verdict.EVEN, None, Verdict.ODD, Verdict.ODD, Verdict.BOTH, Verdict.EVEN, None])

    def judge(completions: list[str], **columns: object) -> list[object]:
        verdicts = [next(told) for _ in completions]
        return [None if verdict is None else Graded(float(verdict == Verdict.EVEN), verdict) for verdict in verdicts]

    answers = sample_answers(
        InProcessEngine(tiny_policy()), replace(QUESTIONS, judge=reward_function(judge)), samples=2
    )
    assert list(answers.outcomes.items()) == [("both", 1 / 6), ("even", 2 / 6), ("odd", 3 / 6)]
    assert answers.num_unscored == 2
    assert answers.rates.tolist() == [0.5, 0.0, 0.0, 1.0]  # of (odd, even), (none, odd), (odd, both), (even, none)


def test_evaluation_has_streams_of_its_own_by_name() -> None:
    engine = InProcessEngine(tiny_policy())
    named = sample_groups(engine, QUESTIONS.prompts, request(2, 6, key=StreamKey(3, "evaluation", 0)))
    assert tokens(sample_answers(engine, QUESTIONS, samples=2)) == [r.tokens for group in named for r in group.rollouts]


def test_the_data_sets_of_a_mixture_are_measured_apart_and_in_the_order_of_their_names() -> None:
    names = ["h", "b", "", "c", "a", "f", "b", "d", "g", "e"]
    prompts = [replace(prompt, source=name) for prompt, name in zip(some_prompts([3] * 10), names, strict=True)]
    questions = replace(QUESTIONS, prompts=prompts, rewards=(reward_function(length),))
    results, groups = full_evaluation(InProcessEngine(tiny_policy()), questions, measures(4))
    apart = results["sources"]
    assert list(apart) == list("abcdefgh")
    for source, numbers in apart.items():
        of_source = said_in([group for group in groups if group.prompt.source == source])
        assert numbers["num_problems"] == len(of_source) == names.count(source)
        assert numbers["accuracy_sampled"] == np.mean([even(row) for row in of_source])
        means = [np.mean([n for n in length(row) if n is not None]) for row in of_source]
        assert numbers["reward"] == pytest.approx(np.mean(means), abs=1e-12)
    assert "sources" not in evaluated(1)[0]
