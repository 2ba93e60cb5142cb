"""The forward pass: everything that a loss reads of completion tokens, with the output layer inside.

Two implementations give the same numbers.  *Shared prompt* computes each prompt once, with its completions as branches
and without padding.  *Plain* runs one padded row per completion through the model's own forward, for every model that
the first one does not reproduce (`models.shared_prompt.families`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from posttrain.models.adapters.in_force import in_update, input_dropouts, name_tokens
from posttrain.models.adapters.lora import token_keys
from posttrain.models.adapters.peft_layers import adapted_names
from posttrain.models.logprobs import NextTokens, full_kl, token_entropies, token_logprobs, token_statistics
from posttrain.models.model_outputs import OutputLayer, model_hidden, output_layer_of, recomputing_layers
from posttrain.models.shared_prompt.attention import PackedAttention, PackedLayout
from posttrain.models.shared_prompt.decoder import Decoder
from posttrain.models.transfers import numbers_on

Tokens = Sequence[int]


@runtime_checkable
class CompletionBatch(Protocol):
    """What a forward pass reads: a `posttrain.batch.Batch`, or `Completions`, which documents the fields."""

    @property
    def prompts(self) -> Sequence[Tokens]: ...

    @property
    def completions(self) -> Sequence[Tokens]: ...

    @property
    def prompt_of(self) -> Sequence[int]: ...

    @property
    def sampled(self) -> Bool[Tensor, " token"] | None: ...


@dataclass(frozen=True, slots=True)
class Completions:
    """Completions without the other columns of a batch."""

    prompts: Sequence[Tokens]
    """Each prompt once."""
    completions: Sequence[Tokens]
    """Token ids, at least one each."""
    prompt_of: Sequence[int]
    """The prompt that each completion continues."""
    sampled: Bool[Tensor, " token"] | None = None
    """Which completion tokens are predicted; None means all.  The others are only read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardNeeds:
    """The numbers that a loss or a metric needs of the sampled tokens."""

    logprobs: bool = True
    temperature: float = 1.0
    """Logits are divided by it: the temperature that sampled."""
    gradient: bool = True
    """Whether the model gets a gradient; the head of `values` always does."""
    divergences: Mapping[str, NextTokens] = field(default_factory=dict)
    """Other models' next-token distributions at the same tokens, by name, for KL(π‖other)."""
    entropies: bool = False
    entropy_gradient: bool = False
    statistics: bool = False
    """Entropies in float64 and whether each token is the likeliest one; both without a gradient."""
    values: Callable[[Float[Tensor, "token hidden"]], Float[Tensor, " token"]] | None = None
    """A head over the hidden states that predict the tokens."""
    distributions: bool = False
    """The next-token distributions themselves, without a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenParts:
    """The needed numbers, one for each sampled token in order; None if not needed."""

    logprobs: Float[Tensor, " token"] | None = None
    """log π(token) in nats."""
    divergences: Mapping[str, Float[Tensor, " token"]] = field(default_factory=dict)
    entropies: Float[Tensor, " token"] | None = None
    likeliest: Bool[Tensor, " token"] | None = None
    values: Float[Tensor, " token"] | None = None
    distributions: NextTokens | None = None


@runtime_checkable
class ForwardPass(Protocol):
    """What a sharding wrapper, a tensor-parallel layer or a fused kernel replaces."""

    padded: bool
    """Whether each completion with its prompt is a row, padded to the widest row of its micro-batch; otherwise a prompt
    counts once and nothing is padded."""

    def completion_logprobs(self, batch: CompletionBatch, needs: ForwardNeeds) -> TokenParts:
        """The needed numbers of the sampled tokens; h_t predicts token t from all tokens before it."""
        ...


class ModelForward:
    """A forward pass whose output layer is the model's."""

    def __init__(self, model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
        self.model, self.compute_dtype = model, compute_dtype
        self.dropping = input_dropouts(model)

    def completion_logprobs(self, batch: CompletionBatch, needs: ForwardNeeds) -> TokenParts:
        with torch.set_grad_enabled(needs.gradient and torch.is_grad_enabled()):
            hidden = self.completion_hidden(batch)
        return token_parts(self, hidden, sampled_tokens(batch).to(hidden.device, non_blocking=True), needs)

    def completion_hidden(self, batch: CompletionBatch) -> Float[Tensor, "token hidden"]:
        """Hidden states that predict the sampled tokens."""
        raise NotImplementedError

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> Float[Tensor, " token"]:
        """As `models.logprobs.token_logprobs`."""
        layer = output_layer_of(self.model, self.compute_dtype)
        return token_logprobs(hidden, layer, targets, temperature=temperature)


class SharedPromptForward(ModelForward):
    """Computes each prompt once however many completions continue it, through `models.shared_prompt.decoder`."""

    padded = False

    def __init__(self, model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
        super().__init__(model, compute_dtype)
        self.decoder = Decoder(model, compute_dtype)
        self.adapted = adapted_names(model)
        """Layers that had an adapter when this was made."""

    def completion_hidden(self, batch: CompletionBatch) -> Float[Tensor, "token hidden"]:
        unshared = len(batch.completions) == len(batch.prompts)
        if in_update(self.dropping):
            keys = token_keys(batch.prompts, batch.completions, batch.prompt_of)
            rows = keys.sequences(batch.prompt_of) if unshared else [*keys.prompts, *keys.completions]
            name_tokens(self.dropping, torch.cat(rows), self.model.device)
        return packed_hidden(self.decoder, batch, shared=not unshared)


class PlainForward(ModelForward):
    """The model's own forward on right-padded rows with explicit position ids."""

    padded = True

    def completion_hidden(self, batch: CompletionBatch) -> Float[Tensor, "token hidden"]:
        device = self.model.device
        sequences = inputs(batch)
        width = max(len(row) for row in sequences)
        tokens = torch.tensor([(*row, *(row[0],) * (width - len(row))) for row in sequences])
        tokens = tokens.to(device, non_blocking=True)
        positions = torch.arange(width, device=device).expand(len(sequences), -1)
        if in_update(self.dropping):
            keys = token_keys(batch.prompts, batch.completions, batch.prompt_of)
            name_tokens(self.dropping, pad_sequence(keys.sequences(batch.prompt_of), batch_first=True), device)
        # Padding is on the right, so causal attention keeps it from every real token without a mask.
        with recomputing_layers(self.model):
            hidden = model_hidden(self.model, self.compute_dtype, tokens, positions, use_cache=False)
        ends = [row * width + len(batch.prompts[p]) - 1 for row, p in enumerate(batch.prompt_of)]
        wanted = predicting(batch, ends, [end + 1 for end in ends])
        return hidden.flatten(0, 1).index_select(0, wanted.to(device, non_blocking=True))


def token_parts(forward: ModelForward, hidden: Tensor, targets: Tensor, needs: ForwardNeeds) -> TokenParts:
    """The needed numbers, from the hidden states that predict the sampled tokens and the model's output layer.

    Each part reads the output layer again: under mixed precision their gradients are then summed in the weights' type.
    """
    temperature, logprobs, entropies, likeliest = needs.temperature, None, None, None

    def output_layer() -> OutputLayer:
        return output_layer_of(forward.model, forward.compute_dtype)

    with torch.set_grad_enabled(needs.gradient and torch.is_grad_enabled()):
        if needs.logprobs:
            logprobs = forward.logprobs(hidden, targets, temperature)
        divergences = {
            name: full_kl(hidden, output_layer(), other, temperature=temperature)
            for name, other in needs.divergences.items()
        }
        if needs.entropies:
            with torch.set_grad_enabled(needs.entropy_gradient and torch.is_grad_enabled()):
                entropies = token_entropies(hidden, output_layer(), temperature=temperature)
    if needs.statistics:
        entropies, likeliest = token_statistics(hidden, output_layer(), targets, temperature=temperature)
    return TokenParts(
        logprobs=logprobs,
        divergences=divergences,
        entropies=entropies,
        likeliest=likeliest,
        values=None if needs.values is None else needs.values(hidden),
        distributions=NextTokens(hidden.detach(), output_layer().detached()) if needs.distributions else None,
    )


def next_logits(
    forward: ForwardPass, prompts: Sequence[Tokens], completions: Sequence[Tokens]
) -> Float[Tensor, "token vocab"]:
    """Logits of every token of the completions, one for each prompt."""
    batch = Completions(prompts, completions, range(len(prompts)))
    found = forward.completion_logprobs(batch, ForwardNeeds(logprobs=False, distributions=True)).distributions
    assert found is not None
    return found.logits()


def sampled_tokens(batch: CompletionBatch) -> Int64[Tensor, " token"]:
    every = torch.tensor([token for tokens in batch.completions for token in tokens])
    return every if batch.sampled is None else every[batch.sampled.cpu()]


def inputs(batch: CompletionBatch) -> list[Tokens]:
    pairs = zip(batch.prompt_of, batch.completions, strict=True)
    return [(*batch.prompts[p], *tokens[:-1]) for p, tokens in pairs]


def predicting(batch: CompletionBatch, prompt_ends: Sequence[int], starts: Sequence[int]) -> Int64[Tensor, " token"]:
    """Positions from which the sampled tokens are predicted; only this function chooses them.

    For each completion, `prompt_ends` has the position of its prompt's last token and `starts` that of its first one.
    """
    places = zip(prompt_ends, starts, batch.completions, strict=True)
    every = torch.tensor([at for end, start, each in places for at in (end, *range(start, start + len(each) - 1))])
    return every if batch.sampled is None else every[batch.sampled.cpu()]


def packed_hidden(decoder: Decoder, batch: CompletionBatch, *, shared: bool) -> Float[Tensor, "token hidden"]:
    """As `completion_hidden`: `shared` prompts are roots with branches, otherwise whole sequences are roots."""
    branches = [tokens[:-1] for tokens in batch.completions]
    sequences = [*batch.prompts, *branches] if shared else inputs(batch)
    if shared:
        layout = PackedLayout([*map(len, batch.prompts)], [*map(len, branches)], batch.prompt_of)
        ends = [layout.root_starts[prompt] + layout.root_lengths[prompt] - 1 for prompt in batch.prompt_of]
        starts = layout.branch_starts
    else:
        layout = PackedLayout([len(sequence) for sequence in sequences])
        pairs = zip(layout.root_starts, batch.prompt_of, strict=True)
        ends = [start + len(batch.prompts[prompt]) - 1 for start, prompt in pairs]
        starts = [end + 1 for end in ends]
    device, wanted = decoder.model.device, predicting(batch, ends, starts)
    attention = PackedAttention(layout, device)
    tokens = numbers_on(device, [token for sequence in sequences for token in sequence])
    distinct, place = torch.unique(wanted, return_inverse=True)  # a prompt's last token predicts for its whole group
    positions = decoder.positions(attention.indices.positions)
    hidden = decoder.run(tokens, positions, attention, None, distinct.to(device, non_blocking=True))
    return hidden.index_select(0, place.to(device, non_blocking=True))
