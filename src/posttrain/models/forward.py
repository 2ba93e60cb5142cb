"""Hidden states that predict completion tokens, with gradients: the model side of every loss.

Two forward passes give the same numbers.  *Shared prompt*: prompts once each, completions as branches of them, nothing
padded.  *Plain*: one padded row per completion through the model's own forward, for every model that the first does
not reproduce (`models.shared_prompt.architectures`), adapters included.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from posttrain.errors import UserError
from posttrain.models.adapters.dropout import token_keys
from posttrain.models.adapters.in_force import in_update, input_dropouts, name_tokens
from posttrain.models.adapters.peft_layers import adapted_names
from posttrain.models.recomputation import recomputing_layers
from posttrain.models.shared_prompt.decoder import Decoder
from posttrain.models.shared_prompt.packed import PackedAttention, PackedLayout

Tokens = Sequence[int]


@runtime_checkable
class ForwardPass(Protocol):
    """A model's hidden states, as a loss reads them."""

    padded: bool
    """Whether every completion is a row of its own, prompt included, as wide as the widest: what a micro-batch costs.
    Else a prompt is computed once, and nothing is padded."""

    def completion_hidden(
        self, prompts: Sequence[Tokens], completions: Sequence[Tokens], prompt_of: Sequence[int]
    ) -> Float[Tensor, "token hidden"]:
        """Hidden state behind each completion token, completions in order: h_t predicts token t from all before it.

        `prompt_of[i]` is the prompt that completion i continues.  The last token of a completion predicts nothing
        and does not go through the model.
        """
        ...

    def last_hidden(
        self, prompts: Sequence[Tokens], completions: Sequence[Tokens], prompt_of: Sequence[int]
    ) -> Float[Tensor, "completion hidden"]:
        """Hidden state at each completion's last token, which has seen the whole of prompt and completion."""
        ...


