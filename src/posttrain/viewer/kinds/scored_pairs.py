"""Pairs of answers with their scores: from a reward model, DPO, or collected preferences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np

from posttrain.viewer.folder_files import content_or, json_number, mapping, noting
from posttrain.viewer.kinds.kind_responses import CalibrationCurve, CalibrationPoint, PairPage, PairRow
from posttrain.viewer.kinds.pair_lines import PairLines, row_text
from posttrain.viewer.metric_lines import Values
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.response_types import Number

SCORES = {
    "reward-model": ("output of the reward model", "log-odds"),
    "dpo": ("implicit rewards, β log π/π_ref", "nats"),
    "collect": ("rewards of the judge", ""),
}
SAMPLED = ("rewards of the round's completions", "")
ROUND = ("draw", "sample", "prompt", "completion", "reward", "advantage")
SORTS = {"margin": False, "-margin": True}
"""Orders by margin, and whether the largest comes first; any other order is the file's."""
COUNTS = ("num_prompts", "num_judged", "num_ties", "num_open", "longer_chosen_share")
MOST_MARGINS = 5000
EMPTY: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ListedPairs:
    """Pairs in the order of their files: all margins, NaN where one is missing, and rows as they are asked for."""

    margins: Values
    rows: Callable[[Sequence[int]], list[PairRow]]
    has_texts: bool = True


