"""Which rewards score which rows: `where`, `gate` and `of` decide, and rows that no reward applies to are reported."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

from posttrain.errors import RunError, UserError
from posttrain.options.grading import OnUnscoredRow
from posttrain.options.reward import RewardTerms
from posttrain.records import Grades, Group
from posttrain.rewards.grading.answers import UNSCORED, Score, Verdict
from posttrain.rewards.grading.calls import RolloutRow
from posttrain.rewards.grading.function import RewardFunction

GATED = "gated"
"""Outcome of a row that a function does not score because its gate is shut."""
MOST_NAMED = 5
"""Rows that a run warns about; more are only counted, as `frac_unscored`."""


def dependency_rounds(functions: Sequence[RewardFunction]) -> list[list[int]]:
    """The indices of the functions in rounds: each after those that its `gate` and `of` name."""
    names = [function.name for function in functions]
    needs = [{name for name in (function.settings.gate, function.settings.of) if name} for function in functions]
    for function, needed in zip(functions, needs, strict=True):
        for name in sorted(needed - set(names)):
            raise UserError(
                f"reward {function.name!r} waits for a reward {name!r}, but there are only {', '.join(names)}."
                "  Add it, with weight 0 if it is to count for nothing itself."
            )
    done: set[str] = set()
    ordered: list[list[int]] = []
    left = list(range(len(functions)))
    while left:
        ready = [index for index in left if needs[index] <= done]
        if not ready:
            raise UserError(f"rewards {', '.join(names[index] for index in left)} wait for each other")
        ordered.append(ready)
        left = [index for index in left if index not in ready]
        done |= {names[index] for index in ready}
    return ordered


def row_for(
    row: RolloutRow, index: int, function: RewardFunction, verdicts: Mapping[str, Sequence[Verdict]]
) -> RolloutRow | Score:
    """The row as the function sees it, or its score where `where` or the gate decides without a call."""
    terms = function.settings
    if not terms.applies(row.group.prompt.columns):
        return UNSCORED
    if terms.gate:
        gate = verdicts[terms.gate][index]
        if not isinstance(gate, Score) or math.isnan(gate.value):
            return UNSCORED
        if gate.value <= 0:
            return Score(0.0, GATED)
    if terms.of:
        base = verdicts[terms.of][index]
        return replace(row, base=base.value if isinstance(base, Score) and not math.isnan(base.value) else None)
    return row


def require_rewarded_rows(
    rows: Sequence[tuple[str, Mapping[str, object]]], functions: Sequence[RewardFunction]
) -> None:
    """Refuse a row (name, columns) that no reward with a weight scores, by its `where` or its gate's."""
    rounds, paying = dependency_rounds(functions), [each for each in functions if has_weight(each.settings)]
    if not paying:
        return
    names = {each.name for each in paying}
    without = [row for row in rows if not names & applying_rewards(row[1], functions, rounds)]
    if without:
        where, columns = without[0]
        more = f" and of {len(without) - 1} other rows" if len(without) > 1 else ""
        reasons = "; ".join(why_not(each, columns) for each in paying)
        raise UserError(
            f"{where}: no reward applies to a completion of this row{more}: {reasons}.  Add a reward for such rows,"
            " widen a `where`, or leave the rows out."
        )


def has_weight(terms: RewardTerms) -> bool:
    return terms.weight != 0 or bool(terms.weight_to)


def applying_rewards(
    columns: Mapping[str, object], functions: Sequence[RewardFunction], rounds: Sequence[Sequence[int]]
) -> set[str]:
    """The rewards that score a row with these columns; one with a gate only where its gate does."""
    found: set[str] = set()
    for function in (functions[index] for indices in rounds for index in indices):
        terms = function.settings
        if terms.applies(columns) and (not terms.gate or terms.gate in found):
            found.add(function.name)
    return found


def why_not(function: RewardFunction, columns: Mapping[str, object]) -> str:
    """Why a reward does not score a row."""
    terms = function.settings
    for name, value in terms.where.items():
        if columns.get(name) != value:
            found = f"{columns[name]!r:.40}" if name in columns else "no such column"
            return f"{function.name} is for {name} = {value!r:.40}, and here is {found}"
    return f"{function.name} waits for its gate {terms.gate}"


class UnscoredRows:
    """Reports, once each, prompts where every function with a weight returned None for all completions."""

    def __init__(self, what_then: OnUnscoredRow) -> None:
        self.what_then = what_then
        self.named: set[str] = set()

    def look_at(self, groups: Sequence[Group], grades: Grades) -> None:
        """Warn of the first few such prompts, or raise RunError; silent in a step where scoring failed."""
        if grades.num_failures:
            return
        functions = [name for name, weight in zip(grades.names, grades.weights.tolist(), strict=True) if weight]
        for group, unscored in zip(groups, grades.rewards.isnan().all(dim=1).tolist(), strict=True):
            if unscored and functions and group.prompt.id not in self.named:
                self._report(group, functions)

    def _report(self, group: Group, functions: Sequence[str]) -> None:
        message = (
            f"prompt {group.prompt.id}: no reward applies: {', '.join(functions)} said None of all"
            f" {len(group.rollouts)} completions, so that nothing is learned from this row"
        )
        if self.what_then == "stop":
            raise RunError(
                f"{message}.  Add a reward for such rows, or leave them out; with grading.on_unscored_row = warn the"
                " run goes on without them."
            )
        self.named.add(group.prompt.id)
        if len(self.named) <= MOST_NAMED:
            last = "; further rows like it are not named" if len(self.named) == MOST_NAMED else ""
            warnings.warn(f"{message}{last}.", RuntimeWarning, stacklevel=1)
