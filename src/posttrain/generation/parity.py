"""Do sampler and trainer compute the same log-probs?  Tested before the first step, monitored at every step.

Both read the same weights: the sampler a token at a time, usually through a cache, the trainer whole sequences.  If one
of them is wrong for a family of models, training uses meaningless ratios.  So a few sequences of mixed lengths are
sampled, one by one and together, and compared with the model's own forward pass on each sequence.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from posttrain.errors import UserError
from posttrain.generation.engine import Engine, sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.models.context import changes_at, num_embeddings
from posttrain.models.forward import Completions, PlainForward
from posttrain.models.model_outputs import cache_refusal
from posttrain.models.native.native_decoder import native_refusal
from posttrain.models.native.native_layers import training_forward
from posttrain.models.policy import Policy
from posttrain.options.rollout import SamplingParams
from posttrain.records import Group, Prompt

Tokens = tuple[int, ...]

EXACT_NATS, BFLOAT16_NATS = 1e-3, 0.1
"""Largest difference of a token's log-prob that rounding explains: a hundred times that of correct models."""
OTHER_ENGINE_NATS = 0.1
"""The same for an engine elsewhere, with other kernels, that states no `logprob_gap`."""
ROUTED_SHARE = 0.95
"""In bfloat16 rounding may send a token to other experts of a mixture, whose log-probs are tenths of a nat off.  For
mixtures the limit holds for this share of all tokens: in correct models .975 were below it."""
SHORT_PROMPTS = (1, 13)
"""Tokens of the tested prompts; one more is as long as the run can reach."""
COMPLETION_TOKENS, GROUP_SIZE = 4, 2
PROBE = GroupRequest(
    group_size=GROUP_SIZE,
    max_completion_tokens=COMPLETION_TOKENS,
    sampling=SamplingParams(),
    key=StreamKey(seed=0, purpose="parity", step=0),
)
USUAL_TOKENS, BEYOND_TOKENS = 512, 64
"""Length of the longest tested sequence if nothing changes with the length, and margin beyond a length where it
does."""


def gap_limit(policy: Policy) -> float:
    """Allowed difference between sampler and trainer of this policy, in nats."""
    return EXACT_NATS if policy.compute_dtype in (torch.float32, torch.float64) else BFLOAT16_NATS


def is_rounded_mixture(policy: Policy) -> bool:
    experts = any("experts" in type(module).__name__.lower() for module in policy.model.modules())
    return experts and gap_limit(policy) == BFLOAT16_NATS


def most_of(gaps: Tensor) -> float:
    return gaps.kthvalue(math.ceil(ROUTED_SHARE * len(gaps))).values.item()


def gap_metrics(policy: Policy, engine: Engine, gaps: Tensor, undropped: Tensor | None) -> dict[str, float]:
    """Metrics of a step's gaps between sampler and trainer, and their limit: the engine's `logprob_gap`, or the usual.

    `gaps` are those of the first update, with dropout where there is some; `undropped` then replaces them, and so do
    those of probes where all tokens of the update are old.
    """
    limit = engine.logprob_gap
    if limit is None:
        limit = gap_limit(policy) if engine.reproducible else max(OTHER_ENGINE_NATS, gap_limit(policy))
    metrics = {"limit": limit}
    if undropped is not None:
        gaps = undropped
        metrics |= {"max": gaps.max().item(), "mean": gaps.mean().item()}
    if is_rounded_mixture(policy):
        metrics["most"] = most_of(gaps)
    return {f"sampling/sampling_logp_difference/{name}": value for name, value in metrics.items()}


def mixture_note(policy: Policy) -> str | None:
    """A note for a policy whose limit holds for most tokens and not for all."""
    if not is_rounded_mixture(policy):
        return None
    return (
        f"mixture of experts in bfloat16: rounding may change experts, so only {ROUTED_SHARE:.0%} of tokens must agree"
        f" within {BFLOAT16_NATS:g} nats in sampler and trainer; with model.dtype: float32 all must, within 0.001"
    )


def engine_in_parity(policy: Policy, *, max_rows: int, longest: int) -> InProcessEngine:
    """An engine whose log-probs agree with the trainer's, for sequences up to `longest` tokens.

    Where they are not, the next slower way is tried: the model's own forward pass, then the same without a cache.  The
    engine's policy has the reason.  Raises UserError if the last one fails too.
    """
    limit, longest = gap_limit(policy), tried_length(policy, longest)
    way: Policy | None = policy
    gap = 0.0
    while way is not None:
        engine = InProcessEngine(way, max_rows=max_rows)
        gap = largest_gap(engine, longest)
        if gap <= limit:
            return engine
        way = slower(way, f"log-probs {{}} are up to {gap:.2g} nats off, and rounding explains {limit:g}")
    family = policy.model.config.model_type
    raise UserError(
        f"model: log-probs of sampler and trainer differ by {gap:.2g} nats in up to {longest} tokens ({family});"
        f" rounding explains {limit:g}.  Use a model of another family, or lower rollout.max_completion_tokens."
    )


