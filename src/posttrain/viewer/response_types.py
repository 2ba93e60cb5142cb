"""What each address of the viewer answers: plain data that JSON can hold, with null in place of NaN and infinity.

    /api/runs                            RunList
    /api/compare?a=R&b=R                 ComparedRuns
    /api/run/R/state                     RunVersion
    /api/run/R/overview                  Overview
    /api/run/R/steps?source=S            StepList
    /api/run/R/rows?source=S&step=N&...  RowPage
    /api/run/R/step/N                    StepPage
    /api/run/R/group/S/N/D               GroupPage
    /api/run/R/rollout/S/N/D/J           RolloutPage
    /api/run/R/problems                  ProblemList
    /api/run/R/problem?id=ID             ProblemPage
    /api/run/R/held-out                  HeldOutPage
    /api/run/R/behaviours                BehaviourPage

R is a run's number in the list.  S is `rollouts` or `evaluations`, N a step.  D is a group and J a rollout in it, as in
the fields `group` and `rollout` of a row: numbers for rollouts, and texts such as `after-12` and `greedy-0` for
evaluations, since one step can have several.  `at` of a row is "S/N/D/J".  Each unreadable file is one line in
`faults`.  Types for rollouts are in rollout_responses.py, for problems in problem_responses.py.
"""

from typing import Literal, TypedDict

Source = Literal["rollouts", "evaluations"]
State = Literal["running", "finished", "stopped", "not begun"]
Number = float | int | None


class RunEntry(TypedDict):
    """A run in the list."""

    run: int
    name: str
    folder: str
    kind: str
    """rl, sft, dpo, reward-model, collect, irl, compare or phases."""
    state: State
    last_step: int
    num_steps: int | None
    """Number of steps in the recipe; None if it does not have one."""
    reward: Number
    """Mean reward of the last step."""
    accuracy: Number
    """The latest main held-out result."""
    measure: str
    """What `accuracy` is: accuracy_sampled, score, reward, loss, or empty."""
    changed: float
    """When its newest journal changed, in seconds since 1970."""
    faults: list[str]


class RunList(TypedDict):
    """All open runs."""

    runs: list[RunEntry]
    live: bool
    """Whether the page follows active runs."""
    below: str
    """The folder below which runs were found; empty where they were named."""
    faults: list[str]
    """What was not searched."""


class RunVersion(TypedDict):
    """Changes when a file of the run has grown."""

    version: str
    state: State
    last_step: int


class Line(TypedDict):
    """One line of a panel; lists are by step."""

    name: str
    steps: list[int]
    values: list[Number]
    low: list[Number]
    """Lower ends of 95% intervals; empty without intervals, like `high`."""
    high: list[Number]
    axis: Literal["left", "right"]


class Curves(TypedDict):
    """A panel of curves."""

    panel: str
    unit: str
    scale: Literal["linear", "share"]
    """`share`: from 0 to 1."""
    lines: list[Line]


class Stack(TypedDict):
    """Stacked shares or seconds: `values` has a list by step for each name."""

    steps: list[int]
    names: list[str]
    values: list[list[Number]]


class Outcomes(Stack):
    """The outcomes of one reward function."""

    function: str


class Link(TypedDict):
    """A rollout that something is about."""

    at: str
    label: str


class AlarmEntry(TypedDict):
    """An alarm, and the completions that it is about."""

    step: int
    name: str
    says: str
    notice: bool
    transcript: str
    links: list[Link]


class Measure(TypedDict):
    """A held-out result before and after training."""

    measure: str
    name: str
    """The name in summary.json."""
    before: Number
    before_low: Number
    before_high: Number
    after: Number
    after_low: Number
    after_high: Number
    unit: str
    resting_on: str
    """What the numbers are averaged over, such as `512 problems × 8`."""


class KindPage(TypedDict):
    """Another page of a run: its address below /api/run/R and its title."""

    path: str
    title: str


class Overview(TypedDict):
    """A run at a glance."""

    run: int
    name: str
    folder: str
    kind: str
    state: State
    last_step: int
    num_steps: int | None
    faults: list[str]
    lacks: list[str]
    """What is missing in the folder of an older, unfinished or other run."""
    recipe: str
    algorithm: str
    task: str
    model: str
    versions: dict[str, str]
    machine: dict[str, str]
    seconds: dict[str, Number]
    tokens: dict[str, Number]
    curves: list[Curves]
    outcomes: Outcomes
    seconds_by_stage: Stack
    alarms: list[AlarmEntry]
    before_after: list[Measure]
    part_of: int | None
    """The comparison or the phases that the run is in."""
    compared_with: list[int]
    """The other runs that were named, or those of the same comparison."""
    kind_pages: list[KindPage]
