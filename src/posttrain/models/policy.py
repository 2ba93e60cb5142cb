"""A policy: a causal language model, its tokenizer and its stop tokens, from a folder or from the package.

`require_causal_logits` runs a model once to check that it is causal and that its logits are those of our output layer.
"""

import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models.adapters.peft_layers import adapted_names, take_dropouts, torch_dropouts
from posttrain.models.context import context_of, fix_angles, num_embeddings
from posttrain.models.forward import (
    CompletionBatch,
    Completions,
    ForwardNeeds,
    ForwardPass,
    PlainForward,
    SharedPromptForward,
)
from posttrain.models.model_outputs import cache_refusal, release_inputs
from posttrain.models.output_layer import OutputLayer, output_layer_of, require_output_layer
from posttrain.models.shared_prompt.families import shared_prompt_refusal


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is trained and sampled: one set of weights, shared by both."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    """Every token that ends a completion: the model may name several."""
    compute_dtype: torch.dtype
    """Arithmetic of matrix products and attention; weights and sums stay float32."""
    forward: ForwardPass
    """Log-probs of completions for losses and measurements; replaceable, see `ForwardPass`."""
    forward_reason: str | None
    """Why that is the model's own forward pass and not the quicker shared-prompt one; None where it is that one."""
    cache_refusal: str | None = None
    """Why the model's own forward pass samples without a cache, whole rows again for every token; None where it has one
    or where the quicker pass is taken."""
    context: int | None = None
    """The longest prompt and completion together that was asked for; None means the model's own choice."""
    stored_dtype: torch.dtype | None = None
    """The type of the weights in the folder that they were loaded from, and are saved in; None means as they are."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def max_positions(self) -> int:
        """Longest prompt and completion together, in tokens; see `models.context`."""
        return context_of(self.model.config, self.context)

    @property
    def output_layer(self) -> OutputLayer:
        return output_layer_of(self.model, self.compute_dtype)

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
        """Raise UserError where the model has got an adapter or a hook since, which the policy would run without.

        Asked where a session is made, before every rollout and with every step's weights: milliseconds each time.
        """
        found = shared_prompt_refusal(self.model) if type(self.forward) is SharedPromptForward else None
        if found is None and isinstance(self.forward, SharedPromptForward):
            other = adapted_names(self.model) ^ self.forward.adapted
            found = f"{min(other)} has got or lost an adapter" if other else None
        if found is None and any(module.training for module in self.model.modules()):
            found = "it has layers in training mode, whose dropout would be on"
        if found is None and (late := torch_dropouts(self.model)):
            found = f"{late[0][0]} has got an adapter with dropout"
        if found is not None:
            raise UserError(
                f"policy: its model has changed since the policy was made of it: {found}.  Adapters and hooks come"
                " first; then make the policy, anew with posttrain.as_policy(policy.model, policy.tokenizer)."
            )
        if isinstance(self.forward, SharedPromptForward | PlainForward):
            require_output_layer(self.model)

    def copy(self) -> "Policy":
        """The policy with weights of its own, through the same forward pass."""
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
    """A model object of your own as a policy, for training, sampling and evaluation from Python.

    Any causal language model of transformers, with or without an adapter; a `PeftModel` gives its base model, which
    holds the adapter's layers.  Parameters that require a gradient are what is trained.  Adapters and hooks belong into
    the model before this call; a run refuses those that come later.

    `dtype` is the arithmetic of matrix products and attention: "bfloat16" over the weights as they are, "float32" their
    own type, "auto" bfloat16 on CUDA and their own type on a CPU.  `forward="plain"` is the model's own forward pass
    where the quicker shared-prompt one would do.  `context` is the most tokens of prompt and completion together, and
    what rotary angles are fixed for that would change with it (`longrope`, `dynamic`); without one it is what the model
    was made for, and the original context for `longrope`.  `stop_tokens` are texts of one token each that end a
    completion beside the model's own.  `gradient_checkpointing_enable()` of the model is honoured.  The model is put
    into eval mode: its own dropout is off when sampling and when updating; that of an adapter acts in updates.  It
    stays on its device; a run whose recipe names another one as `model.device` is refused.

    Raises UserError for a model whose logits are not those of one linear layer, soft-capped or scaled or as they are.
    """
    model = without_wrapper(model)
    require_output_layer(model)
    release_inputs(model)
    model.eval()
    take_dropouts(model)
    fix_angles(model, context_of(model.config, context))
    compute_dtype = chosen_dtype(dtype, model.dtype, model.device)
    require_causal_logits(model, compute_dtype)
    reason = "the plain forward pass was asked for" if forward == "plain" else shared_prompt_refusal(model)
    chosen = SharedPromptForward if reason is None else PlainForward
    return Policy(
        model=model,
        tokenizer=tokenizer,
        stop_ids=stop_ids(model, tokenizer, stop_tokens),
        compute_dtype=compute_dtype,
        forward=chosen(model, compute_dtype),
        forward_reason=reason,
        cache_refusal=None if reason is None else cache_refusal(model),
        context=context,
    )


def chosen_dtype(name: str, weights: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of matrix products that `auto`, `float32` or `bfloat16` means for weights of a type on a device.

    float32 does not narrow: weights of float64 are computed with as they are.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and weights == torch.float32 else weights
    if name == "bfloat16":
        return torch.bfloat16
    if name != "float32":
        raise UserError(f"dtype = {name}: no type of computation; use auto, float32 or bfloat16.")
    if weights in (torch.bfloat16, torch.float16):
        held = str(weights).removeprefix("torch.")
        raise UserError(
            f"dtype = float32, but the model's weights are {held}: load them in float32, or leave dtype out."
        )
    return weights


def without_wrapper(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a `PeftModel`, adapter layers included; any other transformers model as it is.

    Raises UserError for wrappers other than LoRA's, which may do more than to call that model.
    """
    peft = sys.modules.get("peft")  # whoever has such a model has imported it
    if peft is not None and isinstance(model, peft.PeftModel):
        for config in model.peft_config.values():
            if config.peft_type != "LORA" or getattr(config, "alora_invocation_tokens", None) is not None:
                raise UserError(
                    f"model: a PeftModel of type {config.peft_type} may do more than its layers do, so only plain LoRA"
                    " is unwrapped.  If the adapter's layers are the whole of it, give `model.get_base_model()`."
                )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"model: a {type(model).__name__} is not a transformers model.  Give one as `AutoModelForCausalLM` makes"
            " it, with or without an adapter of peft."
        )
    return model


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = ()) -> tuple[int, ...]:
    """The stop tokens that generation config, model config and tokenizer name, and those of texts, ascending."""
    generation = model.generation_config.eos_token_id if model.generation_config is not None else None
    own = (generation, getattr(model.config, "eos_token_id", None), tokenizer.eos_token_id)
    named = (*own, [single_token(tokenizer, text) for text in texts])
    return united_stop_ids(named, model.name_or_path or "the model")


