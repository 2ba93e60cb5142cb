"""The functions of `posttrain.course` at the values that the course tries, beside its own where that is wrong."""

import math

import pytest
import torch

from posttrain.course import (
    ALGORITHM,
    calc_kl_penalty,
    compute_advantages,
    compute_group_advantages,
    compute_grpo_advantages,
    compute_grpo_loss,
    create_grpo_training_episodes,
    grpo_sequence_loss,
)
from posttrain.rewards.countdown import countdown
from posttrain.rewards.shaping import graded_format
from tests.support.refusals import refused
from tests.support.tiny import advantage, token_loss

PAIR = torch.tensor([[[math.log(3.0), 0.0], [0.0, 0.0]]])  # probabilities 3/4, 1/4 and 1/2, 1/2


def test_an_advantage_is_the_next_value_less_this_one_and_at_the_end_the_reward_less_it() -> None:
    # The tokens behind a prompt of two are tried at values 1, 2 and 4, and led to 2, 4 and the reward.
    values = torch.tensor([[0.5, 1.0, 2.0, 4.0, 8.0]], requires_grad=True)
    found = compute_advantages(values, torch.tensor([10.0]), 2)
    assert found.tolist() == [[2.0 - 1, 4.0 - 2, 10.0 - 4]]
    assert not found.requires_grad
    values, rewards = torch.randn(2, 10), torch.randn(2)  # the course's example, and its own way with it
    assert compute_advantages(values, rewards, 3).shape == (2, 7)
    with refused("8", "7", error=RuntimeError):
        torch.cat([values[:, 3:], rewards[:, None]], dim=1) - values[:, 2:-1]
    for prefix_len in (0, 10):
        with refused(f"prefix_len = {prefix_len}: ", "Use 1 to 9"):
            compute_advantages(values, rewards, prefix_len)


def test_the_kl_penalty_is_that_of_whole_distributions_and_nothing_between_equal_ones() -> None:
    # KL(3/4, 1/4 ‖ 1/2, 1/2) = 3/4 ln(3/2) + 1/4 ln(1/2), and 0 at the second position.
    first = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reference = torch.zeros(1, 2, 2, requires_grad=True)
    logits = PAIR.clone().requires_grad_()
    penalty = calc_kl_penalty(logits, reference)
    assert penalty.item() == pytest.approx(0.1 * first / 2, rel=1e-5)
    penalty.backward()
    assert reference.grad is None
    assert logits.grad[0, 0].abs().max() > 0.01
    only = torch.tensor([[True, False]])
    assert calc_kl_penalty(PAIR, reference, 1.0, mask=only).item() == pytest.approx(first, rel=1e-5)
    some = torch.randn(2, 5, 100)
    assert calc_kl_penalty(some, some).item() == 0
    with refused("mask: no position counts"):
        calc_kl_penalty(PAIR, reference, mask=~only & only)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # Mean 2/5; squares 2 · .36 + 3 · .16 = 1.2, over 4.
        ([1.0, 1.0, 0.0, 0.0, 0.0], [0.6 / (math.sqrt(0.3) + 1e-4)] * 2 + [-0.4 / (math.sqrt(0.3) + 1e-4)] * 3),
        ([0.0] * 4, [0.0] * 4),
        ([1.0] * 4, [0.0] * 4),
        ([1.0, 0.0, 0.0, 0.0], [0.75 / 0.5001] + [-0.25 / 0.5001] * 3),  # squares .5625 + 3 · .0625 = .75, over 3
        ([0.9] * 3, [0.0] * 3),  # whose mean is not .9 in float32
        ([1.0], [0.0]),
    ],
)
def test_grpo_s_advantages_are_in_units_of_the_sample_s_deviation(rewards: list[float], expected: list[float]) -> None:
    found = compute_grpo_advantages(torch.tensor(rewards)).tolist()
    assert found == pytest.approx(expected, rel=1e-5, abs=0)


def test_the_example_of_eight_responses_half_of_them_right_comes_to_94_hundredths() -> None:
    # As the course rounds it: (1 - .5) / .53.
    found = compute_grpo_advantages(torch.tensor([1.0, 0.0] * 4))
    assert found.tolist() == pytest.approx([0.94, -0.94] * 4, abs=0.01)


def test_group_advantages_are_in_units_of_the_population_s_deviation_group_by_group() -> None:
    # 1 and 0 lie .5 about their mean, 2 and 4 lie 1 about theirs: each pair is ±1.
    assert compute_group_advantages(torch.tensor([1.0, 0.0, 2.0, 4.0]), 2).tolist() == [1, -1, -1, 1]
    equal = torch.tensor([0.9] * 3)
    theirs = (equal - equal.mean()) / equal.std(unbiased=False).clamp_min(1e-6)
    assert theirs.abs().max() > 0.01
    assert compute_group_advantages(equal, 3).tolist() == [0, 0, 0]
    for size in (0, 3):
        with refused(f"group_size = {size}: must divide the number of rewards, 4"):
            compute_group_advantages(torch.tensor([1.0, 0.0, 2.0, 4.0]), size)


