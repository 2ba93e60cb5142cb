"""A policy: a causal language model, its tokenizer and its stop tokens.

`logit_faults` runs a model once to check that it is causal and that its logits are those of our output layer.
"""

import copy
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models import model_outputs
from posttrain.models.adapters.adaptable import CANNOT_READ
from posttrain.models.adapters.lora import PeftDropout
from posttrain.models.adapters.peft_layers import adapted_names, torch_dropouts
from posttrain.models.context import context_of, fix_angles, num_embeddings
from posttrain.models.forward import (
    CompletionBatch,
    ForwardNeeds,
    ForwardPass,
    PlainForward,
    SharedPromptForward,
    next_logits,
)
from posttrain.models.shared_prompt.families import shared_prompt_refusal
from posttrain.ranks.group import ONE_RANK, RankGroup

SHARDED = "_sharded_forward"
"""Attribute of a model that `models.sharding` has split over ranks: its forward pass."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One set of weights, shared by trainer and sampler."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    """Every token that ends a completion."""
    compute_dtype: torch.dtype
    """Type of matrix products and attention; weights and sums stay float32."""
    forward: ForwardPass
    """Log-probs of completions for losses and measurements; replaceable, see `ForwardPass`."""
    forward_reason: str | None
    """Why it is the model's own forward pass; None for the faster shared-prompt one."""
    cache_refusal: str | None = None
    """Why the model's own forward pass samples without a cache, whole rows for every token; None if it has one, and for
    the shared-prompt pass."""
    native_reason: str | None = "engine.native is false"
    """Why the native kernel does not sample, score and train; None if it may (`models.native`)."""
    context: int | None = None
    """The chosen limit of prompt and completion together; None means the model's own."""
    stored_dtype: torch.dtype | None = None
    """The type in which the weights were stored, and are saved; None means their type in memory."""
    ranks: RankGroup = ONE_RANK
    """The processes that share its passes over tokens."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    @cached_property
    def max_positions(self) -> int:
        """Longest prompt and completion together, in tokens; see `models.context`."""
        return context_of(self.model.config, self.context)

    @property
    def output_layer(self) -> model_outputs.OutputLayer:
        return model_outputs.output_layer_of(self.model, self.compute_dtype)

    @property
    def num_logits(self) -> int:
        return int(self.model.get_output_embeddings().out_features)

    @property
    def hidden_width(self) -> int:
        return int(self.model.get_output_embeddings().in_features)

    def completion_logprobs(self, batch: CompletionBatch, *, temperature: float = 1.0) -> Float[Tensor, " token"]:
        """log π of each sampled token in nats, completion after completion, with its gradient."""
        logprobs = self.forward.completion_logprobs(batch, ForwardNeeds(temperature=temperature)).logprobs
        assert logprobs is not None
        return logprobs

    def require_as_made(self) -> None:
        """Reject a model that got an adapter or a hook later, which would not run.  It takes milliseconds.

        A sharded model has hooks; its layers were checked before it got them.
        """
        model, forward = self.model, self.forward
        is_whole = SHARDED not in vars(model)
        faults = [f"{name} has got an adapter with dropout" for name, *_ in torch_dropouts(model)]
        if any(module.training for module in model.modules()):
            faults.insert(0, "it has layers in training mode, whose dropout would be on")
        if isinstance(forward, SharedPromptForward):
            changed = sorted(adapted_names(model) ^ forward.adapted)
            faults[:0] = [f"{name} has got or lost an adapter" for name in changed]
            refusal = shared_prompt_refusal(model) if type(forward) is SharedPromptForward and is_whole else None
            faults[:0] = [] if refusal is None else [refusal]
        if faults:
            remedy = "Make the policy again after that, by posttrain.as_policy(policy.model, policy.tokenizer)."
            raise UserError(f"policy: its model has changed since the policy was made: {faults[0]}.  {remedy}")
        if isinstance(forward, SharedPromptForward | PlainForward) and is_whole:
            model_outputs.require_output_layer(model)

    def copy(self) -> "Policy":
        """The policy with its own weights, through the same forward pass."""
        model, forward = copy.deepcopy((self.model, self.forward))
        return replace(self, model=model, forward=forward)


def as_policy(
    model: PreTrainedModel | nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    forward: Literal["auto", "plain"] = "auto",
    context: int | None = None,
    stop_tokens: Sequence[str] = (),
) -> Policy:
    """Make a policy of your model object, for training, sampling and evaluation from Python.

    Any causal language model of transformers, with or without an adapter; of a `PeftModel` the base model, which holds
    the adapter's layers.  Parameters that require a gradient are trained.  Add adapters and hooks before this call; a
    run refuses later ones.

    `dtype` is the type of matrix products and attention: "bfloat16" over the weights in their type, "float32" the
    weights' type, "auto" bfloat16 on CUDA and the weights' type on a CPU.  `forward="plain"` always uses the model's
    own forward pass.  `context` limits the tokens of prompt and completion together, and fixes rotary angles that
    depend on it (`longrope`, `dynamic`); the default is the model's context, and for `longrope` the original one.
    `stop_tokens` are further texts of one token each that end a completion.  `gradient_checkpointing_enable()` of the
    model is respected.  The model is put into eval mode: its dropout is always off; an adapter's acts in updates.  It
    stays on its device; a recipe that names another `model.device` is refused.

    Raises UserError for a model whose logits are not those of one linear layer, optionally soft-capped or scaled.
    """
    model = without_wrapper(model)
    model_outputs.require_output_layer(model)
    model_outputs.release_inputs(model)
    model.eval()
    for name, adapter, dropout in torch_dropouts(model):  # which would not drop by token
        cast(Any, model.get_submodule(name)).lora_dropout[adapter] = PeftDropout(dropout.p, name).eval()
    fix_angles(model, context_of(model.config, context))
    compute_dtype = chosen_dtype(dtype, model.dtype, model.device)
    for fault in logit_faults(model, compute_dtype):
        raise UserError(f"model: a {type(model).__name__} {fault}")
    reason = "forward = plain was chosen" if forward == "plain" else shared_prompt_refusal(model)
    chosen = SharedPromptForward if reason is None else PlainForward
    return Policy(
        model=model,
        tokenizer=tokenizer,
        stop_ids=stop_ids(model, tokenizer, stop_tokens),
        compute_dtype=compute_dtype,
        forward=chosen(model, compute_dtype),
        forward_reason=reason,
        cache_refusal=None if reason is None else model_outputs.cache_refusal(model),
        context=context,
    )


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the names, shapes and sums of all weights: quick, and other weights have others."""
    sums = [(name, [*each.shape], each.detach().double().sum().item()) for name, each in model.named_parameters()]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


