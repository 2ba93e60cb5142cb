"""GRPO with one ratio and one KL for a whole completion, both to the reference: what a course writes down."""

import math

import pytest
import torch

from posttrain.algorithms.losses import mean_over_sequences
from posttrain.algorithms.table import build_algorithm
from tests.support.tiny import token_loss

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


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def spread(totals: torch.Tensor) -> torch.Tensor:
    """Log-probs of tokens that add up to those of their completions, no two tokens of one alike."""
    shares = torch.arange(1, len(ROLLOUT) + 1).double()
    return totals[ROLLOUT] * shares / torch.zeros(4).double().index_add(0, ROLLOUT, shares)[ROLLOUT]


def update_loss(config: dict[str, object], logprobs: torch.Tensor) -> torch.Tensor:
    """The loss of an update on four completions, of 1, 3, 2 and 4 tokens; μ is the policy as it is."""
    weights = mean_over_sequences(LENGTHS, torch.ones(4, dtype=torch.bool), max_completion_tokens=9)[ROLLOUT]
    advantages, reference = values(1.2, -0.4, 0.5, -1)[ROLLOUT], spread(values(0.5, 0.5, 0.6, 0.4).log())
    behaviour = logprobs.detach()
    losses = token_loss(build_algorithm(config), logprobs, behaviour, advantages, ROLLOUT, reference=reference)
    return (weights * losses).sum()


def test_the_loss_of_four_completions_is_the_courses_value() -> None:
    # Of the wholes π = (.6, .4, .7, .3) and ref = (.5, .5, .6, .4): ρ = (1.2, .8, 7/6, .75), clipped at .2.
    # -min(ρA, clip(ρ)A) = (-1.44, .32, -.58333, .8), whose mean is -.2258333;
    # k3 = ref/π - 1 - ln(ref/π) = (.0156549, .0268564, .0112936, .0456513), whose mean is .0248640.
    loss = update_loss(COURSE, spread(values(0.6, 0.4, 0.7, 0.3).log()))
    assert loss.item() == pytest.approx(-0.2233469, abs=5e-8)


def test_a_completion_whose_whole_has_left_the_range_learns_from_the_kl_alone() -> None:
    # Completion 0 is 1.3 times as likely as under the reference and wanted: no surrogate; k3's slope is .1 (1 - 1/1.3)
    # under a weight of 1/4.  Completion 3 is .75 times as likely and not wanted: .1 (1 - 1/.75) under 1/4 at every
    # token, as each of four losses with a weight of 1/16 moves with each of the four tokens.
    logprobs = spread(values(0.65, 0.5, 0.6, 0.3).log()).requires_grad_()
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
    reference = spread(values(0.5, 0.5, 0.6, 0.4).log())
    on_policy = {**COURSE, "ratio_to": "behaviour", "kl": None}
    for config in (COURSE, on_policy):
        logprobs = reference.clone().requires_grad_()
        update_loss(config, logprobs).backward()
        expected = -values(1.2, -0.4, 0.5, -1)[ROLLOUT] / 4
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
        logprobs = values(-1 + math.log(2), -1 - math.log(2)).requires_grad_()
        term = build_algorithm({"name": "grpo", "kl": {"coefficient": 1, "level": level}})
        columns = (logprobs.detach(), torch.zeros(2).double(), torch.zeros(2, dtype=torch.int64))
        token_loss(term, logprobs, *columns, reference=values(-1, -1)).sum().backward()
        grads[level] = logprobs.grad.tolist()
    assert grads["token"] == pytest.approx([1 - 1 / 2, 1 - 2], rel=1e-12)
    assert grads["completion"] == pytest.approx([0, 0], abs=1e-12)
