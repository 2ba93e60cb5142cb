"""Rows that no reward applies to: refused before training where the recipe decides it, named where functions do."""

import warnings
from collections.abc import Mapping, Sequence

from posttrain.errors import RunError, UserError
from posttrain.options.grading import OnUnscoredRow
from posttrain.options.reward import RewardTerms
from posttrain.records import Grades, Group
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.grading.grade import dependency_rounds

MOST_NAMED = 5
"""Rows that a run is warned of; more are counted by `frac_unscored` alone."""


def require_rewarded_rows(
    rows: Sequence[tuple[str, Mapping[str, object]]], functions: Sequence[RewardFunction]
) -> None:
    """Refuse rows, each with where it stands, that every reward with a weight leaves out by its `where`, or its gate's.

    Rewards that are all without weight pay for no row, which is no row's fault.
    """
    rounds, paying = dependency_rounds(functions), [each for each in functions if has_weight(each.settings)]
    if not paying:
        return
    names = {each.name for each in paying}
    without = [(place, columns) for place, columns in rows if not names & asked(columns, functions, rounds)]
    if without:
        place, columns = without[0]
        more = f" and of {len(without) - 1} other rows" if len(without) > 1 else ""
        said = "; ".join(left_out(each, columns) for each in paying)
        raise UserError(
            f"{place}: no reward applies to a completion of this row{more}: {said}.  Add a reward for such rows, widen"
            " a `where`, or leave the rows out."
        )


def has_weight(terms: RewardTerms) -> bool:
    """Whether a reward counts in some step."""
    return terms.weight != 0 or bool(terms.weight_to)


def asked(
    columns: Mapping[str, object], functions: Sequence[RewardFunction], rounds: Sequence[Sequence[int]]
) -> set[str]:
    """The rewards that are asked about a row with these columns; behind a gate only where the gate is."""
    found: set[str] = set()
    for function in (functions[place] for together in rounds for place in together):
        terms = function.settings
        if terms.applies(columns) and (not terms.gate or terms.gate in found):
            found.add(function.name)
    return found


def left_out(function: RewardFunction, columns: Mapping[str, object]) -> str:
    """Why a reward is not asked about a row."""
    terms = function.settings
    for name, value in terms.where.items():
        if columns.get(name) != value:
            found = f"{columns[name]!r:.40}" if name in columns else "no such column"
            return f"{function.name} is for {name} = {value!r:.40}, and here is {found}"
    return f"{function.name} waits for its gate {terms.gate}"


class UnscoredRows:
    """Names prompts of which every function with a weight said None of all completions, each once."""

    def __init__(self, what_then: OnUnscoredRow) -> None:
        self.what_then = what_then
        self.named: set[str] = set()

    def look_at(self, groups: Sequence[Group], grades: Grades) -> None:
        """Warn of the first few such prompts of a run; raises RunError where that is asked for.

        Where scoring failed the prompt may be another's fault, and nothing is said in that step.
        """
        if grades.num_failures:
            return
        functions = [name for name, weight in zip(grades.names, grades.weights.tolist(), strict=True) if weight]
        for group, unscored in zip(groups, grades.rewards.isnan().all(dim=1).tolist(), strict=True):
            if unscored and functions and group.prompt.id not in self.named:
                self.tell(group, functions)

    def tell(self, group: Group, functions: Sequence[str]) -> None:
        """Say that no reward applies to a prompt."""
        says = (
            f"prompt {group.prompt.id}: no reward applies: {', '.join(functions)} said None of all"
            f" {len(group.rollouts)} completions, so that nothing is learned from this row"
        )
        if self.what_then == "stop":
            raise RunError(
                f"{says}.  Add a reward for such rows, or leave them out; with grading.on_unscored_row = warn the run"
                " goes on without them."
            )
        self.named.add(group.prompt.id)
        if len(self.named) <= MOST_NAMED:
            last = "; further rows like it are not named" if len(self.named) == MOST_NAMED else ""
            warnings.warn(f"{says}{last}.", RuntimeWarning, stacklevel=1)
