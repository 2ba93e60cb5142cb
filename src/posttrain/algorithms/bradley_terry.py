"""What a reward model is trained by: which of two answers was preferred, and by how much.

Bradley & Terry (1952) take the odds of a preference as the ratio of two strengths; with scores as their logarithms

    P(chosen ≻ rejected) = σ(r_chosen - r_rejected)

Only differences count, so pairs leave the mean of all scores anywhere; `centring` is what holds it at 0.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def bradley_terry(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], margins: Float[Tensor, " pair"]
) -> Float[Tensor, " pair"]:
    """The negative log-likelihood of each preference, in nats.

        L = -log σ(r_c - r_r - m) = softplus(m - (r_c - r_r))

    Scores are logits without a unit of their own; margins m >= 0, in the same, ask for a difference of at least about
    m (Touvron et al. 2023, arXiv:2307.09288, eq. 2; m = 0 is Ouyang et al. 2022, arXiv:2203.02155, eq. 1).  Equal
    scores and no margin give log 2.  Finite for every finite score; its slope in r_c is -σ(m - (r_c - r_r)).
    """
    return F.softplus(margins - (chosen - rejected))


def centring(chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
    """What scores are charged for not lying around 0, for each pair.

        (r_c + r_r)²      Eisenstein et al. 2023, arXiv:2312.09244, eq. 2

    0 where the two scores are each other's opposite; it says nothing of their difference.
    """
    return (chosen + rejected).square()


def preference_probabilities(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]
) -> Float[Tensor, " pair"]:
    """The probability that each chosen answer is preferred, σ(r_c - r_r); 1/2 for equal scores."""
    return torch.sigmoid(chosen - rejected)
