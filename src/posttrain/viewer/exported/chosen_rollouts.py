"""Which groups of a run's rollouts an exported file has, best first.

Groups of alarms come first, then held-out problems before and after training, then groups of all steps.  For every size
limit these are spread evenly: the first step, the last, the middle one, and so on.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from posttrain.viewer.folder_files import Unreadable
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.response_types import Source
from posttrain.viewer.run_overview import alarm_entries
from posttrain.viewer.step_pages import step_page

Group = tuple[Source, int, str]
"""Its source, its step, and its name there."""


def other_groups(run: OpenedRun) -> Iterator[Group]:
    """The groups without alarms, in the order in which they are kept."""
    seen = {*alarmed_groups(run)}
    for group in chain(held_out_groups(run), spread_groups(run)):
        if group not in seen:
            seen.add(group)
            yield group


def alarmed_groups(run: OpenedRun) -> list[Group]:
    """The groups that alarms link to."""
    found: dict[Group, None] = {}
    for alarm in alarm_entries(run, []):
        for link in alarm["links"]:
            source, step, group, _ = link["at"].split("/")
            found["evaluations" if source == "evaluations" else "rollouts", int(step), group] = None
    return list(found)


HELD_OUT_FIRST = 8
"""Held-out problems that come before the groups of training."""


def held_out_groups(run: OpenedRun) -> list[Group]:
    """The first problems of the first and the last evaluation, by turns."""
    steps = run.evaluations.steps()
    ends = dict.fromkeys((*steps[:1], *steps[-1:]))
    named = [groups_at(run, "evaluations", step) for step in ends]
    return [group for pair in islice(in_turns(named), HELD_OUT_FIRST) for group in pair]


def spread_groups(run: OpenedRun) -> Iterator[Group]:
    """One group of each step, then a second one of each, and so on; evaluations are steps like others."""
    places: list[tuple[Source, int]] = [("rollouts", step) for step in evenly(run.rollouts.steps())]
    places += [("evaluations", step) for step in evenly(run.evaluations.steps())]
    for groups in in_turns([groups_at(run, *place) for place in places]):
        yield from groups


def in_turns(lists: Sequence[Sequence[Group]]) -> Iterator[list[Group]]:
    """The first of each list, then the second of each, as long as some list has one."""
    for at in range(max(map(len, lists), default=0)):
        yield [each[at] for each in lists if at < len(each)]


def groups_at(run: OpenedRun, source: Source, step: int) -> list[Group]:
    """The groups of a step; none if its file cannot be read."""
    try:
        return [(source, step, group["group"]) for group in step_page(run, source, step)["groups"]]
    except Unreadable:
        return []


def evenly(steps: Sequence[int]) -> list[int]:
    """The steps in an order whose first items are always spread over all steps."""
    if len(steps) <= 2:
        return list(steps)
    found, gaps = [steps[0], steps[-1]], [(0, len(steps) - 1)]
    while gaps:
        wider = []
        for low, high in gaps:
            middle = (low + high) // 2
            if low < middle < high:
                found.append(steps[middle])
                wider += [(low, middle), (middle, high)]
        gaps = wider
    return found
