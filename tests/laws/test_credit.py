"""Credit per token: rules for whole completions are lifted unchanged, scores summed as asked, rules of one's own."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from posttrain.algorithms import advantages
from posttrain.algorithms.advantages import decoupled_zscore, group_zscore, scores_differ, sums_differ
from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Credit, Evidence, mean_of_rollouts
from posttrain.algorithms.kl import k1, k2, k3
from posttrain.algorithms.losses import UNBOUNDED, mean_over_tokens, weighted_policy_gradient
from posttrain.algorithms.table import build_algorithm
from posttrain.algorithms.terms import KlTerm, policy_term
from posttrain.behaviours.behaviour_reader import BehaviourReader
from posttrain.records import Grades
from posttrain.runs.progress import Clock
from posttrain.training.credited_step import CreditedStep
from posttrain.training.reference import FrozenCopy
from posttrain.training.rl import step_report
from posttrain.training.trained import RunState
from tests.support import tiny
from tests.support.sequences import evidence_of
from tests.support.stages import Stages, even_tokens, stages_with
from tests.support.tiny import gradient_of, gradient_of_update, plain_logprobs, relative_distance, tiny_policy

LIMIT = 12
RULES = {
    "reinforce": advantages.raw,
    "rloo": advantages.leave_one_out,
    "grpo": advantages.group_zscore,
    "dr_grpo": advantages.group_centred,
    "dapo": advantages.group_zscore,
    "gspo": advantages.group_zscore,
    "cispo": advantages.group_zscore,
    "maxrl": advantages.over_mean,
}
"""Of the rows whose advantages are of rewards alone."""


def some_evidence(seed: int, num_prompts: int, group_size: int, *, token_rewards: bool) -> Evidence:
    """Random rewards, some of them missing, and lengths."""
    rng = torch.Generator().manual_seed(seed)
    shape = (num_prompts, group_size)
    rewards = torch.randint(0, 3, shape, generator=rng).double()
    rewards = torch.where(torch.rand(shape, generator=rng) < 0.15, torch.nan, rewards)
    lengths = torch.randint(1, LIMIT + 1, shape, generator=rng)
    earned = torch.randn(int(lengths.sum()), generator=rng, dtype=torch.float64) if token_rewards else None
    return evidence_of(rewards, lengths, limit=LIMIT, token_rewards=earned)


def test_every_row_but_those_of_a_teacher_or_a_critic_has_its_rule_here() -> None:
    assert [*RULES] == tiny.BY_REWARD


@pytest.mark.parametrize("name", RULES)
@given(seed=st.integers(0, 2**31), shape=st.tuples(st.integers(1, 3), st.integers(2, 5)), token_rewards=st.booleans())
def test_every_algorithm_gives_all_tokens_of_a_completion_its_advantage(name, seed, shape, token_rewards) -> None:
    # What is divided by a mean of rewards takes none below 0.
    evidence = some_evidence(seed, *shape, token_rewards=token_rewards and name != "maxrl")
    credit = build_algorithm({"name": name}).credit(evidence)
    rewards, lengths = evidence.rewards, evidence.lengths.flatten().tolist()
    if name == "dapo":
        rewards = advantages.overlong_punishment(
            rewards, evidence.lengths, max_completion_tokens=LIMIT, overlong=advantages.Overlong()
        )
    if evidence.token_rewards is not None:
        totals = [math.fsum(part.tolist()) for part in evidence.token_rewards.split(lengths)]
        rewards = rewards + torch.tensor(totals, dtype=torch.float64).view(shape)
    parts = credit.advantages.split(lengths)
    assert all((part == part[0]).all() for part in parts)
    given_to_each = torch.stack([part[0] for part in parts]).view(shape)
    torch.testing.assert_close(given_to_each, RULES[name](rewards), rtol=1e-9, atol=1e-9)
    assert (given_to_each[evidence.rewards.isnan()] == 0).all()
    assert credit.returns is None


PENALTY = KlTerm(coefficient=0.3, estimator="k1", place="reward")


def reward_to_go(evidence: Evidence) -> Credit:
    """A_t = r + Σ_{s ≥ t} r_s of each completion; the returns are those sums alone."""
    parts = evidence.token_rewards.split(evidence.lengths.flatten().tolist())
    to_go = torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts])
    return Credit(evidence.rewards.flatten()[evidence.rollout] + to_go, returns=to_go)


OWN = Algorithm(
    name="reward to go",
    credit=reward_to_go,
    terms=(policy_term(weighted_policy_gradient, clip=UNBOUNDED),),
    token_weights=mean_over_tokens,
    kl_penalty=PENALTY,
)
TEMPERATURE = 0.8


def own_stages(**update: int) -> Stages:
    stages = stages_with(OWN, temperature=TEMPERATURE, **update)
    stages.learner.reference = FrozenCopy(tiny_policy(seed=1))
    return stages


def written_out(stages: Stages, credited: CreditedStep) -> dict[tuple[str, int], tuple[list[float], list[float]]]:
    """Advantages and returns of the tokens of each completion, summed up one by one."""
    of_each: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
    model = stages.learner.reference.policy.model
    for group in credited.groups.groups:
        for rollout in group.rollouts:
            log_ref = plain_logprobs(model, group.prompt.tokens, rollout.tokens, TEMPERATURE).tolist()
            earned = [-0.3 * (own - other) for own, other in zip(rollout.logprobs, log_ref, strict=True)]
            returns = [math.fsum(earned[t:]) for t in range(len(earned))]
            (reward,) = even_tokens([rollout.tokens])
            of_each[group.prompt.id, rollout.sample] = ([reward + to_go for to_go in returns], returns)
    return of_each


def test_a_users_rule_per_token_is_what_the_update_differentiates() -> None:
    stages = own_stages()
    credited = stages.credited()
    expected = written_out(stages, credited)
    (batch,) = stages.learner.batches(credited, Clock())
    actual, _ = gradient_of_update(stages.policy, batch, stages.learner.objective())

    # Every ratio is 1: the loss is that of REINFORCE, L = -(1/n) Σ_t A_t log π(y_t).
    loss, count = torch.zeros((), dtype=torch.float64), 0
    for group in credited.groups.groups:
        for rollout in group.rollouts:
            own = plain_logprobs(stages.policy.model, group.prompt.tokens, rollout.tokens, TEMPERATURE)
            gains, _ = expected[group.prompt.id, rollout.sample]
            loss = loss - torch.tensor(gains, dtype=torch.float64) @ own
            count += len(gains)
    assert relative_distance(actual, gradient_of(stages.policy, loss / count)) <= 1e-10


@pytest.mark.parametrize("parts", [1, 2])
def test_the_returns_of_a_users_rule_arrive_beside_their_tokens(parts: int) -> None:
    stages = own_stages(minibatches_per_epoch=parts)
    credited = stages.credited()
    expected = written_out(stages, credited)
    seen = []
    for batch in stages.learner.batches(credited, Clock()):
        gains = [number for name in batch.names for number in expected[name][0]]
        returns = [number for name in batch.names for number in expected[name][1]]
        assert batch.columns.advantages.tolist() == pytest.approx(gains, abs=1e-10)
        assert batch.columns.returns.tolist() == pytest.approx(returns, abs=1e-10)
        seen += batch.names
    assert sorted(seen) == sorted(expected)


def test_what_is_shown_of_a_completion_is_the_mean_of_its_tokens_advantages() -> None:
    stages = own_stages()
    credited = stages.credited()
    expected = written_out(stages, credited)
    for group, row in zip(credited.groups.groups, credited.advantages, strict=True):
        means = [sum(gains) / len(gains) for gains, _ in (expected[group.prompt.id, r.sample] for r in group.rollouts)]
        assert row.tolist() == pytest.approx(means, abs=1e-10)


def alternating(evidence: Evidence) -> Credit:
    """Of each completion the first token is blamed for what the last is praised for: they add up to nothing."""
    columns = [torch.zeros(length, dtype=torch.float64) for length in evidence.lengths.flatten().tolist()]
    for column in columns[1:]:  # and nothing for the first completion
        column[0] -= 1
        column[-1] += 1
    return Credit(torch.cat(columns))


def test_a_completion_whose_tokens_advantages_cancel_out_is_not_counted_as_one_without() -> None:
    stages = stages_with(replace(OWN, credit=alternating, kl_penalty=None))
    credited = stages.credited()
    (batch,) = batches = stages.learner.batches(credited, Clock())
    updates = stages.learner.learn(batches, 1, Clock())
    learner, trained = stages.learner, SimpleNamespace(run=RunState())
    parts = {"policy": learner.policy, "engine": stages.collector.engine, "algorithm": learner.algorithm}
    session = SimpleNamespace(learner=learner, trained=trained, behaviours=BehaviourReader({}), **parts)
    report = step_report(session, credited, updates, {})
    # Without any advantage: the first completion, and those of one token, which is blamed and praised.
    lengths = [len(r.tokens) for group in credited.groups.groups for r in group.rollouts]
    idle = 1 + sum(length == 1 for length in lengths[1:])
    assert (credited.advantages == 0).all()
    assert report.metrics["frac_zero_advantage"] == idle / 20 < 1
    assert len(batch.completions) == 20 - idle  # which is what is trained on


@given(
    numbers=st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 40), min_size=12, max_size=12),
)
@example(numbers=[[0.1, -0.1, 0.7]], lengths=[3] * 12)  # in float64 the plain mean of three 0.1 is 0.10000000000000002
def test_the_mean_of_equal_numbers_is_that_number(numbers: list[list[float]], lengths: list[int]) -> None:
    each = torch.tensor(numbers, dtype=torch.float64)
    sizes = torch.tensor(lengths[: each.numel()]).view(each.shape)
    assert torch.equal(mean_of_rollouts(each.flatten().repeat_interleave(sizes.flatten()), sizes), each)


def test_the_mean_of_different_numbers_is_over_the_completions_own_tokens() -> None:
    tokens = torch.tensor([1.0, 2, 6, 5, -1, 1]).double()
    lengths = torch.tensor([[3, 1], [1, 1]])
    assert mean_of_rollouts(tokens, lengths).tolist() == [[3, 5], [-1, 1]]


@pytest.mark.parametrize(("estimator", "function"), [("k1", k1), ("k2", k2), ("k3", k3)])
def test_a_kl_taken_off_token_by_token_adds_up_to_that_of_the_completion(estimator: str, function: object) -> None:
    algorithm = build_algorithm({"name": "rloo", "kl": {"coefficient": 0.7, "estimator": estimator, "place": "reward"}})
    seen: list[Evidence] = []

    def watching(evidence: Evidence) -> Credit:
        seen.append(evidence)
        return algorithm.credit(evidence)

    stages = stages_with(replace(algorithm, credit=watching), temperature=TEMPERATURE)
    stages.learner.reference = FrozenCopy(tiny_policy(seed=1))
    credited = stages.credited()
    rows = [(group.prompt.tokens, r) for group in credited.groups.groups for r in group.rollouts]
    model = stages.learner.reference.policy.model
    log_ref = torch.cat([plain_logprobs(model, prompt, r.tokens, TEMPERATURE).detach() for prompt, r in rows])
    log_mu = torch.tensor([number for _, r in rows for number in r.logprobs], dtype=torch.float64)
    owner = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(r.tokens) for _, r in rows]))
    of_each = log_mu.new_zeros(len(rows)).index_add(0, owner, function(log_mu, log_ref)).view(5, 4)

    (evidence,) = seen
    rewards = torch.tensor([even_tokens([r.tokens])[0] for _, r in rows], dtype=torch.float64).view(5, 4)
    assert torch.equal(evidence.rewards, rewards)
    torch.testing.assert_close(evidence.token_reward_totals, -0.7 * of_each, rtol=1e-10, atol=1e-10)
    expected = advantages.leave_one_out(rewards - 0.7 * of_each)
    torch.testing.assert_close(credited.advantages, expected, rtol=1e-10, atol=1e-10)


def test_without_token_rewards_their_totals_are_nothing() -> None:
    evidence = some_evidence(3, 2, 4, token_rewards=False)
    assert evidence.token_reward_totals.tolist() == [[0.0] * 4] * 2


nan = math.nan
SCORES = st.sampled_from([nan, -1.0, 0.0, 0.1, 0.3, 0.5, 1.0, 7.25])
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
DEVIATIONS = st.sampled_from(["population", "sample"])
NORMALISING = ["grpo", "dapo", "gspo", "cispo"]


@st.composite
def scored(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of some functions, not all of which apply everywhere, and their weights."""
    functions, prompts, group = draw(SHAPES)
    size = functions * prompts * group
    values = torch.tensor(draw(st.lists(SCORES, min_size=size, max_size=size)), dtype=torch.float64)
    weights = draw(st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 2.0]), min_size=functions, max_size=functions))
    return values.reshape(functions, prompts, group), torch.tensor(weights, dtype=torch.float64)


