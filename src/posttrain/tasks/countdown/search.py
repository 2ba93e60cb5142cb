"""Reading a Countdown transcript as a search: its tries, and which of them reach the target.

A try is a line between the think tags that begins with a step; posttrain.rewards.countdown.step_rewards reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.rewards.countdown.grader import Countdown
from posttrain.rewards.countdown.step_rewards import STEP, read_try


@dataclass(frozen=True, slots=True)
class Search:
    """What one completion tried."""

    tries: int
    successes: int
    at_once: bool = False
    """Whether the first try succeeds."""


def search(puzzle: Countdown, text: str) -> Search:
    """Count the tries of a completion and those that solve the puzzle; text after `</think>` is not part of it."""
    lines = text.split("</think>")[0].replace("<think>", "").split("\n")
    tries = [line for line in lines if STEP.match(line.strip())]
    solved = [read_try(puzzle, line).hits for line in tries]
    return Search(tries=len(tries), successes=sum(solved), at_once=solved[:1] == [True])


def search_statistics(searches: Sequence[Search]) -> dict[str, float]:
    """Mean tries per completion, successes per try over all tries, and over first tries; nothing where nobody tries.

    A search ends at its first hit, so problems that are hard for the policy fill most of the tries: a policy that
    searches on may lower its successes per try and be no worse at trying.  First tries are one for each completion.
    """
    tries = sum(search.tries for search in searches)
    if not tries:
        return {}
    successes = sum(search.successes for search in searches)
    return {
        "tries_per_completion": tries / len(searches),
        "success_per_try": successes / tries,
        "success_of_first_try": sum(search.at_once for search in searches) / len(searches),
    }
