"""Hidden states that predict completion tokens, with gradients: the model side of every loss.

Two layouts give the same numbers.  *Shared*: prompts once each, completions as branches of them, nothing padded.
*Plain*: one padded row per completion through the model's own forward, for families that the shared layout does not
know.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from posttrain.models.packed import PackedAttention, PackedLayout
from posttrain.models.policy import Policy

Tokens = Sequence[int]


def completion_hidden(
    policy: Policy, prompts: Sequence[Tokens], completions: Sequence[Tokens], prompt_of: Sequence[int]
) -> Float[Tensor, "token hidden"]:
    """Hidden state behind each completion token, completions in order: h_t predicts token t from all before it.

    `prompt_of[i]` is the prompt that completion i continues.  The last token of a completion predicts nothing
    and does not go through the model.
    """
    if policy.decoder is None:
        return plain_hidden(policy, prompts, completions, prompt_of)
    if len(completions) == len(prompts):
        return sequence_hidden(policy, [prompts[p] for p in prompt_of], completions)
    return shared_hidden(policy, prompts, completions, prompt_of)


def shared_hidden(
    policy: Policy, prompts: Sequence[Tokens], completions: Sequence[Tokens], prompt_of: Sequence[int]
) -> Float[Tensor, "token hidden"]:
    """As `completion_hidden`, each prompt computed once however many completions continue it."""
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
    return _packed(policy, layout, [*prompts, *inputs], predicting)


def sequence_hidden(
    policy: Policy, prompts: Sequence[Tokens], completions: Sequence[Tokens]
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
    return _packed(policy, layout, sequences, predicting)


def plain_hidden(
    policy: Policy, prompts: Sequence[Tokens], completions: Sequence[Tokens], prompt_of: Sequence[int]
) -> Float[Tensor, "token hidden"]:
    """As `completion_hidden`, through the model's own forward on right-padded rows with explicit position ids."""
    rows = [(*prompts[p], *tokens[:-1]) for p, tokens in zip(prompt_of, completions, strict=True)]
    width = max(len(row) for row in rows)
    tokens = torch.tensor([(*row, *(row[0],) * (width - len(row))) for row in rows], device=policy.device)
    positions = torch.arange(width, device=policy.device).expand(len(rows), -1)
    # Padding is on the right, so causal attention keeps it from every real token without a mask.
    with torch.autocast(policy.device.type, dtype=torch.bfloat16, enabled=policy.compute_dtype == torch.bfloat16):
        hidden = policy.model.base_model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
    return torch.cat(
        [
            hidden[i, len(prompts[p]) - 1 : len(prompts[p]) - 1 + len(completion)]
            for i, (p, completion) in enumerate(zip(prompt_of, completions, strict=True))
        ]
    )


def _packed(
    policy: Policy, layout: PackedLayout, sequences: Sequence[Tokens], predicting: Tensor
) -> Float[Tensor, "token hidden"]:
    assert policy.decoder is not None
    layout = layout.to(policy.device)
    tokens = torch.tensor([token for sequence in sequences for token in sequence], device=policy.device)
    wanted, place = torch.unique(predicting, return_inverse=True)  # a prompt's last token predicts for its whole group
    positions, wanted = layout.positions.to(policy.device), wanted.to(policy.device)
    hidden = policy.decoder.hidden(tokens, positions, PackedAttention(layout), wanted)
    return hidden.index_select(0, place.to(policy.device))