def twin(scores: np.ndarray, weights: np.ndarray, degrees: int, epsilon: float) -> np.ndarray:
    """The paper's formulas, one rollout at a time, the mean over the batch taken off as it says."""
    functions, prompts, group = scores.shape
    total = np.full((prompts, group), nan)
    for k, i, j in np.ndindex(functions, prompts, group):
        if weights[k] == 0 or np.isnan(scores[k, i, j]):
            continue
        known = scores[k, i][~np.isnan(scores[k, i])]
        spread = math.sqrt(((known - known.mean()) ** 2).sum() / (len(known) - degrees)) if len(known) > degrees else 0
        z = (scores[k, i, j] - known.mean()) / (spread + epsilon) if spread > 1e-12 else 0.0
        total[i, j] = weights[k] * z + (0.0 if np.isnan(total[i, j]) else total[i, j])
    known = total[~np.isnan(total)]
    if len(known) <= degrees or known.std() < 1e-12:
        return np.zeros_like(total)
    spread = math.sqrt(((known - known.mean()) ** 2).sum() / (len(known) - degrees))
    return np.nan_to_num((total - known.mean()) / (spread + epsilon))


@settings(max_examples=40, deadline=None)
@given(given=scored(), deviation=DEVIATIONS, epsilon=st.sampled_from([0.0, 1e-4, 0.5]))
def test_it_is_the_paper_s_formula_written_out(given, deviation, epsilon) -> None:
    scores, weights = given
    made = decoupled_zscore(scores, weights, deviation=deviation, epsilon=epsilon)  # type: ignore[arg-type]
    expected = twin(scores.numpy(), weights.numpy(), 1 if deviation == "sample" else 0, epsilon)
    np.testing.assert_allclose(made.numpy(), expected, rtol=1e-9, atol=1e-9)