def chosen_dtype(name: str, weights: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of matrix products that `auto`, `float32` or `bfloat16` means for weights of this type on this device.

    float32 does not narrow: products of float64 weights are in float64.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and weights == torch.float32 else weights
    if name == "bfloat16":
        return torch.bfloat16
    if name != "float32":
        raise UserError(f"dtype = {name}: unknown type.  Use auto, float32 or bfloat16.")
    if weights in (torch.bfloat16, torch.float16):
        held = str(weights).removeprefix("torch.")
        raise UserError(f"dtype = float32: the model's weights are {held}.  Load them in float32, or remove dtype.")
    return weights


def without_wrapper(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a LoRA `PeftModel`, with its adapter; any other transformers model unchanged."""
    peft = sys.modules.get("peft")  # such a model has imported it
    if peft is not None and isinstance(model, peft.PeftModel):
        for config in model.peft_config.values():
            if config.peft_type != "LORA" or getattr(config, "alora_invocation_tokens", None) is not None:
                raise UserError(
                    f"model: a PeftModel of type {config.peft_type} may do more than its layers do; only plain LoRA is"
                    " unwrapped.  If its layers are everything, give `model.get_base_model()`."
                )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        raise UserError(f"model: a {kind} is not a transformers model.  Give one that `AutoModelForCausalLM` makes.")
    return model


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = ()) -> tuple[int, ...]:
    """The stop tokens of generation config, model config, tokenizer and texts, ascending."""
    generation = model.generation_config.eos_token_id if model.generation_config is not None else None
    own = (generation, getattr(model.config, "eos_token_id", None), tokenizer.eos_token_id)
    named = (*own, [single_token(tokenizer, text) for text in texts])
    return united_stop_ids(named, model.name_or_path or "the model")


def united_stop_ids(named: Iterable[int | Sequence[int] | None], model: str) -> tuple[int, ...]:
    """All stop tokens of some places, each with one, several or none, in ascending order."""
    ids: set[int] = set()
    for each in named:
        if each is not None:
            ids.update([each] if isinstance(each, int) else each)
    if not ids:
        fault = "neither its config nor its tokenizer names an end-of-text token, so completions could not stop"
        raise UserError(f"{model}: {fault}.  Set model.stop_tokens, or eos_token_id in generation_config.json.")
    return tuple(sorted(ids))


def single_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """The token of a text.  Raises UserError if it is several or none."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = ", ".join(repr(tokenizer.decode([each])) for each in ids)
        fault = f"{text!r} is {len(ids)} tokens of this model{f' ({pieces})' if ids else ''}, not one"
        remedy = "Use a special token of the tokenizer, such as its end-of-turn token."
        raise UserError(f"model.stop_tokens: {fault}.  {remedy}")
    return ids[0]


EXACT_TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2
"""Rounding as a share of the largest logit: in float32, and for weights in a half-precision type."""
WITHOUT_GRADIENT = {"reformer": "computes gradients only in training mode, with dropout"}
"""Families that cannot be trained with dropout off, and why."""


@torch.no_grad()
def logit_faults(model: PreTrainedModel, compute_dtype: torch.dtype) -> Iterator[str]:
    """Whether the model reads later tokens, computes logits beyond its output layer, or fails in this type.

    The model itself is run on two rows of three tokens that differ in the last: no list of families is complete.
    """
    if model.config.is_encoder_decoder:
        yield "reads prompts with an encoder.  Use a causal language model."
    if model.config.model_type in WITHOUT_GRADIENT:
        yield f"{WITHOUT_GRADIENT[model.config.model_type]}.  Use a model of another family."
    halves = torch.bfloat16 in {parameter.dtype for parameter in model.parameters()}  # some matrices are held in it
    # Not padding, which transformers warns about.
    first, second, *last = [token for token in range(1, 6) if token != getattr(model.config, "pad_token_id", None)][:4]
    rows = torch.tensor([[first, second, third] for third in last], device=model.device) % num_embeddings(model)
    dtype = torch.bfloat16 if halves else model.dtype
    own = own_logits(model, rows, dtype)
    if own.isnan().any():
        yield "computes NaN for a text of three tokens: its weights hold NaN or infinity.  Use other weights."
    bound = own.abs().max() * (EXACT_TOLERANCE if dtype in (torch.float32, torch.float64) else HALF_TOLERANCE)
    if (own[0, :2] - own[1, :2]).abs().max() > bound:
        remedy = "Set is_decoder in its config, if its family has that."
        yield f"reads tokens that come later, so it is not causal.  {remedy}"
    ours = plain_logits(model, rows, dtype)
    if ours.shape != own.flatten(0, 1).shape or (ours - own.flatten(0, 1)).abs().max() > bound:
        yield (
            "does not compute its logits from its last hidden states with one matrix, a bias, a scale and a soft cap."
            "  Use a model of another family."
        )
    if torch.bfloat16 == compute_dtype != dtype:
        own_logits(model, rows, compute_dtype)
        plain_logits(model, rows, compute_dtype)


def own_logits(
    model: PreTrainedModel, rows: Int64[Tensor, "row time"], dtype: torch.dtype
) -> Float[Tensor, "row time vocab"]:
    mixed = dtype == torch.bfloat16 != model.dtype  # products in bfloat16 over other weights
    with explaining_errors(model, dtype), torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=mixed):
        logits: Tensor = model(input_ids=rows, use_cache=False).logits
        return logits


def plain_logits(
    model: PreTrainedModel, rows: Int64[Tensor, "row time"], dtype: torch.dtype
) -> Float[Tensor, "token vocab"]:
    """The logits of some rows by our plain forward pass."""
    read = [tuple(row) for row in rows.tolist()]
    with explaining_errors(model, dtype):
        return next_logits(PlainForward(model, dtype), [row[:1] for row in read], [(*row[1:], 0) for row in read])


@contextmanager
def explaining_errors(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Raise a model's errors for a text of three tokens as one UserError with the remedy."""
    try:
        yield
    except UserError:
        raise
    except CANNOT_READ as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        remedy = "Set it up before making a policy, or use a text-only model."
        if dtype == torch.bfloat16 != model.dtype:
            remedy = "Its layers do not support bfloat16 products over other weights: set model.dtype to float32."
        kind = type(model).__name__
        raise UserError(f"model: a {kind} cannot read a text of three tokens ({said}).  {remedy}") from error
