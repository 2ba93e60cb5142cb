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

R is a run's number in the list.  S is `rollouts` or `evaluations`, N a step.  D is a group and J a rollout in it, as
the fields `group` and `rollout` of a row name them: numbers for rollouts, and texts such as `after-12` and `greedy-0`
for evaluations, of which one step can have several.  `at` of a row is "S/N/D/J".  Whatever cannot be read is one line
in `faults`.
"""

from typing import Literal, NotRequired, TypedDict

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
    """Steps of the recipe; None where it has none."""
    reward: Number
    """Of the last step."""
    accuracy: Number
    """The main held-out result, last measured."""
    measure: str
    """What `accuracy` is: accuracy_sampled, score, reward, loss, or empty."""
    changed: float
    """When its newest journal changed, in seconds since 1970."""
    faults: list[str]


class RunList(TypedDict):
    """All runs that are open."""

    runs: list[RunEntry]
    compares: bool
    """Whether several folders were named, to be compared."""
    below: str
    """The folder below which runs were found; empty where they were named."""


class RunVersion(TypedDict):
    """Changes when any file of the run has grown."""

    version: str
    state: State
    last_step: int


class Line(TypedDict):
    """One line of a panel; lists are by step."""

    name: str
    steps: list[int]
    values: list[Number]
    low: list[Number]
    """Lower ends of 95% intervals; empty without them, as `high`."""
    high: list[Number]
    axis: Literal["left", "right"]


class Curves(TypedDict):
    """A panel of curves."""

    panel: str
    unit: str
    scale: Literal["linear", "share", "log"]
    """`share`: from 0 to 1."""
    lines: list[Line]


class Stack(TypedDict):
    """Shares or seconds that are stacked: `values` has a list by step for each name."""

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
    """What the numbers are means of, such as `512 problems × 8`."""


class KindPage(TypedDict):
    """A further page of a run: its address below /api/run/R and its title."""

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
    """What the folder of an older, unfinished or other run does not have."""
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
    compared_with: list[int]
    kind_pages: list[KindPage]


class StepRow(TypedDict):
    """A step in the list of steps."""

    step: int
    rows: int | None
    """None for a file that cannot be read."""
    groups: Number
    uninformative: Number
    """Share of groups without a signal."""
    replaced: Number
    reward: Number
    accuracy: Number
    mean_length: Number


class StepList(TypedDict):
    """The steps that have a file."""

    source: Source
    steps: list[StepRow]
    faults: list[str]


class ShownRollout(TypedDict):
    """A rollout in a table."""

    at: str
    source: Source
    step: int
    draw: int
    sample: int
    group: str
    rollout: str
    prompt_id: str
    prompt: str
    """At most 200 characters, its last ones."""
    completion: str
    """At most 400 characters."""
    cut: bool
    """Whether the completion is longer."""
    reward: Number
    advantage: Number
    finish: str
    length: int | None
    """Sampled tokens."""
    outcomes: dict[str, str]
    scores: dict[str, Number]
    judged: Number
    evaluation: str
    greedy: bool


class RowPage(TypedDict):
    """Some rows of all that match.  A filter or an order over many files is computed in parts: ask again until done."""

    total: int
    """Rows before filtering, of the files counted."""
    matches: int
    """Rows that match, as far as was looked."""
    offset: int
    done: bool
    """Whether all files were looked at."""
    looked_at: int
    of_files: int
    rows: list[ShownRollout]
    outcomes: list[str]
    """Choices for `outcome`, seen so far: FUNCTION:OUTCOME."""
    terms: list[str]
    """Choices for `term`: reward functions, reward and advantage."""
    faults: list[str]


class GroupRow(TypedDict):
    """A group in the table of a step."""

    group: str
    draw: int
    prompt_id: str
    prompt: str
    rewards: list[Number]
    rollouts: list[str]
    """Names of the rollouts, in the order of `rewards`."""
    mean: Number
    spread: Number
    """Deviation of the rewards, divided by their number."""
    uninformative: bool
    replaced: bool
    outcomes: list[str]
    """Of the function with the most outcomes, by rollout."""
    scores: dict[str, list[Number]]
    mean_length: Number


class StepPage(TypedDict):
    """A step, group by group."""

    source: Source
    step: int
    previous: int | None
    next: int | None
    metrics: dict[str, Number]
    groups: list[GroupRow]
    outcomes: list[str]
    terms: list[str]
    faults: list[str]


class Piece(TypedDict):
    """A token as text.  The texts of a completion's pieces, joined, are the completion as its tokens say it."""

    text: str
    id: int
    special: bool
    sampled: bool
    partial: bool
    """Whether the token ends inside a character: its text is its bytes, such as `\\xe2\\x82`."""