class SharedPromptForward:
    """Each prompt once however many completions continue it, through `models.shared_prompt.decoder`."""

    padded = False

    def __init__(self, model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
        self.decoder = Decoder(model, compute_dtype)
        self.adapted = adapted_names(model)
        """Layers that had an adapter when this was made; who trains knows of no others."""
        self.dropping = input_dropouts(model)

    def completion_hidden(
        self, prompts: Sequence[Tokens], completions: Sequence[Tokens], prompt_of: Sequence[int]
    ) -> Float[Tensor, "token hidden"]:
        """See `ForwardPass`."""
        whole = len(completions) == len(prompts)
        self._name_tokens(prompts, completions, prompt_of, whole=whole)
        if whole:
            return sequence_hidden(self.decoder, [prompts[p] for p in prompt_of], completions)
        return shared_hidden(self.decoder, prompts, completions, prompt_of)

    def last_hidden(
        self, prompts: Sequence[Tokens], completions: Sequence[Tokens], prompt_of: Sequence[int]
    ) -> Float[Tensor, "completion hidden"]:
        """See `ForwardPass`."""
        self._name_tokens(prompts, with_one_more(completions), prompt_of, whole=False)
        layout = PackedLayout([len(prompt) for prompt in prompts], [len(each) for each in completions], prompt_of)
        ends = torch.tensor(layout.branch_starts) + torch.tensor([len(each) - 1 for each in completions])
        return _packed(self.decoder, layout, [*prompts, *completions], ends)

    def _name_tokens(
        self, prompts: Sequence[Tokens], completions: Sequence[Tokens], prompt_of: Sequence[int], *, whole: bool
    ) -> None:
        """Say which tokens go through the model, all but the last of each completion, where dropout asks for it."""
        if in_update(self.dropping):
            keys = token_keys(prompts, completions, prompt_of)
            sequences = [keys.sequence(p, i) for i, p in enumerate(prompt_of)]
            rows = torch.cat(sequences if whole else [*keys.prompts, *keys.completions])
            name_tokens(self.dropping, rows, self.decoder.model.device)


class PlainForward:
    """The model's own forward on right-padded rows with explicit position ids."""

    padded = True

    def __init__(self, model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
        self.model, self.compute_dtype = model, compute_dtype
        self.dropping = input_dropouts(model)

    def completion_hidden(
        self, prompts: Sequence[Tokens], completions: Sequence[Tokens], prompt_of: Sequence[int]
    ) -> Float[Tensor, "token hidden"]:
        """See `ForwardPass`."""
        hidden = self._of_rows(prompts, completions, prompt_of)
        return torch.cat(
            [
                hidden[i, len(prompts[p]) - 1 : len(prompts[p]) - 1 + len(completion)]
                for i, (p, completion) in enumerate(zip(prompt_of, completions, strict=True))
            ]
        )

    def last_hidden(
        self, prompts: Sequence[Tokens], completions: Sequence[Tokens], prompt_of: Sequence[int]
    ) -> Float[Tensor, "completion hidden"]:
        """See `ForwardPass`."""
        hidden = self._of_rows(prompts, with_one_more(completions), prompt_of)
        lengths = [len(prompts[p]) + len(tokens) for p, tokens in zip(prompt_of, completions, strict=True)]
        ends = torch.tensor(lengths, device=hidden.device) - 1
        return hidden[torch.arange(len(lengths), device=hidden.device), ends]

    def _of_rows(
        self, prompts: Sequence[Tokens], completions: Sequence[Tokens], prompt_of: Sequence[int]
    ) -> Float[Tensor, "row time hidden"]:
        """Hidden states of every prompt with its completion but for the last token of that."""
        device = self.model.device
        rows = [(*prompts[p], *tokens[:-1]) for p, tokens in zip(prompt_of, completions, strict=True)]
        width = max(len(row) for row in rows)
        tokens = torch.tensor([(*row, *(row[0],) * (width - len(row))) for row in rows], device=device)
        positions = torch.arange(width, device=device).expand(len(rows), -1)
        if in_update(self.dropping):
            keys = token_keys(prompts, completions, prompt_of)
            sequences = [keys.sequence(p, i) for i, p in enumerate(prompt_of)]
            name_tokens(self.dropping, pad_sequence(sequences, batch_first=True), device)
        # Padding is on the right, so causal attention keeps it from every real token without a mask.
        with recomputing_layers(self.model):
            return model_hidden(self.model, self.compute_dtype, tokens, positions, use_cache=False)


def with_one_more(completions: Sequence[Tokens]) -> list[Tokens]:
    """Completions with another token behind them, so that their own last one goes through the model too."""
    return [(*tokens, tokens[-1]) for tokens in completions]


def model_hidden(
    model: PreTrainedModel,
    compute_dtype: torch.dtype,
    tokens: Int64[Tensor, "row time"],
    positions: Int64[Tensor, "row time"],
    **more: object,
) -> Float[Tensor, "row time hidden"]:
    """Hidden states by the model's own forward, under autocast where the compute type is bfloat16.

    Positions are given where the family has them; others take them from the order of tokens, or have none.
    """
    if "position_ids" in _parameters(model):
        more["position_ids"] = positions
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16):
        out = trunk(model)(input_ids=tokens, **more)
    return cast(Tensor, out.last_hidden_state)


def trunk(model: PreTrainedModel) -> nn.Module:
    """The model without its output layer."""
    if model.base_model is not model:
        return model.base_model
    # A text-only class may name the part that only the whole family has.
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise UserError(f"model: a {type(model).__name__} has no part that gives the hidden states before its logits.")
    return parts[0]


def cache_refusal(model: PreTrainedModel) -> str | None:
    """Why completions of this model cannot go on from cached keys and values, in words; None where they can."""
    if "past_key_values" not in _parameters(model):
        return f"a {model.config.model_type} takes no cache of keys and values"
    kept = {type(layer) for layer in DynamicCache(config=model.config).layers}
    others = sorted(kind.__name__ for kind in kept - {DynamicLayer, DynamicSlidingWindowLayer, DummyLayer})
    if others or model._is_stateful:
        return f"layers of a {model.config.model_type} keep more than keys and values ({', '.join(others)})"
    return None


def _parameters(model: PreTrainedModel) -> Mapping[str, object]:
    """What the forward function of the model without its output layer takes."""
    return signature(trunk(model).forward).parameters


def shared_hidden(
    decoder: Decoder, prompts: Sequence[Tokens], completions: Sequence[Tokens], prompt_of: Sequence[int]
) -> Float[Tensor, "token hidden"]:
    """As `completion_hidden`: prompts are roots, and completions branches of them."""
    inputs = [tokens[:-1] for tokens in completions]
    layout = PackedLayout([len(prompt) for prompt in prompts], [len(i) for i in inputs], prompt_of)
    predicting = torch.cat(
        [
            torch.cat(
                [
                    torch.tensor([layout.root_starts[prompt] + layout.root_lengths[prompt] - 1]),
                    torch.arange(start, start + len(tokens)),
                ]
            )
            for prompt, start, tokens in zip(prompt_of, layout.branch_starts, inputs, strict=True)
        ]
    )
    return _packed(decoder, layout, [*prompts, *inputs], predicting)


def sequence_hidden(
    decoder: Decoder, prompts: Sequence[Tokens], completions: Sequence[Tokens]
) -> Float[Tensor, "token hidden"]:
    """As `completion_hidden` where completion i continues prompt i: whole sequences, nothing to share."""
    sequences = [(*prompt, *tokens[:-1]) for prompt, tokens in zip(prompts, completions, strict=True)]
    layout = PackedLayout([len(sequence) for sequence in sequences])
    predicting = torch.cat(
        [
            torch.arange(start + len(prompt) - 1, start + len(sequence))
            for start, prompt, sequence in zip(layout.root_starts, prompts, sequences, strict=True)
        ]
    )
    return _packed(decoder, layout, sequences, predicting)


def _packed(
    decoder: Decoder, layout: PackedLayout, sequences: Sequence[Tokens], predicting: Tensor
) -> Float[Tensor, "token hidden"]:
    device = decoder.model.device
    attention = PackedAttention(layout, device)
    tokens = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    wanted, place = torch.unique(predicting, return_inverse=True)  # a prompt's last token predicts for its whole group
    hidden = decoder.hidden(tokens, attention.indices.positions, attention, wanted.to(device))
    return hidden.index_select(0, place.to(device))