def united_stop_ids(named: Iterable[int | Sequence[int] | None], model: str) -> tuple[int, ...]:
    """All stop tokens that are named in some places, each naming one, several or none, in ascending order."""
    ids: set[int] = set()
    for each in named:
        if each is not None:
            ids.update([each] if isinstance(each, int) else each)
    if not ids:
        raise UserError(
            f"{model}: neither its config nor its tokenizer names an end-of-text token, so"
            " no completion could stop.  Name one by model.stop_tokens, or set eos_token_id in generation_config.json."
        )
    return tuple(sorted(ids))


def single_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """The one token that a text is.  Raises UserError where it is several or none."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = ", ".join(repr(tokenizer.decode([each])) for each in ids)
        raise UserError(
            f"model.stop_tokens: {text!r} is {len(ids)} tokens of this model{f' ({pieces})' if ids else ''}; each must"
            " be one.  Use a special token of the tokenizer, such as its end-of-turn token."
        )
    return ids[0]


EXACT_TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2
"""Share of the largest logit that rounding explains: of float32, and of weights in a half-precision type."""
CANNOT_READ = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What models raise that want pictures, a language or the hidden states of another beside the tokens."""

WITHOUT_GRADIENT = {"reformer": "computes gradients in training mode alone, where its dropout is on"}
"""Families that cannot be trained with dropout off, and why."""


