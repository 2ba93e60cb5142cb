"""The functions of `posttrain.course`, its loss of whole completions, and slips that docs/course.md lists, by hand.

Most cases are data: posttrain/course/cases.py and posttrain/course/model_laws.py, which a reader's own versions are
tried on too.
"""

import math
import random
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from posttrain import course
from posttrain.algorithms.losses import mean_over_sequences
from posttrain.algorithms.table import build_algorithm
from posttrain.course import (
    calc_kl_penalty,
    compute_advantages,
    compute_group_advantages,
    compute_grpo_advantages,
    compute_grpo_loss,
    create_grpo_training_episodes,
    grpo_sequence_loss,
)
from posttrain.course.model_laws import GENERATIONS, SAMPLE, WRITTEN, WrittenTokenizer
from posttrain.course.one_prompt import ALGORITHM
from posttrain.course.own_version import CHECKS, fault_of
from posttrain.rewards.countdown import countdown
from posttrain.rewards.shaping import graded_format, line_format, strict_format
from posttrain.trl import ModelConfig, get_peft_config
from tests.support.refusals import refused
from tests.support.sequences import doubles
from tests.support.tiny import advantage, token_loss


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, checks in CHECKS.items() for number in range(len(checks))]
)
def test_each_function_of_the_course_passes_the_cases_that_readers_are_given(name: str, number: int) -> None:
    assert fault_of(getattr(course, name), CHECKS[name][number], name) == ""


def test_every_function_of_the_course_has_cases() -> None:
    settings = {name for name in course.__all__ if name.endswith("Config")}
    assert CHECKS.keys() == set(course.__all__) - settings


PAIR = torch.tensor([[[math.log(3.0), 0.0], [0.0, 0.0]]])  # probabilities 3/4, 1/4 and 1/2, 1/2


def test_advantages_have_no_gradient_and_one_column_for_each_generated_token() -> None:
    values = torch.tensor([[0.5, 1.0, 2.0, 4.0, 8.0]], requires_grad=True)
    assert not compute_advantages(values, torch.tensor([10.0]), 2).requires_grad
    values, rewards = torch.randn(2, 10), torch.randn(2)  # the course's example, and its own way with it
    assert compute_advantages(values, rewards, 3).shape == (2, 7)
    with refused("8", "7", error=RuntimeError):
        torch.cat([values[:, 3:], rewards[:, None]], dim=1) - values[:, 2:-1]
    for prefix_len in (0, 10):
        with refused(f"prefix_len = {prefix_len}: ", "Use 1 to 9"):
            compute_advantages(values, rewards, prefix_len)


def test_the_kl_penalty_has_a_mask_and_no_gradient_of_the_reference() -> None:
    # KL(3/4, 1/4 ‖ 1/2, 1/2) = 3/4 ln(3/2) + 1/4 ln(1/2), and 0 at the second position.
    first = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reference = torch.zeros(1, 2, 2, requires_grad=True)
    logits = PAIR.clone().requires_grad_()
    calc_kl_penalty(logits, reference).backward()
    assert reference.grad is None
    only = torch.tensor([[True, False]])
    assert calc_kl_penalty(PAIR, reference, 1.0, mask=only).item() == pytest.approx(first, rel=1e-5)
    with refused("mask: no position counts"):
        calc_kl_penalty(PAIR, reference, mask=~only & only)


def test_the_example_of_eight_responses_half_of_them_right_comes_to_94_hundredths() -> None:
    # As the course rounds it: (1 - .5) / .53.
    found = compute_grpo_advantages(torch.tensor([1.0, 0.0] * 4))
    assert found.tolist() == pytest.approx([0.94, -0.94] * 4, abs=0.01)


def test_group_advantages_need_whole_groups() -> None:
    for size in (0, 3):
        with refused(f"group_size = {size}: must divide the number of rewards, 4"):
            compute_group_advantages(torch.tensor([1.0, 0.0, 2.0, 4.0]), size)


