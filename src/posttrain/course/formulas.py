"""Advantages, KL and losses that courses have their readers write, on tensors.

Each is a few lines over the functions that the loop of this library uses.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.algorithms.advantages import group_zscore
from posttrain.algorithms.kl import k3
from posttrain.algorithms.losses import ClipRange, clipped_surrogate
from posttrain.errors import UserError

IGNORED = -100
"""The label of a position that carries no loss."""
EPSILON = 1e-4
"""Added to the deviation by the course and by TRL, in units of reward."""


@torch.no_grad()
def compute_advantages(
    values: Float[Tensor, "batch time"], rewards: Float[Tensor, " batch"], prefix_len: int
) -> Float[Tensor, "batch generated"]:
    """How much better each generated token was than a value head had expected, one step ahead.

        A_t = V(s_{t+1}) - V(s_t),  and  r - V(s_t) for the last token        (γ = 1, λ = 0)

    V(s_t) is the value at the token before t; the first `prefix_len` tokens are the prompt's.  No gradient.  The
    course's own takes `values[:, prefix_len:]` with the reward, one column too many, and ends in an error of shapes;
    its value loss is the square of the result, without a gradient.
    """
    if not 1 <= prefix_len < values.shape[1]:
        rule = f"a row of {values.shape[1]} tokens has a prompt and a completion"
        raise UserError(f"prefix_len = {prefix_len}: {rule}.  Use 1 to {values.shape[1] - 1}.")
    return torch.cat([values[:, prefix_len:-1], rewards[:, None]], dim=1) - values[:, prefix_len - 1 : -1]


def calc_kl_penalty(
    logits: Float[Tensor, "batch time vocab"],
    ref_logits: Float[Tensor, "batch time vocab"],
    kl_coef: float = 0.1,
    *,
    mask: Bool[Tensor, "batch time"] | None = None,
) -> Float[Tensor, ""]:
    """The KL of whole next-token distributions to the reference, times its coefficient: the mean over positions.

        kl_coef · mean_t Σ_v π(v) (log π(v) - log ref(v)),   in nats

    `mask` says which positions count, those that predict a generated token; without one all do.  Only the policy has a
    gradient.  The course uses the same formula wrongly: it slices from the first generated token and not from the one
    before, which predicts it; it counts padding; and its logits are computed under `no_grad`.  In a recipe:
    `algorithm.kl.estimator = full`.
    """
    logprobs, reference = logits.log_softmax(dim=-1), ref_logits.detach().log_softmax(dim=-1)
    divergence = (logprobs.exp() * (logprobs - reference)).sum(dim=-1)
    counted = divergence.flatten() if mask is None else divergence[mask]
    require_not_empty(counted, "mask")
    return kl_coef * counted.mean()


def compute_grpo_advantages(rewards: Float[Tensor, " group"]) -> Float[Tensor, " group"]:
    """Advantages of the completions of one prompt: above their mean, in units of the sample's deviation.

        A_i = (r_i - mean r) / (std r + 1e-4),   std with G - 1

    Equal rewards give exactly 0.  For equal rewards the course's version divides rounding error by 1e-4; for a group of
    one it returns NaN.  In a recipe: `algorithm.deviation = sample`, `algorithm.deviation_epsilon = 1e-4`.
    """
    return group_zscore(rewards[None], deviation="sample", epsilon=EPSILON)[0]


def compute_group_advantages(rewards: Float[Tensor, " rollout"], group_size: int) -> Float[Tensor, " rollout"]:
    """Advantages of the completions of several prompts, group after group: in units of the population's deviation.

        A_i = (r_i - mean r) / std r,   std with G; equal rewards are exactly 0

    The course's version bounds the deviation from below by 1e-6 instead.  Rewards that differ only by rounding, as
    three of .9 differ from their mean, then get an advantage.  In a recipe: `algorithm.name = grpo`.
    """
    if group_size < 1 or len(rewards) % group_size:
        raise UserError(f"group_size = {group_size}: must divide the number of rewards, {len(rewards)}.")
    return group_zscore(rewards.view(-1, group_size)).flatten()


def compute_grpo_loss(
    logits: Float[Tensor, "batch time vocab"],
    ref_logits: Float[Tensor, "batch time vocab"],
    advantages: Float[Tensor, "batch time"],
    labels: Int64[Tensor, "batch time"],
    kl_coef: float = 0.001,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """The loss of a fully online GRPO update, and its parts: the mean over all tokens that have a label.

        L = mean_t(-A_t log π(y_t)) + kl_coef · mean_t k3(log π(y_t), log ref(y_t))

    `labels[:, t]` is the token that `logits[:, t]` predict, so a row of tokens is shifted by one first; -100 marks no
    label.  The parts are `pg_loss`, `kl_penalty` in nats and `kl_loss`, the penalty times its coefficient.  The
    course's looks log-probs up before it masks: -100 is not an index, so its example ends in an error.  It divides the
    KL by its coefficient to report it, which 0 ends too, and lets the gradient into the reference.
    """
    kept = labels != IGNORED
    require_not_empty(labels[kept], "labels")

    def of_labels(some: Tensor) -> Float[Tensor, " token"]:
        return some[kept].log_softmax(dim=-1).gather(1, labels[kept][:, None])[:, 0]

    logprobs, reference = of_labels(logits), of_labels(ref_logits).detach()
    policy_loss, penalty = -(advantages[kept] * logprobs).mean(), k3(logprobs, reference).mean()
    parts = {"pg_loss": policy_loss, "kl_penalty": penalty, "kl_loss": kl_coef * penalty}
    return policy_loss + kl_coef * penalty, {name: part.item() for name, part in parts.items()}


def grpo_sequence_loss(
    logp_new: Float[Tensor, " rollout"],
    logp_ref: Float[Tensor, " rollout"],
    advantages: Float[Tensor, " rollout"],
    beta: float,
    epsilon: float,
) -> Float[Tensor, ""]:
    """The course's loss of whole completions, whose ratio is to the *reference*: a mean over completions.

        L = mean_i( -min(ρ_i A_i, clip(ρ_i, 1 ± ε) A_i) + β (e^{-x_i} - 1 + x_i) )
        x = Σ_t log π - Σ_t log ref,   ρ = e^x

    Summed over a completion, x leaves log(1 ± ε) after a few updates, and the clip then stops all learning in the
    direction of the advantage.  The course does not see it: it calls `model.disable_adapter()`, a context manager,
    without entering it, so that its reference is the policy itself and ρ is always 1.  In a recipe: `algorithm = {name:
    gspo, sequence_ratio: product, ratio_to: reference, clip_low: 0.2, clip_high: 0.2, kl: {coefficient: 0.05, level:
    completion}}`.
    """
    require_not_empty(logp_new, "logp_new")
    each = torch.arange(len(logp_new), device=logp_new.device)
    reference = logp_ref.detach()
    surrogate = clipped_surrogate(logp_new, reference, advantages, each, clip=ClipRange(low=epsilon, high=epsilon))
    return (surrogate + beta * k3(logp_new, reference)).mean()


def require_not_empty(counted: Tensor, name: str) -> None:
    if not counted.numel():
        raise UserError(f"{name}: no position counts, so the mean is undefined.  Skip such a batch.")