@given(given=scored(), function=st.integers(0, 2), factor=st.sampled_from([1e-9, 0.3, 50.0]), shift=st.just(3.0))
def test_the_scale_and_the_zero_of_a_function_change_nothing(given, function, factor, shift) -> None:
    scores, weights = given
    other = scores.clone()
    other[function % len(scores)] = factor * (scores[function % len(scores)] + shift)
    before, after = decoupled_zscore(scores, weights), decoupled_zscore(other, weights)
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-9)


def test_the_scale_of_a_function_decides_where_scores_are_summed_first() -> None:
    # The law above says something only if the other order breaks it: (10, 0) + (0, 1) prefers the first rollout.
    scores = torch.tensor([[[10.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]], dtype=torch.float64)
    weights = torch.ones(2, dtype=torch.float64)
    summed = group_zscore((weights[:, None, None] * scores).sum(dim=0))
    apart = decoupled_zscore(scores, weights)
    assert summed[0, 0] > 1 > summed[0, 1]
    assert apart[0, 0].item() == pytest.approx(apart[0, 1].item())


@given(given=scored(), deviation=DEVIATIONS)
def test_of_one_function_it_is_the_z_score_up_to_one_factor_of_the_step(given, deviation) -> None:
    scores = given[0][:1]
    alone = decoupled_zscore(scores, torch.full((1,), 0.25, dtype=torch.float64), deviation=deviation)  # type: ignore[arg-type]
    z = group_zscore(scores[0], deviation=deviation)  # type: ignore[arg-type]
    factor = alone[z != 0] / z[z != 0]
    assert torch.all((alone != 0) == (z != 0))
    assert factor.numel() == 0 or (factor.min() > 0 and (factor.max() / factor.min()).item() == pytest.approx(1))


def test_of_one_function_that_every_group_learns_from_it_is_the_z_score() -> None:
    # Population deviation: each group's z have mean square 1, and so have all of them together.
    scores = torch.tensor([[[0.0, 1.0, 1.0], [0.5, 0.25, 2.0]]], dtype=torch.float64)
    torch.testing.assert_close(
        decoupled_zscore(scores, torch.ones(1, dtype=torch.float64)), group_zscore(scores[0]), rtol=1e-12, atol=1e-12
    )


def test_functions_that_cancel_leave_no_rounding_to_learn_from() -> None:
    # .1, .2, .4 and three times that have the same z but for rounding, which weights of 1 and -1 would leave over.
    base = torch.tensor([[0.1, 0.2, 0.4]], dtype=torch.float64)
    made = decoupled_zscore(torch.stack([base, 3 * base]), torch.tensor([1.0, -1.0], dtype=torch.float64))
    assert made.tolist() == [[0, 0, 0]]


def test_equal_scores_and_rollouts_that_nothing_scored_are_exactly_zero() -> None:
    scores = torch.tensor([[[0.9, 0.9, 0.9], [0.0, 1.0, nan]], [[nan, nan, nan], [nan, nan, nan]]], dtype=torch.float64)
    made = decoupled_zscore(scores, torch.ones(2, dtype=torch.float64))
    assert made[0].tolist() == [0, 0, 0]
    assert made[1, 2] == 0
    assert made[1, 1] == -made[1, 0] > 0


def grades(scores: list[list[list[float]]], weights: list[float], **more: object) -> Grades:
    table = torch.tensor(scores, dtype=torch.float64)
    by_weight = torch.tensor(weights, dtype=torch.float64)
    summed = (by_weight[:, None, None] * table).sum(dim=0)
    names = tuple("abc"[: len(weights)])
    return Grades(names=names, scores=table, weights=by_weight, rewards=summed, **more)  # type: ignore[arg-type]


def test_dynamic_sampling_keeps_a_group_whose_functions_differ_though_its_sums_do_not() -> None:
    apart = grades([[[1.0, 0.0]], [[0.0, 1.0]]], [1.0, 1.0])
    assert not sums_differ(apart).any()
    assert scores_differ(apart).all()
    assert not scores_differ(grades([[[1.0, 0.0]], [[1.0, 1.0]]], [0.0, 1.0])).any()  # what is only reported
    assert not scores_differ(grades([[[3.0, 2.0]]], [1.0], clips={"a": (0.0, 1.0)})).any()  # both are clipped to 1


@pytest.mark.parametrize("name", NORMALISING)
def test_every_algorithm_that_normalises_by_group_can_normalise_first(name: str) -> None:
    scores = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 0.01, 0.0]]], dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64)
    rewards = (weights[:, None, None] * scores).sum(dim=0)
    evidence = evidence_of(rewards, [[2, 1, 1]], scores=scores, weights=weights)
    plain: dict[str, object] = {"name": name} | ({"overlong": None} if name == "dapo" else {})
    first, *_ = build_algorithm(plain).credit(evidence).advantages.tolist()
    assert first == pytest.approx(2**0.5, rel=0.01)  # (1, .02, 0) in units of its deviation
    credited = build_algorithm(plain | {"reward_aggregation": "normalize_then_sum"}).credit(evidence).advantages
    # z is (2, -1, -1) / sqrt 2 and (-1, 2, -1) / sqrt 2: once and twice that is (0, 3, -3) / sqrt 2; deviation sqrt 3.
    assert credited.tolist() == pytest.approx([0, 0, 1.5**0.5, -(1.5**0.5)], abs=1e-12)