class GroupRollout(TypedDict):
    """A rollout beside its siblings."""

    at: str
    sample: int
    rollout: str
    reward: Number
    advantage: Number
    finish: str
    outcome: str
    scores: dict[str, Number]
    greedy: bool
    pieces: list[Piece]
    text: str
    """The completion, where there is no tokenizer."""
    parts_at: int
    """The first token at which it leaves what most of those that agree with it so far say; its length if never."""


class Neighbours(TypedDict):
    """`at` of the entries before and after."""

    previous: str | None
    next: str | None


class GroupPage(TypedDict):
    """All rollouts of a prompt in a step."""

    source: Source
    step: int
    group: str
    prompt_id: str
    prompt: list[Piece]
    prompt_text: str
    columns: str
    rollouts: list[GroupRollout]
    neighbours: Neighbours
    faults: list[str]


class Quantity(TypedDict):
    """A number of each token of a completion; null where it has none."""

    name: str
    label: str
    unit: str
    values: list[Number]
    update: NotRequired[int]
    """The optimiser update that computed it."""
    diverging: bool
    """Whether its sign matters: drawn around 0."""
    centre: float
    """What is neutral in a diverging one: 0, or 1 for ratios."""


class Alternative(TypedDict):
    """One of the likeliest tokens at a position."""

    text: str
    id: int
    logprob: Number


class TextSpan(TypedDict):
    """What a reward function read or marked, in characters of `graded`."""

    function: str
    kind: Literal["answer", "mark", "test", "judge"]
    start: int
    end: int
    says: str
    value: Number


class TurnEntry(TypedDict):
    """A turn that got a reply."""

    end: int
    """Tokens of the completion up to the turn's end."""
    given: int
    """Tokens of the reply behind it."""
    reward: Number
    calls: list[dict[str, object]]


class RolloutPage(TypedDict):
    """One rollout, token by token."""

    row: ShownRollout
    prompt: list[Piece]
    prompt_text: str
    prefill: str
    """The end of the prompt that is graded with the completion."""
    completion: list[Piece]
    completion_text: str
    offsets: list[int]
    """Where each piece begins in the completion, in characters, and its end; empty where pieces do not spell it."""
    graded: str
    """Prefill and completion, as reward functions read them."""
    quantities: list[Quantity]
    alternatives: list[list[Alternative]] | None
    spans: list[TextSpan]
    notes: list[str]
    """What reward functions said of the completion without a place in it."""
    turns: list[TurnEntry]
    extras: dict[str, object]
    columns: str
    weights_version: Number
    failure: str
    neighbours: Neighbours
    siblings: list[Link]
    faults: list[str]


class Asked(TypedDict):
    """A problem at a step."""

    step: int
    source: Source
    evaluation: str
    reward: Number
    solved: Number
    """Share of its completions that are right."""
    group: str


class ProblemEntry(TypedDict):
    """A problem and when it was asked."""

    prompt_id: str
    prompt: str
    asked: list[Asked]


class ProblemList(TypedDict):
    """All problems, those asked most often first."""

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
    """A held-out problem before, along the way and after: shares of right completions."""

    prompt_id: str
    prompt: str
    before: Number
    along: list[Number]
    """By evaluation between them; null where it was not asked."""
    after: Number
    change: Literal["solved", "lost", "always", "never", ""]
    """`solved`: most completions are right after and not before.  Empty where one of the two is missing."""
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
    """A held-out problem in two runs: shares of right completions after training."""

    prompt_id: str
    prompt: str
    a: float
    b: float
    at_a: str
    at_b: str


class ComparedRuns(TypedDict):
    """Two runs, problem by problem, and whether their difference can be chance."""

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
    """Behaviours over training, as far as was read: ask again until done."""

    behaviours: list[BehaviourEntry]
    done: bool
    read: int
    of_files: int
    faults: list[str]
