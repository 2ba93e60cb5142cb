"""Responses for the pages of each kind of run; see response_types.py.

/api/run/R/pairs?step=N&sort=S&offset=O&limit=L    PairPage         reward-model, dpo, collect
/api/run/R/demonstrations?step=N                   DemonstrationPage    sft
/api/run/R/grid                                    GridPage         irl
/api/run/R/comparison                              ComparisonPage   compare
/api/run/R/phases                                  PhasesPage       phases
/api/run/R/picture/NAME                            PicturePage      all
"""

from typing import TypedDict

from posttrain.viewer.response_types import Curves, Measure, Number
from posttrain.viewer.rollout_responses import Piece


class CalibrationPoint(TypedDict):
    """Pairs of similar confidence: how often the answer with the higher score was preferred."""

    low: Number
    high: Number
    num_pairs: Number
    confidence: Number
    right: Number
    right_low: Number
    right_high: Number


class CalibrationCurve(TypedDict):
    """A reward model's calibration on held-out pairs."""

    when: str
    """before or after."""
    points: list[CalibrationPoint]
    error: Number
    by_chance: Number
    """Mean error of a calibrated model on as many pairs."""


class PairRow(TypedDict):
    """Two answers to a prompt, with their scores."""

    where: str
    prompt: str
    chosen: str
    rejected: str
    chosen_score: Number
    rejected_score: Number
    margin: Number
    """Score of the chosen answer minus the rejected one's."""
    tie: bool
    judge: str


class PairPage(TypedDict):
    """Some of a run's pairs."""

    scores: str
    """What the scores mean."""
    unit: str
    steps: list[int]
    """Steps with their own pairs (rounds of DPO); else empty."""
    step: int | None
    total: int
    wrong: int
    """Pairs whose rejected answer has the higher score."""
    offset: int
    rows: list[PairRow]
    margins: list[Number]
    """Margins of all pairs, for their distribution."""
    calibration: list[CalibrationCurve]
    counts: dict[str, Number]
    lacks: list[str]
    faults: list[str]


class DemonstrationRow(TypedDict):
    """A demonstration, token by token."""

    example: int
    pieces: list[Piece]
    """`sampled` marks the tokens that are learned."""
    losses: list[Number]
    """-log π of each token, in nats; null for tokens that are only read."""
    before: list[Number]
    """The same before training; empty if it was not measured."""
    mean: Number
    mean_before: Number


class DemonstrationPage(TypedDict):
    """Held-out demonstrations at a measurement."""

    steps: list[int]
    step: int | None
    rows: list[DemonstrationRow]
    largest: Number
    """The largest loss of a token: the end of the colour scale."""
    lacks: list[str]
    faults: list[str]


class GridMap(TypedDict):
    """A number per cell of a grid, or per state; null for cells without a state."""

    name: str
    values: list[Number]
    low: Number
    high: Number


class GridArrows(TypedDict):
    """The mean step of a policy in each cell; null where it does not act."""

    name: str
    steps: list[list[Number] | None]


class GridPage(TypedDict):
    """A world with the rewards, policies and visits that a run of inverse RL found."""

    width: int
    height: int
    """1 if the world is not a grid: states are then in one row."""
    upwards: bool
    """Whether y grows upwards."""
    is_grid: bool
    terminal: list[int]
    """Cells that end an episode."""
    maps: list[GridMap]
    arrows: list[GridArrows]
    facts: dict[str, Number]
    curves: list[Curves]
    pictures: list[str]
    lacks: list[str]
    faults: list[str]


class ComparedCell(TypedDict):
    """A run of a comparison."""

    seed: int
    run: int | None
    """Its number in the list of open runs."""
    before: Number
    after: Number
    steps: Number
    seconds: Number
    tokens: Number
    kl: Number


class ComparedVariant(TypedDict):
    """A row of the table."""

    variant: str
    before: list[Number]
    """Mean, low and high, as the next two."""
    after: list[Number]
    gain: list[Number]
    """Difference to the first variant with the same seed."""
    numbers: dict[str, Number]
    runs: list[ComparedCell]


class ComparisonPage(TypedDict):
    """A comparison of recipes."""

    budget: str
    measure: str
    variants: list[ComparedVariant]
    curves: list[Curves]
    """Curves against sampled tokens, one line per run."""
    pictures: list[str]
    faults: list[str]


class PhaseEntry(TypedDict):
    """A phase with its run."""

    number: int
    name: str
    command: str
    run: int | None
    state: str
    steps: Number
    seconds: Number
    measures: list[Measure]


class PhasesPage(TypedDict):
    """The phases of a recipe."""

    phases: list[PhaseEntry]
    faults: list[str]


class PicturePage(TypedDict):
    """A picture of the run's folder."""

    name: str
    png: str
    """The picture in base64; empty if there is none."""
    faults: list[str]
