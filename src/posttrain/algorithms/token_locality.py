"""Whether each term of a loss reads one completion at a time; only then micro-batches do not change the gradient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from posttrain.algorithms.terms import LossTerm, TokenView
from posttrain.errors import UserError

RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""What rounding in float32 may change of a loss or its gradient."""
ALONE = 8
"""Completions that are read by themselves: a rank among tokens may by chance be the same among fewer."""
NOISE = 0.1
"""Standard deviation of what `stirred` adds: small enough for the ratio of a long completion."""


@dataclass(slots=True)
class LocalityCheck:
    """Tries each term of a run's loss on the first two completions or more that it sees, and on other numbers there."""

    tried: set[str] = field(default_factory=set)
    held: dict[str, TokenView] = field(default_factory=dict)
    """A single completion, which waits for a second one to be tried with."""

    def __call__(self, terms: Sequence[LossTerm], view: TokenView, *, owner: str) -> None:
        """Raise UserError for a term whose loss or gradient of a token depends on other completions."""
        for term in terms:
            if term.name in self.tried:
                continue
            seen = changed(view, lambda _, each: each.detach())
            if term.name in self.held:
                seen = joined_views(self.held[term.name], seen)
            if int(seen.rollout[-1]) == 0:
                self.held[term.name] = seen
                continue
            for numbers in (seen, stirred(seen)):
                require_local(term, numbers, owner=owner)
            self.held.pop(term.name, None)
            self.tried.add(term.name)


def require_local(term: LossTerm, view: TokenView, *, owner: str) -> None:
    """Compare a term's losses and gradients on all completions with those on the first few and on the others.

    torch's random state is restored, so the run draws the same numbers.
    """
    few = min(ALONE, int(view.rollout[-1]))  # so that at least one is left
    rows = [*(view.rollout == place for place in range(few)), view.rollout >= few]
    devices = [view.logprobs.device] if view.logprobs.is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        whole = losses_and_gradients(term, view, owner=owner)
        parts = [losses_and_gradients(term, selected(view, each), owner=owner) for each in rows]
    for what, together, *apart in zip(("a loss", *("a gradient",) * len(whole)), whole, *parts, strict=False):
        alone = torch.cat(apart)
        scale = torch.maximum(together.abs(), alone.abs()).nan_to_num(0, 0, 0).max().item()
        near = torch.isclose(together, alone, rtol=0, atol=RELATIVE * scale + ABSOLUTE, equal_nan=True)
        if not bool(near.all()):
            place = int((~near).nonzero()[0, 0])
            others, least = int(view.rollout[-1]), alone[place].item()
            both = f"{together[place].item():.4g} with {others} other completions and {least:.4g}"
            raise UserError(
                f"{owner}: its loss term {term.name} gives a token {what} of {both} with fewer, so it depends on"
                " update.tokens_per_microbatch.  Take a statistic over completions in the credit rule, or a constant."
            )


def losses_and_gradients(term: LossTerm, view: TokenView, *, owner: str) -> list[Tensor]:
    """A term's losses, and the gradients of their weighted sum by all that the policy and the critic compute."""
    leaves = {name: each.clone().requires_grad_() for name, each in computed(view).items()}
    losses = term.losses(changed(view, lambda name, _: leaves[name]), owner=owner)
    if not losses.requires_grad:
        return [losses]
    gradients = torch.autograd.grad((view.columns.weights * losses).sum(), list(leaves.values()), allow_unused=True)
    known = zip(gradients, leaves.values(), strict=True)
    return [losses.detach(), *(torch.zeros_like(leaf) if each is None else each for each, leaf in known)]


def computed(view: TokenView) -> dict[str, Tensor]:
    """What has a gradient in training."""
    return {"logprobs": view.logprobs, **view.known}


def changed(view: TokenView, change: Callable[[str, Tensor], Tensor], **others: Any) -> TokenView:
    """The view with other numbers for these, and with other fields."""
    logprobs = change("logprobs", view.logprobs)
    known = {name: change(name, each) for name, each in view.known.items()}
    return replace(view, logprobs=logprobs, known=known, **others)


def stirred(view: TokenView) -> TokenView:
    """The same tokens with other numbers, for a first update has plain ones: ratios of 1, and often no advantage.

    Log-probs stay below 0, and what cannot be negative stays above it.
    """
    draw = torch.Generator().manual_seed(0)

    def noise(of: Tensor, scale: float) -> Tensor:
        return scale * torch.randn(of.shape, generator=draw, dtype=torch.float64).to(of)

    def other(name: str, column: Tensor) -> Tensor:
        if name == "weights":
            return column
        if name.endswith("logprobs"):
            return -(column + noise(column, NOISE)).abs()
        if name in ("entropies", "full_kl", "teacher_kl", "value_range"):
            return (column + noise(column, NOISE)).abs()
        return column + noise(column, 1.0)

    return changed(view, other, columns=view.columns.map_named(other))


def selected(view: TokenView, tokens: Bool[Tensor, " token"]) -> TokenView:
    """Whole completions of a view, counted from 0."""
    rollout, columns = view.rollout[tokens], view.columns.map(lambda each: each[tokens])
    return changed(view, lambda _, each: each[tokens], rollout=rollout - rollout[0], columns=columns)


def joined_views(one: TokenView, other: TokenView) -> TokenView:
    """The completions of two views in one."""
    more, known = other.columns.named(), computed(other)
    columns = one.columns.map_named(lambda name, column: torch.cat([column, more[name]]))
    rollout = torch.cat([one.rollout, other.rollout + one.rollout[-1] + 1])
    return changed(one, lambda name, each: torch.cat([each, known[name]]), rollout=rollout, columns=columns)
