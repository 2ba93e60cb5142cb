"""Responses about problems over training, held-out problems, two runs, and behaviours; see response_types.py."""

from typing import Literal, TypedDict

from posttrain.viewer.response_types import Curves, Link, Number, RunEntry, Source
from posttrain.viewer.rollout_responses import ShownRollout


class Asked(TypedDict):
    """A problem at a step."""

    step: int
    source: Source
    evaluation: str
    reward: Number
    solved: Number
    """Share of its completions that are correct."""
    group: str


class ProblemEntry(TypedDict):
    """A problem, and when it was asked."""

    prompt_id: str
    prompt: str
    asked: list[Asked]


class ProblemList(TypedDict):
    """All problems, most frequently asked first."""

    problems: list[ProblemEntry]
    total: int
    faults: list[str]


class ProblemStep(TypedDict):
    """A problem's completions at a step."""

    step: int
    source: Source
    evaluation: str
    rows: list[ShownRollout]


class ProblemPage(TypedDict):
    """A problem over training."""

    prompt_id: str
    prompt: str
    columns: str
    steps: list[ProblemStep]
    faults: list[str]


class HeldOutEvaluation(TypedDict):
    """An evaluation on held-out problems."""

    step: int
    name: str
    accuracy: Number
    low: Number
    high: Number
    problems: int


class HeldOutProblem(TypedDict):
    """A held-out problem before, during and after training: shares of correct completions."""

    prompt_id: str
    prompt: str
    before: Number
    along: list[Number]
    """Shares by evaluation during training; null if it was not asked."""
    after: Number
    change: Literal["solved", "lost", "always", "unsolved", "never", ""]
    """`solved`: most completions are right after and not before.  `unsolved`: neither before nor after, though some
    completion was right.  `never`: no completion was right in any evaluation.  Empty where before or after is missing.
    """
    links: dict[str, str]
    """Group of the evaluations: "before", "after" and steps -> "S/N/D"."""


class HeldOutPage(TypedDict):
    """Held-out problems, one by one."""

    evaluations: list[HeldOutEvaluation]
    problems: list[HeldOutProblem]
    counts: dict[str, int]
    p_value: Number
    says: str
    faults: list[str]


class ComparedProblem(TypedDict):
    """A held-out problem in two runs: shares of correct completions after training."""

    prompt_id: str
    prompt: str
    a: float
    b: float
    at_a: str
    at_b: str


class ComparedRuns(TypedDict):
    """Two runs, problem by problem, and whether chance can explain their difference."""

    a: RunEntry
    b: RunEntry
    problems: list[ComparedProblem]
    only_a: int
    only_b: int
    both: int
    neither: int
    p_value: Number
    says: str
    curves: list[Curves]
    """Lines are named `MEASURE, RUN`."""
    faults: list[str]


class BehaviourPoint(TypedDict):
    """How often a step's completions show a behaviour."""

    step: int
    share: float
    low: float
    high: float
    examples: list[Link]


class BehaviourEntry(TypedDict):
    """A behaviour over training."""

    name: str
    says: str
    kind: str
    points: list[BehaviourPoint]


class BehaviourPage(TypedDict):
    """Behaviours over training, from the files read so far: ask again until done."""

    behaviours: list[BehaviourEntry]
    done: bool
    read: int
    of_files: int
    faults: list[str]
