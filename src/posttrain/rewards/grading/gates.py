"""Which rewards score which rows: `where`, `gate` and `of` decide; rows to which no reward applies are reported."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

from posttrain.errors import RunError, UserError
from posttrain.options.reward import OnUnscoredRow, RewardTerms
from posttrain.records import Grades, Group
from posttrain.rewards.grading.answers import UNSCORED, Score, Verdict
from posttrain.rewards.grading.calls import RolloutRow
from posttrain.rewards.grading.function import RewardFunction


def dependency_rounds(functions: Sequence[RewardFunction]) -> list[list[int]]:
    """The indices of the functions in rounds: each after those that its `gate` and `of` name."""
    names = [function.name for function in functions]
    needs = [{name for name in (function.settings.gate, function.settings.of) if name} for function in functions]
    for function, needed in zip(functions, needs, strict=True):
        for name in sorted(needed - set(names)):
            where = f"reward {function.name!r} waits for a reward {name!r}, but there are only {', '.join(names)}."
            raise UserError(f"{where} Add it (with weight 0 if it should not count).")
    done: set[str] = set()
    ordered: list[list[int]] = []
    left = list(range(len(functions)))
    while left:
        ready = [index for index in left if needs[index] <= done]
        if not ready:
            waiting = ", ".join(names[index] for index in left)
            raise UserError(f"rewards {waiting} wait for each other. Remove one `gate` or `of`.")
        ordered.append(ready)
        left = [index for index in left if index not in ready]
        done |= {names[index] for index in ready}
    return ordered


def row_for(
    row: RolloutRow, index: int, function: RewardFunction, verdicts: Mapping[str, Sequence[Verdict]]
) -> RolloutRow | Score:
    """The row as the function sees it, or its score if `where` or the gate decides without a call."""
    terms = function.settings
    if not terms.applies(row.group.prompt.columns):
        return UNSCORED
    if terms.gate:
        gate = verdicts[terms.gate][index]
        if not isinstance(gate, Score) or math.isnan(gate.value):
            return UNSCORED
        if gate.value <= 0:
            return Score(0.0, "gated")
    if terms.of:
        base = verdicts[terms.of][index]
        return replace(row, base=base.value if isinstance(base, Score) and not math.isnan(base.value) else None)
    return row


def require_rewarded_rows(
    rows: Sequence[tuple[str, Mapping[str, object]]], functions: Sequence[RewardFunction]
) -> None:
    """Reject a row (name, columns) that no reward with a weight scores, by its `where` or its gate's."""
    ordered = [functions[index] for indices in dependency_rounds(functions) for index in indices]
    paying = [each for each in functions if has_weight(each.settings)]
    without = []
    for where, columns in rows if paying else ():
        found: set[str] = set()
        for function in ordered:
            terms = function.settings
            if terms.applies(columns) and (not terms.gate or terms.gate in found):
                found.add(function.name)
        if not any(each.name in found for each in paying):
            without.append((where, columns))
    if not without:
        return
    (where, columns), reasons = without[0], []
    for function in paying:
        others = [(name, value) for name, value in function.settings.where.items() if columns.get(name) != value]
        reason = f"{function.name} waits for its gate {function.settings.gate}"
        for name, value in others[:1]:
            has = f"{columns[name]!r:.40}" if name in columns else "no such column"
            reason = f"{function.name} is for {name} = {value!r:.40}, but this row has {has}"
        reasons.append(reason)
    more = f" and {len(without) - 1} others" if len(without) > 1 else ""
    remedy = "Add a reward, widen a `where`, or remove it."
    raise UserError(f"{where}: no reward applies to this row{more}: {'; '.join(reasons)}. {remedy}")


def has_weight(terms: RewardTerms) -> bool:
    return terms.weight != 0 or bool(terms.weight_to)


class UnscoredRows:
    """Reports, once each, prompts for which every function with a weight returned None for all completions."""

    def __init__(self, what_then: OnUnscoredRow) -> None:
        self.what_then = what_then
        self.named: set[str] = set()

    def look_at(self, groups: Sequence[Group], grades: Grades) -> None:
        """Warn of the first few such prompts, or raise RunError; silent in a step whose scoring failed."""
        if grades.num_failures:
            return
        functions = ", ".join(name for name, weight in zip(grades.names, grades.weights, strict=True) if weight)
        for group, unscored in zip(groups, grades.rewards.isnan().all(dim=1).tolist(), strict=True):
            if not unscored or not functions or group.prompt.id in self.named:
                continue
            said = f"{functions} returned None for all {len(group.rollouts)} completions"
            message = f"prompt {group.prompt.id}: no reward applies: {said}"
            if self.what_then == "stop":
                raise RunError(f"{message}. Add a reward, remove such rows, or set grading.on_unscored_row = warn.")
            self.named.add(group.prompt.id)
            if len(self.named) <= 5:  # others are only counted, as `frac_unscored`
                last = " Further rows like it are not named." if len(self.named) == 5 else ""
                warnings.warn(f"{message}, so it trains on nothing here.{last}", RuntimeWarning, stacklevel=1)
