"""Sequences, columns, grades and evidence as a test writes them down."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.terms import TokenView
from posttrain.batch import TokenColumns
from posttrain.records import Finish, Grades, Group, Prompt, Rollout, TokenSequence

Numbers = Tensor | Sequence[Any]


def doubles(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def resampled(rollout: Rollout, **changes: Any) -> Rollout:
    """The rollout with these parts of its sequence changed; new `tokens` are all sampled by default."""
    if "tokens" in changes:
        changes.setdefault("sampled", (True,) * len(changes["tokens"]))
    return replace(rollout, sequence=replace(rollout.sequence, **changes))


def known(**columns: Tensor | None) -> dict[str, Tensor]:
    """The columns that are there, by name."""
    return {name: column for name, column in columns.items() if column is not None}


def spoken(text: str, num_tokens: int = 1, *, sample: int = 0, logprob: float = 0.0, **given: Any) -> Rollout:
    """A completion of equal tokens, which stopped unless `finish` says otherwise."""
    tokens = given.pop("tokens", (5,) * num_tokens)
    given = {"logprobs": (logprob,) * len(tokens), "finish": Finish.STOP, **given}
    return Rollout(sample=sample, sequence=TokenSequence.one_turn(tokens, **given), text=text)


def group_of(*texts: str, prompt: Prompt | None = None, **given: Any) -> Group:
    """Completions with these texts."""
    rollouts = tuple(spoken(text, sample=sample, **given) for sample, text in enumerate(texts))
    return Group(prompt=prompt or Prompt(id="p", text="?", tokens=(1,)), draw=0, rollouts=rollouts)


def grades_of(rewards: Numbers, scores: Numbers | None = None, **more: Any) -> Grades:
    """Grades with these rewards, [prompt group]; of one function that gave them unless there are other scores."""
    table = torch.as_tensor(rewards, dtype=torch.float64)
    by_function = table[None] if scores is None else torch.as_tensor(scores, dtype=torch.float64)
    given = {"names": ("f",), "weights": torch.ones(len(by_function), dtype=torch.float64), **more}
    return Grades(rewards=table, scores=by_function, **given)


def evidence_of(rewards: Numbers, lengths: Numbers | None = None, *, limit: int = 16, **more: Any) -> Evidence:
    """What is known of completions with these rewards, [prompt group], of one token each without `lengths`."""
    table = torch.as_tensor(rewards, dtype=torch.float64)
    counts = torch.ones(table.shape, dtype=torch.long) if lengths is None else torch.as_tensor(lengths)
    given = {"scores": table[None], "weights": torch.ones(1, dtype=torch.float64), **more}
    return Evidence(rewards=table, lengths=counts, max_completion_tokens=limit, **given)


def view_of(logprobs: Tensor, rollout: Tensor | None = None, *, seen: Any = (), **columns: Tensor | None) -> TokenView:
    """Tokens at these log-probs, by default each of its own completion; columns that are not given are 0, weights 1.

    `seen` are the columns of the view itself, which an update computes.
    """
    zeros = torch.zeros(len(logprobs), dtype=torch.float64)
    given = {name: columns.pop(name, zeros) for name in ("advantages", "behaviour_logprobs")}
    given |= {"weights": columns.pop("weights", zeros + 1), "value_range": columns.pop("value_range", None)}
    made = TokenColumns(**given, known=known(**columns))
    rollout = torch.arange(len(logprobs)) if rollout is None else rollout
    return TokenView(logprobs=logprobs, rollout=rollout, columns=made, known=dict(seen))
