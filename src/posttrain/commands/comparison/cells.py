"""What is compared: variants of one task, each by several seeds, at an equal budget.  Nothing is loaded here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.config import Config, as_recipe
from posttrain.errors import UserError
from posttrain.options.bounds import value_at
from posttrain.options.dataset import DatasetOptions

MEASURED_ALIKE = (
    *("model", "task", "evaluation", "sandbox"),
    *("run.seed", "run.threads", "rollout.max_completion_tokens"),
)
"""Sections and options that decide what is measured, and where training starts: the same in every variant."""
NO_STEP_LIMIT = 1_000_000
"""Steps of a cell that its budget ends."""
BUDGET_FORMS = "tokens=200000, minutes=3, or both: tokens=200000,minutes=3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What every cell may use up; the first that is used up ends it, after the step in progress."""

    tokens: int | None = None
    """Completion tokens sampled to train on, including those of groups that dynamic sampling dropped."""
    minutes: float | None = None
    """Wall time of the run, evaluations included."""

    def __bool__(self) -> bool:
        return self.tokens is not None or self.minutes is not None

    def __str__(self) -> str:
        given = ((self.tokens, "tokens"), (self.minutes, "minutes"))
        return (
            " or ".join(f"{value:,} {unit}" for value, unit in given if value is not None) or "the recipes' own steps"
        )


def read_budget(text: str) -> Budget:
    """The budget that a flag gives, such as `tokens=200000` or `minutes=3`; an empty text is none."""
    kinds: Mapping[str, type[int] | type[float]] = {"tokens": int, "minutes": float}
    given: dict[str, int | float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name in given:
            raise UserError(f"budget {text}: {name} is given twice.  Use {BUDGET_FORMS}.")
        try:
            given[name] = kinds[name](value.replace("_", ""))
        except (KeyError, ValueError):
            raise UserError(f"budget {text}: {part.strip()!r} is not a budget.  Use {BUDGET_FORMS}.") from None
        if not given[name] > 0:
            raise UserError(f"budget {text}: {name} must be greater than 0.")
    return Budget(**given)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the comparison: a variant with a seed."""

    variant: str
    seed: int
    config: Config
    """With the seed, the budget and the folder of this cell."""

    @property
    def folder(self) -> Path:
        return Path(self.config.run.folder)

    @property
    def name(self) -> str:
        return f"{self.variant} seed {self.seed}"

    @property
    def recipe(self) -> str:
        """The recipe of the run, every option written out."""
        return as_recipe(self.config)


def variant_names(recipes: Sequence[str]) -> list[str]:
    """The names of the variants: those of their files, without folder and ending."""
    names = [
        re.sub(r"[^\w.+-]", "_", Path(recipe).name.removesuffix(".yaml").removesuffix(".yml")) for recipe in recipes
    ]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two recipes are called {name}.  Rename one: variants are told apart by their names.")
    return names


def make_cells(variants: Mapping[str, Config], *, seeds: int, budget: Budget, folder: Path) -> list[Cell]:
    """All cells, every variant with the first seed before any with the second: a part of them is a fair comparison too.

    Raises UserError if the variants cannot be compared, or do not fit a budget.
    """
    (first, wanted), *_ = variants.items()
    by_reward = isinstance(wanted.task, Mapping) or wanted.task.name == DatasetOptions.name
    alike = (*MEASURED_ALIKE, *(("rewards",) if by_reward else ()))
    for name, config in variants.items():
        for option in alike:
            require_same(option, {first: wanted, name: config})
        require_suits(name, config, budget)

    def config_of(config: Config, name: str, seed: int) -> Config:
        place = folder / "cells" / f"{name}-seed-{seed}"
        run = replace(config.run, seed=seed, folder=str(place), overwrite=False)
        if budget:
            run = replace(run, num_steps=NO_STEP_LIMIT, token_limit=budget.tokens, time_limit_minutes=budget.minutes)
        return replace(config, run=run)

    return [
        Cell(variant=name, seed=seed, config=config_of(config, name, seed))
        for seed in range(wanted.run.seed, wanted.run.seed + seeds)
        for name, config in variants.items()
    ]


def require_same(option: str, configs: Mapping[str, Config]) -> None:
    """Refuse a difference in what decides how results are measured."""
    values = {name: value_at(config, option) for name, config in configs.items()}
    first = next(iter(values.values()))
    if any(value != first for value in values.values()):
        shown = "\n".join(f"    {name}: {value}" for name, value in values.items())
        rule = f"{option} differs between {' and '.join(values)}: their results could not be compared"
        raise UserError(f"{rule}.\n{shown}\n  Give all variants the same, such as by --base.")


def require_suits(name: str, config: Config, budget: Budget) -> None:
    """Refuse a data set without held-out rows, and what ends a run, or its learning rate, by another measure."""
    task, run, update = config.task, config.run, config.update
    if isinstance(task, DatasetOptions) and not (task.held_out_path or task.held_out_split or task.held_out_share):
        rule = "nothing is held out, and held-out accuracy is compared"
        raise UserError(f"{name}: task.held_out_share = 0: {rule}.  Use a share above 0, or set task.held_out_path.")
    if budget and run.early_stop_evaluations is not None:
        given = f"run.early_stop_evaluations = {run.early_stop_evaluations}"
        raise UserError(f"{name}: {given} may end a run before its budget of {budget}.  Leave it out, or the budget.")
    if budget and update.schedule != "constant":
        rule = f"falls to zero at run.num_steps, and a budget of {budget} ends runs earlier or later"
        raise UserError(f"{name}: update.schedule = {update.schedule} {rule}.  Use constant, or leave the budget out.")