def test_a_label_of_minus_100_is_left_out_where_the_course_takes_it_for_an_index() -> None:
    logits, reference = torch.randn(2, 10, 100), torch.randn(2, 10, 100)
    labels = torch.randint(0, 100, (2, 10))
    labels[:, -2:] = -100
    with refused("out of bounds", error=RuntimeError):
        logits.log_softmax(-1).gather(-1, labels[..., None])
    advantages = torch.tensor([[0.5] * 10, [-0.5] * 10])
    loss, parts = compute_grpo_loss(logits, reference, advantages, labels)
    shorter, same = compute_grpo_loss(logits[:, :8], reference[:, :8], advantages[:, :8], labels[:, :8])
    assert loss.item() == pytest.approx(shorter.item(), rel=1e-6)
    assert compute_grpo_loss(logits, reference, advantages, labels, 0.0)[1]["kl_penalty"] == parts["kl_penalty"]
    assert parts == pytest.approx(same, rel=1e-6)
    with refused("labels: no position counts"):
        compute_grpo_loss(logits, reference, advantages, torch.full_like(labels, -100))


def test_no_completion_has_no_mean() -> None:
    none = torch.zeros(0)
    with refused("logp_new: no position counts"):
        grpo_sequence_loss(none, none, none, beta=0.1, epsilon=0.2)


def test_the_step_that_the_course_simulates_comes_to_its_loss() -> None:
    # Rewards about their mean .125 are .875, -.625, .875 and -1.125; times log π, over -4, they sum to -3.121875.
    rewards, logprobs = torch.tensor([[1.0, -0.5, 1.0, -1.0]]), torch.tensor([-15.2, -18.7, -12.3, -22.1]).double()
    found = advantage(ALGORITHM, rewards)
    assert found.tolist() == [[0.875, -0.625, 0.875, -1.125]]
    losses = token_loss(ALGORITHM, logprobs, logprobs, found[0].double(), torch.arange(4))
    weights = ALGORITHM.weighted(
        torch.ones(4, dtype=torch.long), torch.ones(4, dtype=torch.bool), max_completion_tokens=9
    )
    assert (weights * losses).sum().item() == pytest.approx(-3.121875, rel=1e-6)


def test_episodes_under_the_rule_of_the_prompt_and_with_what_the_prompt_began() -> None:
    cut = [text.removeprefix("<think>") for text in WRITTEN.texts]
    made = create_grpo_training_episodes(
        [SAMPLE, SAMPLE], GENERATIONS, WrittenTokenizer(cut[:2]), 2, rule="subset", prefill="<think>"
    )  # type: ignore[arg-type]
    assert made[1]["equation_rewards"] == [1.0, 0.0] * 2
    assert made[1]["format_rewards"] == [1.0] * 4
    with refused("all_generations: has 3, and 1 samples × generations_per_sample = 4"):
        create_grpo_training_episodes([SAMPLE], GENERATIONS[:3], WRITTEN)  # type: ignore[arg-type]


def test_the_course_s_examples_of_rewards_earn_here_what_they_earn_there() -> None:
    texts = [
        "<think>\nI need to make 24 using [2, 3, 4, 6].\n6 * 4 = 24.\n</think>\n<answer>6 * 4</answer>",
        "The answer is 6 * 4 = 24",
        "<think>\nLet me calculate...\n</think>\n<answer>2 + 3 + 4</answer>",
        "<think>\n(25 - 5) * 10 / 2 = 20 * 10 / 2 = 100!\n</think>\n<answer>(25 - 5) * 10 / 2</answer>",
    ]
    finish = ["stop"] * 4
    numbers, target = [[2, 3, 4, 6]] * 3 + [[10, 25, 5, 2]], [24, 24, 24, 100]
    assert [each.score for each in graded_format(completions=texts, finish_reasons=finish)] == [1, 0, 1, 1]
    graded = countdown(completions=texts, finish_reasons=finish, numbers=numbers, target=target)
    assert [each.score for each in graded] == [0, 0, 0, 1]


PAGE = (Path(__file__).parents[2] / "docs" / "course.md").read_text(encoding="utf-8")


def scores(reward: object, text: str) -> float:
    assert callable(reward)
    [graded] = reward(completions=[text], finish_reasons=["stop"])
    return float(graded.score)


