"""The loss of each token of held-out demonstrations, at each measurement of a supervised run."""

from collections.abc import Mapping, Sequence

from posttrain.viewer.folder_files import json_number, noting
from posttrain.viewer.kinds.kind_responses import DemonstrationPage, DemonstrationRow
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.response_types import Number
from posttrain.viewer.rollout_responses import Piece

COLUMNS = ("example", "tokens", "learned", "logprobs")
MOST_EXAMPLE_TOKENS = 4000
"""Maximum tokens of a demonstration to show."""
LACKS = "demonstrations/: no rows were held out, or an earlier version wrote this run without token losses"


def demonstration_page(run: OpenedRun, step: int | None) -> DemonstrationPage:
    """The demonstrations of a step; of the last step if there are none."""
    faults: list[str] = []
    steps = run.demonstrations.steps()
    step = step if step in steps else steps[-1] if steps else None
    before = kept_rows(run, steps[0], faults) if steps else []
    shown = before if steps and step == steps[0] else kept_rows(run, step, faults) if step is not None else []
    first = {} if step is None or step == steps[0] else {row.get("example"): row for row in before}
    rows = [demonstration_row(run, row, first.get(row.get("example"), {}), faults) for row in shown]
    losses = [loss for row in rows for loss in (*row["losses"], *row["before"]) if loss is not None]
    return DemonstrationPage(
        steps=steps,
        step=step,
        rows=rows,
        largest=max(losses, default=None),
        lacks=[] if steps else [LACKS],
        faults=faults,
    )


def kept_rows(run: OpenedRun, step: int, faults: list[str]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    with noting(faults):
        rows = run.demonstrations.kept(step, COLUMNS).to_pylist()
    return rows


def demonstration_row(
    run: OpenedRun, row: Mapping[str, object], first: Mapping[str, object], faults: list[str]
) -> DemonstrationRow:
    """A demonstration at a step, with its losses at the first step; without a tokenizer, tokens are numbers."""
    tokens = [each for each in list_or_empty(row.get("tokens")) if isinstance(each, int)][:MOST_EXAMPLE_TOKENS]
    learned = [bool(each) for each in list_or_empty(row.get("learned"))][:MOST_EXAMPLE_TOKENS]
    pieces = [Piece(text=f" {token}", id=token, special=False, sampled=True, partial=False) for token in tokens]
    with noting(faults):
        pieces = run.pieces.pieces(tokens, learned)
    losses = token_losses(learned, list_or_empty(row.get("logprobs")))
    before = token_losses(learned, list_or_empty(first.get("logprobs"))) if first else []
    return DemonstrationRow(
        example=int(str(row.get("example") or 0)),
        pieces=pieces,
        losses=losses,
        before=before,
        mean=mean(losses),
        mean_before=mean(before),
    )


def token_losses(learned: Sequence[bool], logprobs: Sequence[object]) -> list[Number]:
    """-log π of each token; null for tokens that are not learned."""
    values = iter(logprobs)
    found: list[Number] = []
    for is_learned in learned:
        value = json_number(next(values, None)) if is_learned else None
        found.append(None if value is None else -value)
    return found


def mean(values: Sequence[Number]) -> Number:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def list_or_empty(value: object) -> list[object]:
    return value if isinstance(value, list) else []
