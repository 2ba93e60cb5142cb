"""Turns of a completion: what its environment replied to the policy."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool within a turn."""

    name: str
    failed: bool = False
    """Whether the tool is unknown, its arguments are invalid, or it raised; the reply says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of the policy, and what its environment replied."""

    end: int
    """Tokens of the sequence up to the end of the policy's turn; those of the reply follow."""
    num_given: int = 0
    """Tokens of the reply."""
    reward: float | None = None
    """What the reply earned, in units of the reward; None without one."""
    seconds: float = 0.0
    """Time until the reply."""
    calls: tuple[ToolCall, ...] = ()