def test_text_behind_the_answer_is_paid_for_by_the_homework_and_a_second_answer_by_the_page_on_trl() -> None:
    homework = re.compile(r"^<think>\n[\s\S]*\n</think>\n<answer>\n[\s\S]*\n</answer>$", re.MULTILINE)
    page = r"^<think>([^<]*(?:<(?!/?think>)[^<]*)*)<\/think>\n<answer>([\s\S]*?)<\/answer>$"
    behind = "<think>\na\n</think>\n<answer>\n1\n</answer>\nand more"
    second = "<think>a</think>\n<answer>1</answer> junk <answer>2</answer>"
    assert homework.match(behind) is not None
    assert re.search(page, behind, re.DOTALL) is None
    assert re.search(page, second, re.DOTALL) is not None
    assert [scores(line_format, behind), scores(strict_format, behind), scores(strict_format, second)] == [0, 0, 0]
    rows = {
        line.split("|")[2].strip(): line for line in PAGE.splitlines() if line.startswith("|") and "MULTILINE" in line
    }
    assert list(rows) == ["`format_reward(responses)`"]


def test_the_simulation_of_group_sizes_draws_rewards_of_mean_minus_a_sixth() -> None:
    rewards = [1.0, -0.5, -1.0]
    assert fmean(rewards) == pytest.approx(-1 / 6)
    deviation = math.sqrt(fmean([(each - fmean(rewards)) ** 2 for each in rewards]))
    assert deviation == pytest.approx(0.85, abs=0.005)
    random.seed(42)  # as there
    for size in (2, 4, 8, 16, 32):
        means = [fmean(random.choice(rewards) for _ in range(size)) for _ in range(1000)]
        assert -0.19 < fmean(means) < -0.15
        assert stdev(means) == pytest.approx(deviation / math.sqrt(size), rel=0.06)


def test_the_answers_that_are_said_to_hack_the_format_earn_half() -> None:
    answers = [
        "Let me think about this. I'll try 25 × 4 = 100, then 100 - 3 = 97. Actually, let me try...",
        "<think>numbers</think>\n<answer>random equation</answer>",
        "<think>try multiply</think>\n<answer>25 × 4 - 3</answer>",
    ]

    def course(text: str) -> float:
        """The notebook's format_reward_func; its equation_reward_func gives all three 0."""
        if not re.search(r"<think>.*?</think>\s*\n\s*<answer>.*?</answer>", text, re.DOTALL):
            return 0.0
        answer = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
        return 1.0 if re.match(r"^[\d+\-*/().\s]+$", answer.group(1).strip()) else 0.5

    assert [course(text) for text in answers] == [0, 0.5, 0.5]
    assert [scores(graded_format, text) for text in answers] == [0, 0.5, 0.5]


def test_the_facade_says_that_four_bits_do_not_reach_a_model_that_is_given_by_name(capsys) -> None:
    get_peft_config(ModelConfig(model_name_or_path="org/name", use_peft=True, load_in_4bit=True))
    assert "load_in_4bit = True: give get_quantization_config" in capsys.readouterr().out


COURSE = {
    "name": "gspo",
    "sequence_ratio": "product",
    "ratio_to": "reference",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "kl": {"coefficient": 0.1, "level": "completion"},
}
LENGTHS = torch.tensor([1, 3, 2, 4])
ROLLOUT = torch.arange(4).repeat_interleave(LENGTHS)


def spread(totals: torch.Tensor) -> torch.Tensor:
    """Log-probs of tokens that add up to those of their completions, no two tokens of one alike."""
    shares = torch.arange(1, len(ROLLOUT) + 1).double()
    return totals[ROLLOUT] * shares / torch.zeros(4).double().index_add(0, ROLLOUT, shares)[ROLLOUT]


def update_loss(config: dict[str, object], logprobs: torch.Tensor) -> torch.Tensor:
    """The loss of an update on four completions, of 1, 3, 2 and 4 tokens; μ is the policy as it is."""
    weights = mean_over_sequences(LENGTHS, torch.ones(4, dtype=torch.bool), max_completion_tokens=9)[ROLLOUT]
    advantages, reference = doubles(1.2, -0.4, 0.5, -1)[ROLLOUT], spread(doubles(0.5, 0.5, 0.6, 0.4).log())
    behaviour = logprobs.detach()
    losses = token_loss(build_algorithm(config), logprobs, behaviour, advantages, ROLLOUT, reference=reference)
    return (weights * losses).sum()


