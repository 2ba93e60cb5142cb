"""What is compared: variants of one task, each by several seeds, at an equal budget.  Nothing is loaded here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.config import Config, as_recipe
from posttrain.errors import UserError
from posttrain.options.dataset import DatasetOptions

MEASURED_ALIKE = ("model", "task", "evaluation", "sandbox")
"""Sections that decide what is measured, and of which start: the same in every variant."""
NO_STEP_LIMIT = 1_000_000
"""Steps of a cell that its budget ends."""
BUDGET_FORMS = "tokens=200000, minutes=3, or both: tokens=200000,minutes=3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What every cell may use up; the first that is used up ends it, after the step that goes on."""

    tokens: int | None = None
    """Completion tokens sampled to train on, those of groups that dynamic sampling set aside included."""
    minutes: float | None = None
    """Wall time of the run, its evaluations included."""

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("minutes", self.minutes)):
            if value is not None and not value > 0:
                raise UserError(f"budget {name}={value} leaves nothing to train with; use more than 0.")

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
        """Where its run is kept."""
        return Path(self.config.run.folder)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.variant} seed {self.seed}"

    @property
    def recipe(self) -> str:
        """The recipe of the run, every option written out."""
        return as_recipe(self.config)


def variant_names(recipes: Sequence[str]) -> list[str]:
    """What the variants are called: by their files, without folder and ending."""
    names = [
        re.sub(r"[^\w.+-]", "_", Path(recipe).name.removesuffix(".yaml").removesuffix(".yml")) for recipe in recipes
    ]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two recipes are called {name}; a comparison tells its variants apart by their names.")
    return names


def make_cells(variants: Mapping[str, Config], *, seeds: int, budget: Budget, folder: Path) -> list[Cell]:
    """All cells, every variant with the first seed before any with the second: a part of them is a fair comparison too.

    Raises UserError where the variants cannot be compared, or do not go with a budget.
    """
    if seeds < 1:
        raise UserError(f"seeds = {seeds} must be at least 1.")
    require_comparable(variants)
    for name, config in variants.items():
        require_held_out(name, config)
        require_suits_budget(name, config, budget)
    first = next(iter(variants.values())).run.seed
    return [
        Cell(
            variant=name, seed=seed, config=cell_config(config, seed, budget, folder / "cells" / f"{name}-seed-{seed}")
        )
        for seed in range(first, first + seeds)
        for name, config in variants.items()
    ]


def cell_config(config: Config, seed: int, budget: Budget, folder: Path) -> Config:
    """The config of one cell: steps, time and tokens are those of the budget where there is one."""
    run = replace(config.run, seed=seed, folder=str(folder), overwrite=False)
    if budget:
        run = replace(run, num_steps=NO_STEP_LIMIT, token_limit=budget.tokens, time_limit_minutes=budget.minutes)
    return replace(config, run=run)


def require_comparable(variants: Mapping[str, Config]) -> None:
    """Refuse variants that start from different models, or that are measured in different ways."""
    (first, wanted), *others = variants.items()
    judged_by_reward = isinstance(wanted.task, Mapping) or wanted.task.name == DatasetOptions.name
    sections = (*MEASURED_ALIKE, *(("rewards",) if judged_by_reward else ()))
    for name, config in others:
        for section in sections:
            require_same(section, getattr(wanted, section), getattr(config, section), (first, name))
        for option in ("seed", "threads"):
            require_same(f"run.{option}", getattr(wanted.run, option), getattr(config.run, option), (first, name))
        for option in ("max_completion_tokens",):
            given = (getattr(wanted.rollout, option), getattr(config.rollout, option))
            require_same(f"rollout.{option}", *given, (first, name))


def require_same(what: str, first: object, second: object, names: tuple[str, str]) -> None:
    """Refuse a difference in what decides how results are measured."""
    if first != second:
        raise UserError(
            f"{what} differs between {names[0]} and {names[1]}, and decides what is measured or where training starts:"
            f" the results could not be compared.\n    {names[0]}: {first}\n    {names[1]}: {second}\n"
            "  Give all variants the same, such as by a recipe that lies under each of them."
        )


def require_held_out(name: str, config: Config) -> None:
    """Refuse a data set of which nothing is set apart: held-out accuracy is what is compared."""
    task = config.task
    if not isinstance(task, DatasetOptions) or task.held_out_path or task.held_out_split:
        return
    if task.held_out_share == 0:
        raise UserError(
            f"{name}: task.held_out_share = 0: nothing is held out, and held-out accuracy is what is compared.  Use a"
            " share above 0, or name rows with task.held_out_path."
        )


def require_suits_budget(name: str, config: Config, budget: Budget) -> None:
    """Refuse what ends a run, or lets its learning rate fall, by another measure than the budget that ends all."""
    if budget and config.run.early_stop_evaluations is not None:
        raise UserError(
            f"{name}: run.early_stop_evaluations = {config.run.early_stop_evaluations} may end a run before its budget"
            f" of {budget}, and runs are compared at an equal one.  Leave it out, or the budget."
        )
    if budget and config.update.schedule != "constant":
        raise UserError(
            f"{name}: update.schedule = {config.update.schedule} falls to zero at run.num_steps, and a budget of"
            f" {budget} ends runs earlier or later.  Use update.schedule = constant, or leave the budget out."
        )
