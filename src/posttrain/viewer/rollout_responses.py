"""Responses about steps, groups and rollouts; see response_types.py."""

from typing import Literal, NotRequired, TypedDict

from posttrain.viewer.response_types import Link, Number, Source


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
    """The steps with a file."""

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
    replaced: bool
    """Whether its group was set aside: it was scored and got no advantage."""
    finish: str
    length: int | None
    """Sampled tokens."""
    outcomes: dict[str, str]
    scores: dict[str, Number]
    judged: Number
    evaluation: str
    greedy: bool


class RowPage(TypedDict):
    """Some of the matching rows.  A filter or an order over many files is computed in parts: ask again until done."""

    total: int
    """Rows before filtering, of the files counted."""
    matches: int
    """Matching rows found so far."""
    offset: int
    done: bool
    """Whether all files were searched."""
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
    """Standard deviation of the rewards, divided by their number."""
    uninformative: bool
    replaced: bool
    outcomes: list[str]
    """Outcomes of the function with the most outcomes, by rollout."""
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
    """A token as text."""

    text: str
    id: int
    special: bool
    sampled: bool
    partial: bool
    """Whether the token ends inside a character: its text is its bytes, such as `\\xe2\\x82`."""


class GroupRollout(TypedDict):
    """A rollout next to its siblings."""

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
    """The beginning of the completion, in case there is no tokenizer."""
    parts_at: int
    """The first token where it differs from the majority of rollouts that are identical so far; its length if never."""


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
    """A number per token of a completion; null for tokens without one."""

    name: str
    label: str
    unit: str
    values: list[Number]
    update: NotRequired[int]
    """The optimiser update that computed it."""
    diverging: bool
    """Whether its sign matters, so that the colours are centred."""
    centre: float
    """The neutral value of a diverging quantity: 0, or 1 for ratios."""


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
    """Where each piece begins in the completion, in characters, and its end; empty if pieces do not add up to the
    text."""
    graded: str
    """Prefill and completion, as reward functions read them."""
    quantities: list[Quantity]
    alternatives: list[list[Alternative]] | None
    spans: list[TextSpan]
    notes: list[str]
    """What reward functions said about the completion, without a position in it."""
    turns: list[TurnEntry]
    extras: dict[str, object]
    columns: str
    weights_version: Number
    failure: str
    neighbours: Neighbours
    siblings: list[Link]
    faults: list[str]