@torch.no_grad()
def require_causal_logits(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Raise UserError where the model reads tokens that come later, or makes other logits than its output layer alone.

    Or where it cannot be computed in this type.  Asked of the model itself, on two rows of three tokens that differ in
    the last: no list of families is complete.
    """
    name = f"model: a {type(model).__name__}"
    if model.config.is_encoder_decoder:
        raise UserError(f"{name} reads prompts with an encoder; only causal language models can be trained here.")
    if model.config.model_type in WITHOUT_GRADIENT:
        raise UserError(f"{name} {WITHOUT_GRADIENT[model.config.model_type]}.  Take a model of another family.")
    vocabulary = num_embeddings(model)
    rows = torch.tensor([[1, 2, 3], [1, 2, 4]], device=model.device) % vocabulary
    dtype = product_type(model)
    own = own_logits(model, rows, dtype)
    if own.isnan().any():
        raise UserError(f"{name} computes NaN for a text of three tokens: its weights hold NaN or infinity.")
    tolerance = EXACT_TOLERANCE if dtype in (torch.float32, torch.float64) else HALF_TOLERANCE
    bound = tolerance * own.abs().max()
    if (own[0, :2] - own[1, :2]).abs().max() > bound:
        raise UserError(
            f"{name} reads tokens that come later, so it is not a causal language model as it is configured"
            " (is_decoder in its config, for families that have it)."
        )
    ours = plain_logits(model, rows, dtype)
    if ours.shape != own.flatten(0, 1).shape or (ours - own.flatten(0, 1)).abs().max() > bound:
        raise UserError(
            f"{name} makes its logits in another way than from its last hidden states by one matrix, a bias, a scale"
            " and a soft cap, which is not supported."
        )
    if torch.bfloat16 == compute_dtype != dtype:
        own_logits(model, rows, compute_dtype)
        plain_logits(model, rows, compute_dtype)


def own_logits(
    model: PreTrainedModel, rows: Int64[Tensor, "row time"], dtype: torch.dtype
) -> Float[Tensor, "row time vocab"]:
    """The logits of some rows by the model itself.  Raises UserError if it cannot read them."""
    with reading(model, dtype), torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=mixes(model, dtype)):
        logits: Tensor = model(input_ids=rows, use_cache=False).logits
        return logits


def plain_logits(
    model: PreTrainedModel, rows: Int64[Tensor, "row time"], dtype: torch.dtype
) -> Float[Tensor, "token vocab"]:
    """The logits of some rows by our plain forward pass.  Raises UserError if it cannot read them."""
    read = [tuple(row) for row in rows.tolist()]
    completions = Completions([row[:1] for row in read], [(*row[1:], 0) for row in read], range(len(read)))
    needs = ForwardNeeds(logprobs=False, distributions=True)
    with reading(model, dtype):
        parts = PlainForward(model, dtype).completion_logprobs(completions, needs)
    assert parts.distributions is not None
    return parts.distributions.logits()


def mixes(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether products are in bfloat16 over weights of another type."""
    return dtype == torch.bfloat16 != model.dtype


@contextmanager
def reading(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Turn what models raise for a text of three tokens into a UserError with the remedy."""
    try:
        yield
    except UserError:
        raise
    except CANNOT_READ as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        remedy = (
            "Its layers do not take bfloat16 products over weights of another type: set model.dtype to float32."
            if mixes(model, dtype)
            else "If it is to be set up first, do so before a policy is made of it; else take a model of text alone."
        )
        raise UserError(
            f"model: a {type(model).__name__} cannot read a text of three tokens ({said}).  {remedy}"
        ) from error


def product_type(model: PreTrainedModel) -> torch.dtype:
    """What all of a model can be computed in: its type, or bfloat16 where some of its matrices are held in that."""
    held = {parameter.dtype for parameter in model.parameters()}
    return torch.bfloat16 if torch.bfloat16 in held else model.dtype