def slower(policy: Policy, reason: str) -> Policy | None:
    """The next slower way to sample, with the reason; None if there is none."""
    if native_refusal(policy) is None:
        return replace(policy, native_reason=reason.format("by the native kernel"))
    if policy.forward_reason is None:
        return replace(
            policy,
            forward=PlainForward(policy.model, policy.compute_dtype),
            forward_reason=reason.format("by the faster one"),
            cache_refusal=cache_refusal(policy.model),
        )
    if policy.cache_refusal is None:
        return replace(policy, cache_refusal=reason.format("with one"))
    return None


def tried_length(policy: Policy, longest: int) -> int:
    """Tokens of the longest sequence that is tried: beyond every length within reach at which attention changes."""
    bounds = [bound + BEYOND_TOKENS for bound in changes_at(policy.model.config) if bound < longest]
    return min(longest, max([USUAL_TOKENS, *bounds]))


def largest_gap(engine: InProcessEngine, longest: int) -> float:
    """Greatest difference of a token's log-prob from the model's own, row by row, in nats; see `ROUTED_SHARE`.

    Only the trainer's passes are in inference mode here: the engine's copies of weights are written again later.
    """
    policy = engine.policy
    prompts = list(probe_prompts(policy, longest))
    one = [replace(PROBE, group_size=1, first_draw=draw) for draw in range(len(prompts))]
    together = sample_groups(engine, prompts, PROBE)
    alone = [sample_groups(engine, [prompt], one[draw])[0] for draw, prompt in enumerate(prompts)]
    plain = replace(policy, forward=PlainForward(policy.model, policy.compute_dtype))

    @cache
    @torch.inference_mode()
    def by_itself(prompt: Tokens, tokens: Tokens) -> Tensor:
        return plain.completion_logprobs(Completions([prompt], [tokens], [0])).double().cpu()

    gaps = []
    for groups in (together, alone):
        read, sampled = as_completions(groups), sampled_logprobs(groups)
        with torch.inference_mode():
            trained = replace(policy, forward=training_forward(policy)).completion_logprobs(read).double().cpu()
        rows = zip(read.prompt_of, read.completions, strict=True)
        truth = torch.cat([by_itself(read.prompts[i], each) for i, each in rows])
        gaps += [(each - truth).abs().nan_to_num(nan=torch.inf) for each in (sampled, trained)]
    return max(most_of(each) if is_rounded_mixture(policy) else each.max().item() for each in gaps)


def probed_gaps(policy: Policy, engine: Engine, longest: int) -> Tensor:
    """|log π - log μ| of tokens that the engine samples now after fixed prompts; for steps with only old tokens."""
    groups = sample_groups(engine, list(probe_prompts(policy, tried_length(policy, longest))), PROBE)
    with torch.inference_mode():
        trained = policy.completion_logprobs(as_completions(groups)).double().cpu()
    return (sampled_logprobs(groups) - trained).abs().nan_to_num(nan=torch.inf)


def as_completions(groups: Sequence[Group]) -> Completions:
    tokens = [rollout.tokens for group in groups for rollout in group.rollouts]
    place = [place for place, group in enumerate(groups) for _ in group.rollouts]
    return Completions([group.prompt.tokens for group in groups], tokens, place)


def sampled_logprobs(groups: Sequence[Group]) -> Tensor:
    values = [value for group in groups for rollout in group.rollouts for value in rollout.logprobs]
    return torch.tensor(values, dtype=torch.float64)


def probe_prompts(policy: Policy, longest: int) -> Iterator[Prompt]:
    """Prompts of random tokens, one of them as long as the run or the model's context allows."""
    dice = random.Random(0)
    vocabulary = num_embeddings(policy.model)
    most = max(1, min(longest, policy.max_positions) - COMPLETION_TOKENS)
    for length in sorted({min(each, most) for each in (*SHORT_PROMPTS, most)}):
        tokens = tuple(dice.randrange(vocabulary) for _ in range(length))
        yield Prompt(id=f"probe of {length} tokens", text="", tokens=tokens)
