"""Losses of pairs agree with slow float64 twins, and with the formulas that TRL 1.16's trainer has, padding and all."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithms.preference_losses import PREFERENCE_LOSSES, OfPairs, PairObjective

SEEDS = st.integers(0, 2**32 - 1)


class Rows:
    """log-probs of every token of some pairs as a padded batch holds them: chosen rows first, then rejected ones."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.count = int(rng.integers(1, 5))
        width = int(rng.integers(2, 8))
        self.mask = np.arange(width) < rng.integers(1, width + 1, size=(2 * self.count, 1))
        self.policy, self.reference = (-rng.exponential(1, size=self.mask.shape) for _ in range(2))

    def sums(self, logprobs: np.ndarray) -> OfPairs:
        return self.halves((logprobs * self.mask).sum(axis=1))

    def halves(self, column: np.ndarray) -> OfPairs:
        return OfPairs(*(torch.from_numpy(half.astype(float)) for half in np.split(column, 2)))

    def ours(self, **options: object) -> np.ndarray:
        lengths = self.halves(self.mask.sum(axis=1))
        objective = PairObjective(**options)
        return objective.losses(self.sums(self.policy), self.sums(self.reference), lengths).numpy()


def twin(rows: Rows, row: int, name: str, *, beta: float, smoothing: float, normalized: bool) -> float:
    """The loss of one pair from probabilities: no logarithm of a sigmoid, no sum of logs but that of each answer."""
    gap = 0.0
    for sign, answer in ((1, row), (-1, row + rows.count)):
        ratio = math.prod(
            math.exp(p) / math.exp(r)
            for p, r, there in zip(rows.policy[answer], rows.reference[answer], rows.mask[answer], strict=True)
            if there
        )
        gap += sign * math.log(ratio) / (rows.mask[answer].sum() if normalized else 1)

    def loss(h: float) -> float:
        if name in ("sigmoid", "robust"):
            return -math.log(math.exp(beta * h) / (math.exp(beta * h) + 1))
        return max(0.0, 1 - beta * h) if name == "hinge" else (h - 0.5 / beta) ** 2

    if name == "robust":
        return ((1 - smoothing) * loss(gap) - smoothing * loss(-gap)) / (1 - 2 * smoothing)
    return (1 - smoothing) * loss(gap) + smoothing * loss(-gap)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.15])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@settings(max_examples=20)
@given(seed=SEEDS)
def test_every_loss_is_that_of_its_twin(name: str, smoothing: float, normalized: bool, seed: int) -> None:
    rows = Rows(seed)
    found = rows.ours(
        loss=PREFERENCE_LOSSES[name],
        beta=0.4,
        label_smoothing=smoothing,
        unbiased_smoothing=name == "robust",
        length_normalized=normalized,
    )
    expected = [
        twin(rows, row, name, beta=0.4, smoothing=smoothing, normalized=normalized) for row in range(rows.count)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def trl(rows: Rows, loss_type: str, beta: float) -> torch.Tensor:
    """What TRL 1.16's `DPOTrainer` computes of such a batch, its loss types written out again."""
    policy, reference, mask = (torch.from_numpy(each) for each in (rows.policy, rows.reference, rows.mask))
    chosen, rejected = ((policy * mask).sum(1) - (reference * mask).sum(1)).chunk(2)
    chosen_length, rejected_length = mask.sum(1).clamp(min=1.0).chunk(2)
    delta = chosen - rejected
    mean_delta = chosen / chosen_length - rejected / rejected_length
    return {
        "sigmoid": -torch.nn.functional.logsigmoid(beta * delta),
        "hinge": torch.relu(1 - beta * delta),
        "ipo": (mean_delta - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": -torch.nn.functional.logsigmoid(beta * mean_delta),
    }[loss_type]


@pytest.mark.parametrize(
    ("loss_type", "options"),
    [
        ("sigmoid", {}),
        ("hinge", {"loss": PREFERENCE_LOSSES["hinge"]}),
        ("ipo", {"loss": PREFERENCE_LOSSES["ipo"], "length_normalized": True}),
        ("sigmoid_norm", {"length_normalized": True}),
    ],
)
@settings(max_examples=20)
@given(seed=SEEDS, beta=st.floats(0.05, 3))
def test_trl_s_loss_types_are_ours(loss_type: str, options: dict[str, object], seed: int, beta: float) -> None:
    rows = Rows(seed)
    np.testing.assert_allclose(rows.ours(beta=beta, **options), trl(rows, loss_type, beta).numpy(), rtol=1e-12, atol=0)
