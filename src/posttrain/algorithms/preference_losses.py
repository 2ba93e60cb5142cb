"""Losses of preference pairs: a policy learns to prefer one completion of a prompt to another, relative to a reference.

All of them are functions of one number per pair, the gap

    h = log π(y_w|x)/π_ref(y_w|x) - log π(y_l|x)/π_ref(y_l|x)      y_w chosen, y_l rejected; in nats

and β h is how much more implicit reward the chosen completion has (Rafailov et al. 2023, arXiv:2305.18290).  Numbers
are those of whole completions, stop token included, or their means per token (`per_token`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


class OfPairs(NamedTuple):
    """A number of each completion of some pairs, such as its log-prob."""

    chosen: Float[Tensor, " pair"]
    rejected: Float[Tensor, " pair"]


LossOfGaps = Callable[..., Float[Tensor, " pair"]]
"""(gaps, *, beta) -> a loss per pair."""


def log_ratios(policy: OfPairs, reference: OfPairs) -> OfPairs:
    """log π/π_ref of each completion, in nats; times β, it is the implicit reward, up to a constant per prompt."""
    return OfPairs(policy.chosen - reference.chosen, policy.rejected - reference.rejected)


def per_token(logprobs: OfPairs, lengths: OfPairs) -> OfPairs:
    """Mean log-probs, in nats per token, so that a long completion counts no more than a short one.

        log π(y|x) / |y|        |y|: tokens, stop token included

    In the sigmoid loss: length-normalised DPO, Lambert et al. 2024 (Tülu 3), arXiv:2411.15124.  In `ipo`: what its
    authors use, by a comment in TRL 1.16's trainer, although their paper does not say so.
    """
    return OfPairs(logprobs.chosen / lengths.chosen, logprobs.rejected / lengths.rejected)


def sigmoid(gaps: Float[Tensor, " pair"], *, beta: float) -> Float[Tensor, " pair"]:
    """DPO: the chosen completion is preferred with probability σ(β h), and that is made likely.

        L = -log σ(β h)        dL/dh = -β (1 - σ(β h))

    Rafailov et al. 2023, arXiv:2305.18290.  log 2 where policy and reference agree; it keeps falling as h grows.
    """
    return -F.logsigmoid(beta * gaps)


def hinge(gaps: Float[Tensor, " pair"], *, beta: float) -> Float[Tensor, " pair"]:
    """SLiC's rank loss on log-ratios: a pair has no gradient once its gap is 1/β.

        L = max(0, 1 - β h)        dL/dh = -β where β h < 1, else 0

    Zhao et al. 2023 (SLiC-HF), arXiv:2305.10425; relative to a reference as by Liu et al. 2023 (RSO), arXiv:2309.06657.
    """
    return F.relu(1 - beta * gaps)


def ipo(gaps: Float[Tensor, " pair"], *, beta: float) -> Float[Tensor, " pair"]:
    """IPO: the target of the gap is exactly 1/(2β), so that even certain preferences keep the policy close.

        L = (h - 1/(2β))²        dL/dh = 2 (h - 1/(2β))

    Azar et al. 2023, arXiv:2310.12036, eq. 17, whose τ is β here.  In nats², not dimensionless as the others are.
    """
    return (gaps - 1 / (2 * beta)).square()


PREFERENCE_LOSSES: dict[str, LossOfGaps] = {"sigmoid": sigmoid, "ipo": ipo, "hinge": hinge, "robust": sigmoid}
"""`robust` is `sigmoid` whose smoothing is unbiased."""


def smoothed(
    loss: LossOfGaps, gaps: Float[Tensor, " pair"], *, beta: float, label_smoothing: float
) -> Float[Tensor, " pair"]:
    """The loss expected where a share ε of the pairs is labelled the wrong way round.

        L_ε(h) = (1 - ε) L(h) + ε L(-h)

    With `sigmoid`: conservative DPO, Mitchell 2023, "A note on DPO with noisy preferences", with its minimum at σ(β h)
    = 1 - ε.  With `ipo` the minimum is at h = (1 - 2ε)/(2β), as its theory requires for preferences that hold with
    probability 1 - ε.  ε = 0 is the loss itself.
    """
    if label_smoothing == 0:
        return loss(gaps, beta=beta)
    return (1 - label_smoothing) * loss(gaps, beta=beta) + label_smoothing * loss(-gaps, beta=beta)


def unbiased(
    loss: LossOfGaps, gaps: Float[Tensor, " pair"], *, beta: float, label_smoothing: float
) -> Float[Tensor, " pair"]:
    """The loss whose expectation over labels that are wrong with probability ε is that of the right labels.

        L_ε(h) = ((1 - ε) L(h) - ε L(-h)) / (1 - 2ε)

    Robust DPO, Chowdhury et al. 2024, arXiv:2403.00409, with L = `sigmoid`.  Below 0 where h is large; ε = 0 is L.
    """
    kept, flipped = loss(gaps, beta=beta), loss(-gaps, beta=beta)
    return ((1 - label_smoothing) * kept - label_smoothing * flipped) / (1 - 2 * label_smoothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairObjective:
    """The loss of an update on pairs."""

    loss: LossOfGaps = sigmoid
    beta: float = 0.1
    """Implicit reward per nat; a larger one keeps the policy nearer to the reference."""
    label_smoothing: float = 0.0
    unbiased_smoothing: bool = False
    """Whether ε removes the bias of wrong labels from the loss (`unbiased`), or smooths the labels (`smoothed`)."""
    length_normalized: bool = False
    """Whether log-probs are means per token."""
    nll_weight: float = 0.0
    """Weight of the negative log-prob per token of the chosen completion, added to the loss of the pair."""

    def __post_init__(self) -> None:
        assert 0 < self.beta < math.inf
        assert 0 <= self.label_smoothing < 0.5

    def losses(self, policy: OfPairs, reference: OfPairs, lengths: OfPairs) -> Float[Tensor, " pair"]:
        """The loss of each pair, of log-probs of whole completions.

            L = L_ε(h) - α log π(y_w|x) / |y_w|        α: nll_weight

        The second term: Pang et al. 2024 (Iterative RPO), arXiv:2404.19733, which divide by the prompt's length too.
        """
        ratios = self.log_ratios(policy, reference, lengths)
        gaps = ratios.chosen - ratios.rejected
        smoothing = unbiased if self.unbiased_smoothing else smoothed
        losses = smoothing(self.loss, gaps, beta=self.beta, label_smoothing=self.label_smoothing)
        if self.nll_weight == 0:
            return losses
        return losses - self.nll_weight * policy.chosen / lengths.chosen

    def log_ratios(self, policy: OfPairs, reference: OfPairs, lengths: OfPairs) -> OfPairs:
        """log π/π_ref as the loss takes it."""
        ratios = log_ratios(policy, reference)
        return per_token(ratios, lengths) if self.length_normalized else ratios


def implicit_rewards(ratios: OfPairs, *, beta: float) -> OfPairs:
    """r = β log π/π_ref of each completion, dimensionless."""
    return OfPairs(beta * ratios.chosen, beta * ratios.rejected)


def ranked_right(rewards: OfPairs) -> Float[Tensor, " pair"]:
    """1 where the chosen completion has more implicit reward than the rejected one, 0 where less, ½ where as much.

    ½, so that a policy that is still its reference has an accuracy of ½ and not of 0.
    """
    return 0.5 * (1 + torch.sign(rewards.chosen - rewards.rejected))


# Of a reward model, whose scores r are trained by which answer was preferred and by how much.  Bradley & Terry (1952):
# P(chosen ≻ rejected) = σ(r_c - r_r).  Only differences count; `centring` holds the mean of all scores at 0.


def bradley_terry(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], margins: Float[Tensor, " pair"]
) -> Float[Tensor, " pair"]:
    """The negative log-likelihood of each preference, in nats.

        L = -log σ(r_c - r_r - m) = softplus(m - (r_c - r_r))

    Scores are logits without a unit; margins m >= 0, also logits, ask for a difference of at least about m (Touvron et
    al. 2023, arXiv:2307.09288, eq. 2; m = 0 is Ouyang et al. 2022, arXiv:2203.02155, eq. 1).  Equal scores and no
    margin give log 2.  Finite for every finite score; its slope in r_c is -σ(m - (r_c - r_r)).
    """
    return F.softplus(margins - (chosen - rejected))


def centring(chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
    """The penalty of each pair for scores that are not centred at 0.

        (r_c + r_r)²      Eisenstein et al. 2023, arXiv:2312.09244, eq. 2

    0 if the two scores are opposite; their difference does not matter.
    """
    return (chosen + rejected).square()
