"""How far the sampler's log-probs are from the trainer's, where an update cannot tell: an adapter's dropout."""

from jaxtyping import Float64
from torch import Tensor

from posttrain.models.adapters.lora import drops
from posttrain.training.learner import CreditedStep, Learner
from posttrain.training.update import group_logprobs


def undropped_gaps(learner: Learner, credited: CreditedStep) -> Float64[Tensor, " token"] | None:
    """|log π - log μ| of tokens of a step before its first update, without dropout; None where updates drop nothing.

    Of all tokens where log π is known, else of the first group, which is scored for this alone.
    """
    if not drops(learner.policy.model):
        return None
    columns = credited.groups.columns
    logprobs = columns.proximal_logprobs
    if logprobs is None:
        settings = learner.settings
        logprobs = group_logprobs(
            learner.policy,
            credited.groups.groups[:1],
            temperature=settings.temperature,
            max_tokens=settings.update.tokens_per_microbatch,
        )
    return (logprobs - columns.behaviour_logprobs[: len(logprobs)]).abs()