def pair_page(run: OpenedRun, *, step: int | None, sort: str, offset: int, limit: int) -> PairPage:
    """Pairs of the run, `limit` of them from `offset` on."""
    kind = run.kind()
    faults: list[str] = []
    summary = content_or(EMPTY, run.summary.content, faults)
    steps = run.rollouts.steps() if kind == "dpo" else []
    step = steps[-1] if steps and step not in steps else step if steps else None
    if step is not None:
        pairs = of_round(round_pairs(run, step, faults))
    else:
        pairs = collected_pairs(run, faults) if kind == "collect" else listed_held_out_pairs(run, faults)
    total = len(pairs.margins)
    lacks = [] if total or faults else [missing(kind)]
    if total and not pairs.has_texts:
        lacks.append("held_out.jsonl of an earlier version: scores without the texts of the pairs")
    order = np.arange(total)
    if sort in SORTS:  # those without a margin come last
        order = np.argsort(-pairs.margins if SORTS[sort] else pairs.margins, kind="stable")
    known = pairs.margins[~np.isnan(pairs.margins)]
    rows: list[PairRow] = []
    with noting(faults):
        rows = pairs.rows(order[offset : offset + min(limit, 100)].tolist())
    scores, unit = SAMPLED if step is not None else SCORES[kind]
    return PairPage(
        scores=scores,
        unit=unit,
        steps=steps,
        step=step,
        total=total,
        wrong=int((known < 0).sum()),
        offset=offset,
        rows=rows,
        margins=known[:: 1 + len(known) // MOST_MARGINS].tolist(),
        calibration=[each for when in ("before", "after") for each in calibration(summary, when)],
        counts={name: json_number(summary.get(name)) for name in COUNTS if name in summary},
        lacks=lacks,
        faults=faults,
    )


def missing(kind: str) -> str:
    if kind == "collect":
        return "preferences.jsonl: no pair is judged yet"
    return "held_out.jsonl: there are no held-out pairs (none were held out, the run is unfinished, or it is older)"


def listed_held_out_pairs(run: OpenedRun, faults: list[str]) -> ListedPairs:
    """Held-out pairs, in the order of their file."""
    lines = read_pairs(run, "held_out.jsonl", ("chosen", "rejected"), "chosen_text", faults)

    def rows(places: Sequence[int]) -> list[PairRow]:
        return [
            pair_row(
                str(row.get("where", "")),
                (row_text(row, "prompt"), row_text(row, "chosen_text"), row_text(row, "rejected_text")),
                (json_number(row.get("chosen")), json_number(row.get("rejected"))),
            )
            for row in lines.rows(places)
        ]

    return ListedPairs(np.array(lines.margins), rows, lines.has_texts)


def collected_pairs(run: OpenedRun, faults: list[str]) -> ListedPairs:
    """Preferences, then ties."""
    scores = ("chosen_reward", "rejected_reward")
    files = [read_pairs(run, name, scores, "chosen", faults) for name in ("preferences.jsonl", "ties.jsonl")]
    first = len(files[0].margins)

    def rows(places: Sequence[int]) -> list[PairRow]:
        return [collected_pair(*(files[at >= first].rows([at - first * (at >= first)]))) for at in places]

    return ListedPairs(np.concatenate([np.array(file.margins) for file in files]), rows)


def collected_pair(row: Mapping[str, object]) -> PairRow:
    """A preference or a tie."""
    texts = row_text(row, "prompt"), row_text(row, "chosen"), row_text(row, "rejected")
    scores = json_number(row.get("chosen_reward")), json_number(row.get("rejected_reward"))
    judge = str(row.get("judge") or "")
    return pair_row(str(row.get("pair", "")), texts, scores, tie=row.get("tie") is True, judge=judge)


def read_pairs(run: OpenedRun, name: str, scores: tuple[str, str], text: str, faults: list[str]) -> PairLines:
    """The pairs of a file so far."""
    lines = run.line_file(name, partial(PairLines, scores=scores, text=text))
    lines.read_on()
    faults.extend(lines.faults)
    if lines.unfinished:
        faults.append(f"{name}: the last line has no end; left out")
    return lines


def of_round(rows: Sequence[PairRow]) -> ListedPairs:
    """The pairs of a round, which are in memory."""
    margins = np.array([np.nan if row["margin"] is None else row["margin"] for row in rows], dtype=float)
    return ListedPairs(margins, lambda places: [rows[at] for at in places])


def round_pairs(run: OpenedRun, step: int, faults: list[str]) -> list[PairRow]:
    """The pairs of a round of DPO.

    An advantage of 1 marks a chosen completion, -1 a rejected one: the best with the worst, the next best with the
    next worst.
    """
    rows: list[dict[str, object]] = []
    with noting(faults):
        rows = run.rollouts.kept(step, ROUND).to_pylist()
    sides: dict[tuple[object, int], list[dict[str, object]]] = {}
    for row in rows:
        if row.get("advantage") in (1, -1):
            sides.setdefault((row.get("draw"), int(str(row["advantage"])[0] != "-")), []).append(row)
    found = []
    for (draw, is_chosen), chosen in sides.items():
        if not is_chosen:
            continue
        best = sorted(chosen, key=better_first)
        worst = sorted(sides.get((draw, 0), []), key=better_first, reverse=True)
        for a, b in zip(best, worst, strict=False):
            where = f"draw {draw}, samples {a.get('sample')} and {b.get('sample')}"
            texts = row_text(a, "prompt"), row_text(a, "completion"), row_text(b, "completion")
            found.append(pair_row(where, texts, (json_number(a.get("reward")), json_number(b.get("reward")))))
    return found


def better_first(row: Mapping[str, object]) -> tuple[float, int]:
    """DPO's ranking of a group: with equal rewards, the first sample is the better one."""
    return -(json_number(row.get("reward")) or 0.0), int(json_number(row.get("sample")) or 0)


def pair_row(
    where: str, texts: tuple[str, str, str], scores: tuple[Number, Number], *, tie: bool = False, judge: str = ""
) -> PairRow:
    """A pair of its texts (prompt, chosen, rejected) and its scores (chosen, rejected)."""
    prompt, chosen, rejected = texts
    of_chosen, of_rejected = scores
    return PairRow(
        where=where,
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        chosen_score=of_chosen,
        rejected_score=of_rejected,
        margin=None if of_chosen is None or of_rejected is None else of_chosen - of_rejected,
        tie=tie,
        judge=judge,
    )


def calibration(summary: Mapping[str, object], when: str) -> list[CalibrationCurve]:
    """The calibration before or after training; None if the run does not have it."""
    measured = mapping(summary.get(when))
    bins = measured.get("calibration")
    if not isinstance(bins, list) or not bins:
        return []
    points = [calibration_point(mapping(each)) for each in bins]
    error, by_chance = measured.get("calibration_error"), measured.get("calibration_error_by_chance")
    return [CalibrationCurve(when=when, points=points, error=json_number(error), by_chance=json_number(by_chance))]


def calibration_point(each: Mapping[str, object]) -> CalibrationPoint:
    """A bin of summary.json."""
    low, high = ends(each.get("confidence"))
    right_low, right_high = ends(each.get("share_right_interval"))
    return CalibrationPoint(
        low=low,
        high=high,
        num_pairs=json_number(each.get("num_pairs")),
        confidence=json_number(each.get("mean_confidence")),
        right=json_number(each.get("share_right")),
        right_low=right_low,
        right_high=right_high,
    )


def ends(value: object) -> tuple[Number, Number]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return None, None
    return json_number(value[0]), json_number(value[1])
