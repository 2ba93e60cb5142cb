"""An exported file: the viewer's page with as many responses about some runs as fit a size."""

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from urllib.parse import quote, urlencode

from posttrain.errors import UserError
from posttrain.viewer.exported.chosen_rollouts import Group, alarmed_groups, other_groups
from posttrain.viewer.exported.exported_page import embedded_json, page_html
from posttrain.viewer.exported.size_limit import SizedResponses
from posttrain.viewer.folder_files import Unreadable
from posttrain.viewer.kinds.run_pictures import PICTURES
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.response_types import Source
from posttrain.viewer.rollout_responses import RowPage, ShownRollout
from posttrain.viewer.viewer_responses import NoSuchResponse, OpenedRuns, ViewerResponse, kind_pages, viewer_response

PAGE_OF_ROWS = 100
"""Rows that the page asks for at a time."""
BEHAVIOUR_PARTS = 200
"""Questions for the curves of behaviours, which are computed in parts."""
ROOM_FOR_NOTE = 2000
"""Bytes for what the file says of itself."""
ROOM_FOR_LISTS = 1000
"""Bytes of two pages of rows without their rows."""
PLACE_OF_ROW = 16
"""Bytes of a row that is already in the file, at most."""
MOST_LEFT_OUT = 20
"""Maximum number of omitted pages to name."""
MOST_COMPARED = 4
"""Maximum number of runs for which every pair is compared."""
MISSES = 12
"""Number of consecutive groups that do not fit before the search stops."""
EXTRAS = ("held-out", "problems", "steps", "behaviours")
"""More pages of a run, included if they fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """One HTML file, and its content."""

    html: str
    num_rollouts: int
    of_rollouts: int
    left_out: tuple[str, ...]
    """Pages that did not fit."""


@dataclass
class KeptRun:
    """The content of a file for one run."""

    at: int
    run: OpenedRun
    rows: dict[Source, list[ShownRollout]] = field(default_factory=lambda: {"rollouts": [], "evaluations": []})
    groups: list[Group] = field(default_factory=list)

    @property
    def num_rollouts(self) -> int:
        return sum(map(len, self.rows.values()))


def export_runs(runs: OpenedRuns, limit: int) -> ExportedFile:
    """The runs as one file of at most `limit` bytes.  Raises UserError if not even their overviews fit."""
    kept = [KeptRun(at, shown.run) for at, shown in enumerate(runs.shown)]
    overviews = needed(runs)
    sized = SizedResponses(limit - len(page_html({}).encode()) - ROOM_FOR_NOTE)
    sized.reserved = ROOM_FOR_LISTS * len(kept)  # of runs without a rollout, too
    if not sized.add(overviews):
        whole = SizedResponses(sys.maxsize)
        whole.add(overviews)
        least = (limit - sized.limit + sized.reserved + whole.used + whole.shared.size) / 1e6
        rule = f"the page and the overviews need {least:.2f}MB"
        raise UserError(f"size = {limit / 1e6:g}MB: {rule}.  Use a larger size.")
    add_groups(runs, kept, {each.at: iter(alarmed_groups(each.run)) for each in kept}, sized)
    pages = [(f"run/{each.at}/{name}", asked(runs, each, name)) for each in kept for name in extras(each)]
    pages += comparisons(runs)
    left_out = [path for path, responses in pages if not sized.add(responses)]
    add_groups(runs, kept, {each.at: other_groups(each.run) for each in kept}, sized)
    sized.reserved = 0
    for each in kept:
        added = sized.add(row_pages(each))
        assert added, "room was reserved for the lists of rows"
    counts = sum(each.num_rollouts for each in kept), sum(all_rollouts(each.run) for each in kept)
    note = {"rollouts": counts[0], "of": counts[1], "left_out": left_out[:MOST_LEFT_OUT]}
    html = page_html({**sized.texts, "export": embedded_json(note)}, sized.shared.places)
    assert len(html.encode()) <= limit, (len(html.encode()), limit)
    return ExportedFile(html=html, num_rollouts=counts[0], of_rollouts=counts[1], left_out=tuple(left_out))


def needed(runs: OpenedRuns) -> dict[str, object]:
    """The list of runs and their overviews."""
    paths = ["runs", *(f"run/{at}/{name}" for at in range(len(runs.shown)) for name in ("state", "overview"))]
    return {response_address(path): found for path in paths if (found := exported_response(runs, path)) is not None}


def extras(kept: KeptRun) -> list[str]:
    """Further pages of a run, that of its kind first."""
    return [*(page["path"] for page in kind_pages(kept.run)), *(f"picture/{name}" for name in PICTURES), *EXTRAS]


def asked(runs: OpenedRuns, kept: KeptRun, name: str) -> dict[str, object]:
    """The responses for another page; empty if the run does not have this page."""
    base = f"run/{kept.at}"
    if name in EXTRAS and not kept.run.rollouts.steps() and not kept.run.evaluations.steps():
        return {}
    if name.startswith("picture/") and not (kept.run.folder / PICTURES[name.removeprefix("picture/")]).is_file():
        return {}
    queries: list[dict[str, str]] = [{"source": "rollouts"}] if name == "steps" else [{}]
    if name in ("pairs", "demonstrations"):
        first = exported_response(runs, f"{base}/{name}") or {}
        steps = first.get("steps")
        queries += [{"step": str(step)} for step in (steps if isinstance(steps, list) else [])]
    found: dict[str, object] = {}
    for query in queries:
        reply = finished_response(runs, f"{base}/{name}", query)
        found |= {} if reply is None else {response_address(f"{base}/{name}", query): reply}
    return found


def finished_response(runs: OpenedRuns, path: str, query: dict[str, str]) -> ViewerResponse | None:
    """A response that is computed in parts is asked for until it is done."""
    reply = exported_response(runs, path, query)
    for _ in range(BEHAVIOUR_PARTS):
        if reply is None or reply.get("done", True):
            break
        reply = exported_response(runs, path, query)
    return reply


def comparisons(runs: OpenedRuns) -> list[tuple[str, dict[str, object]]]:
    """Two runs problem by problem, for the pairs of a few."""
    numbers = range(len(runs.shown) if len(runs.shown) <= MOST_COMPARED else 0)
    queries = [{"a": str(a), "b": str(b)} for a in numbers for b in numbers if a != b]
    found = [(query, exported_response(runs, "compare", query)) for query in queries]
    return [
        (f"compare {query['a']} {query['b']}", {response_address("compare", query): reply}) for query, reply in found
    ]


def add_groups(
    runs: OpenedRuns, kept: list[KeptRun], waiting: dict[int, Iterator[Group]], sized: SizedResponses
) -> None:
    """Add groups of each run by turns until no more fit, and reserve room for the lists of their rows."""
    misses = 0
    while waiting and misses < MISSES:
        for each in kept:
            group = next(waiting[each.at], None) if each.at in waiting else None
            if group is None:
                waiting.pop(each.at, None)
                continue
            responses, rows = group_responses(runs, each, group, sized.texts)
            room = 2 * PLACE_OF_ROW * len(rows) + ROOM_FOR_LISTS  # in the list of the run and in that of the step
            if responses and sized.add(responses, reserve=room):
                misses = 0
                each.rows[group[0]] += rows
                each.groups.append(group)
                sized.add(problem_responses(runs, each, group, rows))
            else:
                misses += 1


def group_responses(
    runs: OpenedRuns, kept: KeptRun, group: Group, known: Collection[str]
) -> tuple[dict[str, object], list[ShownRollout]]:
    """A group with its rollouts, its step unless that address is known, and the rows of its rollouts."""
    source, step, name = group
    base = f"run/{kept.at}"
    found: dict[str, object] = {}
    rows: list[ShownRollout] = []
    page = exported_response(runs, f"{base}/group/{source}/{step}/{name}")
    if page is None:
        return {}, []
    found[response_address(f"{base}/group/{source}/{step}/{name}")] = page
    rollouts = page["rollouts"]
    assert isinstance(rollouts, list)
    for rollout in rollouts:
        path = f"{base}/rollout/{rollout['at']}"
        reply = exported_response(runs, path)
        if reply is not None:
            found[response_address(path)] = {
                name: each for name, each in reply.items() if name != "graded"
            }  # not on the page
            row = reply["row"]
            assert isinstance(row, dict)
            rows.append(row)  # type: ignore[arg-type]  # a ShownRollout, as the page has it
    of_step = response_address(f"{base}/step/{step}")
    if source == "rollouts" and of_step not in known and (reply := exported_response(runs, f"{base}/step/{step}")):
        found[of_step] = reply
    return found, rows


def problem_responses(runs: OpenedRuns, kept: KeptRun, group: Group, rows: list[ShownRollout]) -> dict[str, object]:
    """The completions of a held-out problem over training."""
    path, query = f"run/{kept.at}/problem", {"id": rows[0]["prompt_id"]} if rows else {}
    if group[0] == "rollouts" or not query or (reply := exported_response(runs, path, query)) is None:
        return {}
    return {response_address(path, query): reply}


def row_pages(kept: KeptRun) -> dict[str, object]:
    """The lists of the rollouts that are kept: of the run, and of each step."""
    found: dict[str, object] = {}
    for source, rows in kept.rows.items():
        total = sum(kept.run.files(source).file(step).num_rows for step in readable_steps(kept.run, source))
        found |= listed(kept, {"source": source}, rows, total)
        for step in {row["step"] for row in rows}:
            own, of_step = [row for row in rows if row["step"] == step], kept.run.files(source).file(step).num_rows
            found |= listed(kept, {"source": source, "step": str(step)}, own, of_step)
    return found


def listed(kept: KeptRun, query: dict[str, str], rows: list[ShownRollout], total: int) -> dict[str, object]:
    """Pages of 100 rows, as the page asks for them."""
    ordered = sorted(rows, key=lambda row: (row["step"], row["draw"], row["sample"], row["rollout"]))
    found: dict[str, object] = {}
    for offset in range(0, max(1, len(ordered)), PAGE_OF_ROWS):
        page = RowPage(
            total=total,
            matches=len(ordered),
            offset=offset,
            done=True,
            looked_at=1,
            of_files=1,
            rows=ordered[offset : offset + PAGE_OF_ROWS],
            outcomes=[],
            terms=[],
            faults=[],
        )
        bounds = {"offset": str(offset), "limit": str(PAGE_OF_ROWS)}
        found[response_address(f"run/{kept.at}/rows", {**query, **bounds})] = page
    return found


def all_rollouts(run: OpenedRun) -> int:
    sources: tuple[Source, Source] = ("rollouts", "evaluations")
    return sum(run.files(each).file(step).num_rows for each in sources for step in readable_steps(run, each))


def readable_steps(run: OpenedRun, source: Source) -> list[int]:
    return [step for step, _ in run.files(source).readable([])]


def exported_response(runs: OpenedRuns, path: str, query: dict[str, str] | None = None) -> ViewerResponse | None:
    """None if there is no such response; an unreadable file is a line on its page."""
    try:
        return viewer_response(runs, path, query or {})
    except NoSuchResponse:
        return None
    except Unreadable as fault:
        return {"faults": [str(fault)]}


def response_address(path: str, query: dict[str, str] | None = None) -> str:
    """An address as the page writes it."""
    return f"/api/{quote(path)}" + (f"?{urlencode(query)}" if query else "")
