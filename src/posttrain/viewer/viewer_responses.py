"""One function from an address to its response, for the server, for an exported file and for a notebook."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from posttrain.viewer.behaviour_curves import BehaviourCurves
from posttrain.viewer.folder_files import content_or
from posttrain.viewer.held_out_pages import compared_runs, held_out_page
from posttrain.viewer.kinds.demonstration_losses import demonstration_page
from posttrain.viewer.kinds.grid_world import grid_page
from posttrain.viewer.kinds.run_pictures import PICTURES, picture_page
from posttrain.viewer.kinds.run_tables import comparison_page, phases_page
from posttrain.viewer.kinds.scored_pairs import pair_page
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.problem_pages import ProblemIndex
from posttrain.viewer.response_types import KindPage, RunList, Source
from posttrain.viewer.rollout_page import rollout_page
from posttrain.viewer.rollout_rows import RowPages
from posttrain.viewer.row_selections import RowQuery, WrongQuery
from posttrain.viewer.run_folders import holds_runs, runs_below
from posttrain.viewer.run_overview import overview, run_entry, run_version
from posttrain.viewer.step_pages import group_page, step_list, step_page

PAGES_OF_KINDS = {
    "reward-model": ("pairs", "Pairs"),
    "dpo": ("pairs", "Pairs"),
    "collect": ("pairs", "Pairs"),
    "sft": ("demonstrations", "Demonstrations"),
    "irl": ("grid", "World"),
    "compare": ("comparison", "Comparison"),
    "phases": ("phases", "Phases"),
}
"""Kinds of runs with their own page -> its address and title."""
PAGE_BOUNDS = {"offset": "0", "limit": "50"}
Query = Mapping[str, str]
ViewerResponse = Mapping[str, object]


class NoSuchResponse(Exception):
    """There is no response at an address."""


@dataclass(frozen=True)
class ShownRun:
    """A run, and what is cached between responses about it."""

    run: OpenedRun

    @cached_property
    def problems(self) -> ProblemIndex:
        return ProblemIndex(self.run)

    @cached_property
    def behaviours(self) -> BehaviourCurves:
        return BehaviourCurves(self.run)

    @cached_property
    def row_pages(self) -> RowPages:
        return RowPages(self.run)


@dataclass(frozen=True, kw_only=True)
class OpenedRuns:
    """The runs that are shown, in order."""

    shown: list[ShownRun] = field(default_factory=list)
    below: Path | None = None
    """The folder where they were found, if they were not named."""
    live: bool = True
    """Whether the page follows runs that go on."""

    def look_again(self) -> list[str]:
        """Add the runs that have appeared below the folder; returns what was not searched.

        Those that are known keep their numbers.
        """
        if self.below is None:
            return []
        known, found = {each.run.folder for each in self.shown}, runs_below(self.below)
        new = [folder for folder in found.folders if folder not in known]
        self.shown.extend(OpenedRuns.of(new).shown)
        return found.faults

    @classmethod
    def of(cls, folders: Sequence[Path], *, below: Path | None = None) -> "OpenedRuns":
        names = [folder.resolve().name for folder in folders]
        twice = {name for name in names if names.count(name) > 1}
        opened = [
            OpenedRun(folder, str(folder) if name in twice else name)
            for folder, name in zip(folders, names, strict=True)
        ]
        return cls(shown=[ShownRun(run) for run in opened], below=below)


@dataclass(frozen=True, slots=True)
class AskedFor:
    """A request: all runs, the requested run, the rest of the address, and the query."""

    runs: OpenedRuns
    at: int
    path: Sequence[str]
    query: Query

    @property
    def shown(self) -> ShownRun:
        return self.runs.shown[self.at]

    @property
    def run(self) -> OpenedRun:
        return self.shown.run

    @property
    def step(self) -> int | None:
        step = self.query.get("step", "")
        return whole_number("step", step) if step else None

    @property
    def source(self) -> Source:
        return query_source(self.query.get("source", "rollouts"))


def viewer_response(runs: OpenedRuns, path: str, query: Query) -> ViewerResponse:
    """The response at an address after `/api/`.  Raises NoSuchResponse, WrongQuery, and Unreadable for a file."""
    for pattern, reply in ADDRESSES.items():
        if found := re.fullmatch(pattern, path, re.ASCII):
            at, *rest = found.groups() or ("0",)
            if pattern.startswith("run/") and int(at) >= len(runs.shown):
                raise NoSuchResponse(f"{path}: there are {len(runs.shown)} runs")
            return reply(AskedFor(runs, int(at), rest, query))
    raise NoSuchResponse(f"{path[:200]}: no such response")


def run_list(asked: AskedFor) -> ViewerResponse:
    """All runs; below a folder also those that were begun since, and without those that were removed."""
    runs = asked.runs
    faults = runs.look_again()
    there = [at for at, each in enumerate(runs.shown) if runs.below is None or each.run.folder.is_dir()]
    return RunList(
        runs=[run_entry(runs.shown[at].run, at) for at in there],
        live=runs.live,
        below=str(runs.below or ""),
        faults=faults,
    )


def run_overview(asked: AskedFor) -> ViewerResponse:
    shown, run = asked.runs.shown, asked.run
    part_of = enclosing(shown, run)
    others = [at for at in range(len(shown)) if at != asked.at]
    if asked.runs.below is not None:
        within = part_of is not None and content_or("", shown[part_of].run.kind, []) == "compare"
        others = [at for at in others if within and shown[at].run.place.parent == run.place.parent]
    return overview(run, asked.at, part_of=part_of, others=others, pages=kind_pages(run))


def enclosing(shown: Sequence[ShownRun], run: OpenedRun) -> int | None:
    """The comparison or the phases whose folder a run is in, the innermost one."""
    around = [at for at, each in enumerate(shown) if each.run.place in run.place.parents]
    around = [at for at in around if holds_runs(shown[at].run.folder)]
    return max(around, key=lambda at: len(shown[at].run.place.parts), default=None)


def kind_pages(run: OpenedRun) -> list[KindPage]:
    """The page of its kind of run, if it has one."""
    kind = content_or("", run.kind, [])
    if kind not in PAGES_OF_KINDS:
        return []
    path, title = PAGES_OF_KINDS[kind]
    return [KindPage(path=path, title=title)]


def pairs(asked: AskedFor) -> ViewerResponse:
    require_page(asked.run, "pairs")
    numbers = {name: whole_number(name, asked.query.get(name, default)) for name, default in PAGE_BOUNDS.items()}
    return pair_page(asked.run, step=asked.step, sort=asked.query.get("sort", ""), **numbers)


def demonstrations(asked: AskedFor) -> ViewerResponse:
    require_page(asked.run, "demonstrations")
    return demonstration_page(asked.run, asked.step)


def grid(asked: AskedFor) -> ViewerResponse:
    require_page(asked.run, "grid")
    return grid_page(asked.run)


def comparison_response(asked: AskedFor) -> ViewerResponse:
    require_page(asked.run, "comparison")
    return comparison_page(asked.run, [each.run for each in asked.runs.shown])


def phases(asked: AskedFor) -> ViewerResponse:
    require_page(asked.run, "phases")
    return phases_page(asked.run, [each.run for each in asked.runs.shown])


def require_page(run: OpenedRun, path: str) -> None:
    if path not in [each["path"] for each in kind_pages(run)]:
        raise NoSuchResponse(f"{path}: is not a page of this kind of run")


def row_page(asked: AskedFor) -> ViewerResponse:
    """Some rows, chosen by the query."""
    query = asked.query
    chosen = RowQuery(
        source=asked.source,
        step=asked.step,
        outcome=query.get("outcome", ""),
        term=query.get("term", ""),
        low=query_bound("low", query),
        high=query_bound("high", query),
        length_low=query_bound("length_low", query),
        length_high=query_bound("length_high", query),
        text=query.get("text", ""),
        evaluation=query.get("evaluation", ""),
        sampling=query.get("sampling", ""),
        sort=query.get("sort", ""),
    )
    offset = whole_number("offset", query.get("offset", "0"))
    return asked.shown.row_pages.page(chosen, offset, whole_number("limit", query.get("limit", "100")))


def group(asked: AskedFor) -> ViewerResponse:
    source, step, name = asked.path
    found = group_page(asked.run, query_source(source), int(step), name)
    if found is None:
        raise NoSuchResponse(f"{source}/{step}/{name}: no such group in this step")
    return found


def rollout(asked: AskedFor) -> ViewerResponse:
    source, step, *names = asked.path
    found = rollout_page(asked.run, query_source(source), int(step), (names[0], names[1]))
    if found is None:
        raise NoSuchResponse(f"{source}/{step}/{'/'.join(names)}: no such rollout in this step")
    return found


def problem_response(asked: AskedFor) -> ViewerResponse:
    name = asked.query.get("id", "")
    found = asked.shown.problems.page(name)
    if found is None:
        raise NoSuchResponse(f"{name[:80]!r}: no such problem in this run")
    return found


def compare(asked: AskedFor) -> ViewerResponse:
    """The two runs with the numbers in the query."""
    a, b = (whole_number(name, asked.query.get(name, "")) for name in ("a", "b"))
    shown = asked.runs.shown
    if max(a, b) >= len(shown):
        raise NoSuchResponse(f"compare: there are {len(shown)} runs")
    return compared_runs(shown[a].run, shown[b].run, (a, b))


def query_source(text: str) -> Source:
    known: dict[str, Source] = {"rollouts": "rollouts", "evaluations": "evaluations"}
    if text in known:
        return known[text]
    raise WrongQuery(f"source = {text[:40]!r}: must be rollouts or evaluations")


def whole_number(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,12}", text, re.ASCII):
        raise WrongQuery(f"{name} = {text[:40]!r}: must be a whole number")
    return int(text)


def query_bound(name: str, query: Query) -> float | None:
    """A number of the query; None where it is empty.  Raises WrongQuery."""
    text = query.get(name, "")
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if math.isnan(found):
        raise WrongQuery(f"{name} = {text[:40]!r}: must be a number")
    return found


SOURCE, STEP, NAME = "(rollouts|evaluations)", r"(\d{1,12})", r"([\w-]{1,60})"
RUN = r"run/(\d{1,6})"
ADDRESSES: dict[str, Callable[[AskedFor], ViewerResponse]] = {
    "runs": run_list,
    f"{RUN}/state": lambda asked: run_version(asked.run),
    f"{RUN}/overview": run_overview,
    f"{RUN}/steps": lambda asked: step_list(asked.run, asked.source),
    f"{RUN}/rows": row_page,
    f"{RUN}/step/{STEP}": lambda asked: step_page(asked.run, asked.source, int(asked.path[0])),
    "compare": compare,
    f"{RUN}/problems": lambda asked: asked.shown.problems.listed(asked.query.get("text", "")),
    f"{RUN}/problem": problem_response,
    f"{RUN}/behaviours": lambda asked: asked.shown.behaviours.page(),
    f"{RUN}/held-out": lambda asked: held_out_page(asked.run),
    f"{RUN}/group/{SOURCE}/{STEP}/{NAME}": group,
    f"{RUN}/rollout/{SOURCE}/{STEP}/{NAME}/{NAME}": rollout,
    f"{RUN}/pairs": pairs,
    f"{RUN}/demonstrations": demonstrations,
    f"{RUN}/grid": grid,
    f"{RUN}/comparison": comparison_response,
    f"{RUN}/phases": phases,
    f"{RUN}/picture/({'|'.join(PICTURES)})": lambda asked: picture_page(asked.run, asked.path[0]),
}
"""Patterns of addresses."""
