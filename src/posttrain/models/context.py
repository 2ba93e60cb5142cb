"""The context of a policy in tokens, and rotary angles that depend only on it.

Two kinds of rotary embedding, `longrope` and `dynamic`, change the angles of all positions once the longest row of a
batch exceeds a bound.  Other rows would then change a completion's log-probs, and cached keys would be wrong.  So the
angles are fixed once, for the policy's context (docs/decisions/014).
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from posttrain.errors import UserError

NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
"""Config names of the longest sequence."""
WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")
"""Config names of the window of local attention."""


def context_of(config: PreTrainedConfig, asked: int | None) -> int:
    """Tokens of prompt and completion together: `asked`, for `longrope` the original context, or else the model's."""
    own = own_context(config)
    settings: dict[str, Any] = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    of_kinds = [each for each in settings.values() if isinstance(each, dict)]  # of layers
    ropes = [(each.get("rope_type"), each) for each in of_kinds or [settings]]
    if asked is None:
        original = [int(rope["original_max_position_embeddings"]) for kind, rope in ropes if kind == "longrope"]
        lengths = [*original, *([] if own is None else [own])]
        if not lengths:
            raise UserError(
                f"model: the config of this {config.model_type} does not say how many tokens it can read.  Set"
                " model.context (in Python, as_policy(..., context=...)), for example to 2048."
            )
        return min(lengths)
    factors = [float(rope["factor"]) for kind, rope in ropes if kind == "dynamic"]
    most = own if own is None else int(own * max(factors, default=1.0))
    if asked < 1 or (most is not None and asked > most):
        bound = "at least 1" if most is None else f"1 to {most}"
        raise UserError(f"model.context = {asked}: the context of this {config.model_type} is {bound} tokens.")
    return asked


def own_context(config: PreTrainedConfig) -> int | None:
    """The length in the config, under one of `NAMES`."""
    text = config.get_text_config(decoder=True)
    found = [getattr(text, name, None) for name in NAMES]
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def changes_at(config: PreTrainedConfig) -> list[int]:
    """Lengths beyond which some layer does not see all tokens, ascending."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and all(kind == "full_attention" for kind in kinds):
        return []
    found = [getattr(text, name, None) for name in WINDOWS]
    return sorted({value for value in found if isinstance(value, int) and value > 0})


@torch.no_grad()
def fix_angles(model: PreTrainedModel, context: int) -> None:
    """Have the rotary embeddings use this context's angles for rows of every length.

    `longrope`: the short factors up to the original context, else the long ones for every position.  `dynamic`: the
    base for a sequence of this length.  Config, weights and saved files do not change.
    """
    for module in model.modules():
        kinds = vars(module).get("rope_type")
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind not in ("longrope", "dynamic"):
                continue
            rotary, prefix = cast(Any, module), "" if layer_type is None else f"{layer_type}_"
            before = getattr(rotary, f"{prefix}inv_freq")
            of_layer = {} if layer_type is None else {"layer_type": layer_type}
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](rotary.config, before.device, seq_len=context, **of_layer)
            names = ["inv_freq", "original_inv_freq", *(["long_inv_freq"] if kind == "longrope" else [])]
            for name in names:  # the module's update may choose any of them
                setattr(rotary, prefix + name, frequencies.to(before))
            setattr(rotary, f"{prefix}attention_scaling", scaling)
            if kind == "dynamic":
                setattr(rotary, f"{prefix}max_seq_len_cached", context)
                rotary.original_max_seq_len = context


def num_embeddings(model: PreTrainedModel) -> int:
    return len(cast(nn.Embedding, model.get_input_embeddings()).weight)


def require_embeddings(tokens: Sequence[int], rows: int, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise UserError for a token without a row in an embedding of this many rows."""
    least, last = min(tokens, default=0), max(tokens, default=0)
    if least >= 0 and last < rows:
        return
    unknown = last if least >= 0 else least
    text = f" ({tokenizer.decode([unknown])!r})" if 0 <= unknown < len(tokenizer) else ""
    fault = f"the tokenizer's token {unknown}{text} has no row in the model's embedding, which has {rows}"
    raise UserError(f"{where}: {fault}.  Remove that text, or use the tokenizer that the model was trained with.")