def test_the_loss_of_four_completions_is_the_courses_value() -> None:
    # Of the wholes π = (.6, .4, .7, .3) and ref = (.5, .5, .6, .4): ρ = (1.2, .8, 7/6, .75), clipped at .2.
    # -min(ρA, clip(ρ)A) = (-1.44, .32, -.58333, .8), whose mean is -.2258333;
    # k3 = ref/π - 1 - ln(ref/π) = (.0156549, .0268564, .0112936, .0456513), whose mean is .0248640.
    loss = update_loss(COURSE, spread(doubles(0.6, 0.4, 0.7, 0.3).log()))
    assert loss.item() == pytest.approx(-0.2233469, abs=5e-8)


def test_a_completion_whose_whole_has_left_the_range_learns_from_the_kl_alone() -> None:
    # Completion 0 is 1.3 times as likely as under the reference and wanted: no surrogate; k3's slope is .1 (1 - 1/1.3)
    # under a weight of 1/4.  Completion 3 is .75 times as likely and not wanted: .1 (1 - 1/.75) under 1/4 at every
    # token, as each of four losses with a weight of 1/16 moves with each of the four tokens.
    logprobs = spread(doubles(0.65, 0.5, 0.6, 0.3).log()).requires_grad_()
    update_loss(COURSE, logprobs).backward()
    slopes = logprobs.grad.split(LENGTHS.tolist())
    assert slopes[0].tolist() == pytest.approx([0.1 * (1 - 1 / 1.3) / 4], rel=1e-12)
    assert slopes[3].tolist() == pytest.approx([0.1 * (1 - 1 / 0.75) / 4] * 4, rel=1e-12)
    # Completion 1 is as likely as under the reference: ρ = 1, k3 is flat, and the slope is -A / 4.
    assert slopes[1].tolist() == pytest.approx([0.4 / 4] * 3, rel=1e-12)


# Trap: `disable_adapter()` is called and never entered, so that the reference is the policy.
def test_where_the_reference_is_the_policy_itself_nothing_is_clipped_and_nothing_pulled() -> None:
    # ρ = 1 and k3 = 0 whose slope is 0: what is left is -A ∇log π(y), on the mean over completions, as with a ratio
    # to the policy that sampled and without a KL.
    reference = spread(doubles(0.5, 0.5, 0.6, 0.4).log())
    on_policy = {**COURSE, "ratio_to": "behaviour", "kl": None}
    for config in (COURSE, on_policy):
        logprobs = reference.clone().requires_grad_()
        update_loss(config, logprobs).backward()
        expected = -doubles(1.2, -0.4, 0.5, -1)[ROLLOUT] / 4
        assert logprobs.grad.tolist() == pytest.approx(expected.tolist(), rel=1e-12)


def test_the_kl_of_completions_is_reported_beside_the_kl_per_token() -> None:
    whole, token = (
        build_algorithm({"name": "grpo", "kl": {"coefficient": 1, "level": level}}).terms[1]
        for level in ("completion", "token")
    )
    assert (whole.metric_name, token.metric_name) == ("loss/kl", "kl")


def test_a_token_is_pulled_by_its_whole_completion() -> None:
    # x = ln 2 at one token and -ln 2 at the other: tokens alone are pulled apart, the completion not at all.
    grads = {}
    for level in ("token", "completion"):
        logprobs = doubles(-1 + math.log(2), -1 - math.log(2)).requires_grad_()
        term = build_algorithm({"name": "grpo", "kl": {"coefficient": 1, "level": level}})
        columns = (logprobs.detach(), torch.zeros(2).double(), torch.zeros(2, dtype=torch.int64))
        token_loss(term, logprobs, *columns, reference=doubles(-1, -1)).sum().backward()
        grads[level] = logprobs.grad.tolist()
    assert grads["token"] == pytest.approx([1 - 1 / 2, 1 - 2], rel=1e-12)
    assert grads["completion"] == pytest.approx([0, 0], abs=1e-12)