def test_the_loss_of_an_online_update_is_a_mean_over_labelled_tokens() -> None:
    # Token 0 at the first position (3/4, reference 1/2), token 1 at the second (1/2, reference 1/2), none at the third.
    logits = torch.cat([PAIR, PAIR[:, :1]], dim=1).requires_grad_()
    reference, labels = torch.zeros(1, 3, 2, requires_grad=True), torch.tensor([[0, 1, -100]])
    loss, parts = compute_grpo_loss(logits, reference, torch.tensor([[0.5, -1.0, 9.0]]), labels, 0.1)
    policy = -(0.5 * math.log(0.75) - math.log(0.5)) / 2
    k3 = (2 / 3 - 1 + math.log(1.5)) / 2
    expected = {"pg_loss": policy, "kl_penalty": k3, "kl_loss": 0.1 * k3}
    assert parts == pytest.approx(expected, rel=1e-5)
    assert loss.item() == pytest.approx(policy + 0.1 * k3, rel=1e-5)
    loss.backward()
    assert reference.grad is None
    assert logits.grad[0, 2].tolist() == [0, 0]
    # d/dlogit of -A log π / 2 is -A (onehot - π) / 2; of .1 k3 / 2 it is .1 (1 - ref/π) (onehot - π) / 2.
    slope = (-0.5 + 0.1 * (1 - 2 / 3)) / 2 * 0.25
    assert logits.grad[0, 0].tolist() == pytest.approx([slope, -slope], rel=1e-5)


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


NEW, REFERENCE = torch.log(torch.tensor([0.6, 0.4, 0.7, 0.3])), torch.log(torch.tensor([0.5, 0.5, 0.6, 0.4]))
ADVANTAGES = torch.tensor([1.2, -0.4, 0.5, -1.0])


def test_the_loss_of_whole_completions_is_the_course_s_own_value() -> None:
    assert grpo_sequence_loss(NEW, REFERENCE, ADVANTAGES, beta=0.1, epsilon=0.2).item() == pytest.approx(
        -0.2233469, abs=1e-6
    )


def test_its_gradient_is_the_advantage_s_where_the_ratio_is_in_bounds_and_the_kl_s_alone_where_it_has_left_them() -> (
    None
):
    # Ratios 1.1, .9, 13/12, .875 are in bounds: dL/dx = (-ρ A + β (1 - 1/ρ)) / 4.
    new = torch.log(torch.tensor([0.55, 0.45, 0.65, 0.35])).requires_grad_()
    grpo_sequence_loss(new, REFERENCE, ADVANTAGES, beta=0.05, epsilon=0.2).backward()
    ratios = [1.1, 0.9, 13 / 12, 0.875]
    expected = [(-r * a + 0.05 * (1 - 1 / r)) / 4 for r, a in zip(ratios, [1.2, -0.4, 0.5, -1.0], strict=True)]
    assert new.grad.tolist() == pytest.approx(expected, rel=1e-4)

    # A completion that is 1.5 times as likely as under the reference, and better than its siblings, is taught no more.
    apart = torch.tensor([math.log(1.5)]).requires_grad_()
    grpo_sequence_loss(apart, torch.zeros(1), torch.ones(1), beta=0.05, epsilon=0.2).backward()
    assert apart.grad.item() == pytest.approx(0.05 * (1 - 1 / 1.5), rel=1e-5)
    with refused("logp_new: no position counts"):
        grpo_sequence_loss(NEW[:0], REFERENCE[:0], ADVANTAGES[:0], beta=0.1, epsilon=0.2)


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


TEXTS = [
    "<think>6 * 4 = 24</think>\n<answer>6 * 4</answer>",
    "<think>Let me see...</think>\n<answer>2 + 3</answer>",
    "The answer is 24",
    "<think>Hmm</think>\n<answer>4 * 6</answer>",
]
SAMPLE = {"input_ids": [1, 2, 3, 4, 5], "nums": [2, 3, 4, 6], "target": 24}
GENERATIONS = [[10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34], [40, 41]]


class Scripted:
    """Decodes to what is written above, as the course's own stand-in does."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def batch_decode(self, ids: object, skip_special_tokens: bool = False) -> list[str]:
        return self.texts


def test_episodes_have_the_course_s_rewards_and_one_advantage_for_all_tokens_of_a_response() -> None:
    episodes, stats = create_grpo_training_episodes([SAMPLE], GENERATIONS, Scripted(TEXTS))  # type: ignore[arg-type]
    assert stats == {
        "rewards": [1.0, 1.0, 0.0, 1.0],
        "format_rewards": [1.0, 1.0, 0.0, 1.0],
        "equation_rewards": [0.0] * 4,  # 6 * 4 uses two of the four numbers
        "response_lengths": [4, 3, 5, 2],
    }
    # Mean .75, deviation of the sample √(.75 / 3) = .5.
    good, bad = 0.25 / 0.5001, -0.75 / 0.5001
    assert episodes["all_response_token_ids"] == GENERATIONS
    assert episodes["all_query_token_ids"] == [SAMPLE["input_ids"]] * 4
    for advantages, expected, length in zip(
        episodes["all_advantages"], [good, good, bad, good], [4, 3, 5, 2], strict=True
    ):
        assert advantages == pytest.approx([expected] * length, rel=1e-5)


def test_episodes_under_the_rule_of_the_prompt_and_with_what_the_prompt_began() -> None:
    cut = [text.removeprefix("<think>") for text in TEXTS]
    made = create_grpo_training_episodes(
        [SAMPLE, SAMPLE], GENERATIONS, Scripted(cut[:2]), 2, rule="subset", prefill="<think>"
    )  # type: ignore[arg-type]
    assert made[1]["equation_rewards"] == [1.0, 0.0] * 2
    assert made[1]["format_rewards"] == [1.0] * 4
    with refused("all_generations: has 3, and 1 samples × generations_per_sample = 4"):
        create_grpo_training_episodes([SAMPLE], GENERATIONS[:3], Scripted(TEXTS))  # type: ignore[arg-type]


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
