"""Pairs of answers with their scores: of a reward model, of DPO, and of collected preferences."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from posttrain.viewer.answer_types import Number
from posttrain.viewer.folder_files import content_or, mapping, noting, number
from posttrain.viewer.kinds.json_rows import NO_ROWS, JsonRows, json_rows, text
from posttrain.viewer.kinds.kind_answers import CalibrationCurve, CalibrationPoint, PairPage, PairRow
from posttrain.viewer.opened_run import OpenedRun

SCORES = {
    "reward-model": ("scores of the reward model", "log-odds"),
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


def pair_page(run: OpenedRun, *, step: int | None, sort: str, offset: int, limit: int) -> PairPage:
    """Pairs of the run, `limit` of them from `offset` on."""
    kind = run.kind()
    faults: list[str] = []
    summary = content_or(EMPTY, run.summary.content, faults)
    steps = run.rollouts.steps() if kind == "dpo" else []
    step = steps[-1] if steps and step not in steps else step if steps else None
    if step is not None:
        rows = round_pairs(run, step, faults)
    else:
        rows = collected_pairs(run, faults) if kind == "collect" else held_out_pairs(run, faults)
    lacks = [] if rows or faults else [missing(kind)]
    if rows and kind != "collect" and not any(row["chosen"] for row in rows):
        lacks.append("held_out.jsonl of an earlier version: scores without the texts of the pairs")
    if sort in SORTS:
        known = [row for row in rows if row["margin"] is not None]
        known.sort(key=lambda row: row["margin"] or 0.0, reverse=SORTS[sort])
        rows = [*known, *(row for row in rows if row["margin"] is None)]
    margins = [row["margin"] for row in rows if row["margin"] is not None]
    scores, unit = SAMPLED if step is not None else SCORES[kind]
    return PairPage(
        scores=scores,
        unit=unit,
        steps=steps,
        step=step,
        total=len(rows),
        wrong=sum(margin < 0 for margin in margins),
        offset=offset,
        rows=rows[offset : offset + min(limit, 100)],
        margins=[*margins[:: 1 + len(margins) // MOST_MARGINS]],
        calibration=[each for when in ("before", "after") for each in calibration(summary, when)],
        counts={name: number(summary.get(name)) for name in COUNTS if name in summary},
        lacks=lacks,
        faults=faults,
    )


def missing(kind: str) -> str:
    if kind == "collect":
        return "preferences.jsonl: no pair is judged yet"
    return "held_out.jsonl: no held-out pairs are kept (none were held out, the run is not finished, or it is older)"


def rows_of(run: OpenedRun, name: str, faults: list[str]) -> JsonRows:
    file = run.whole_file(name, partial(json_rows, name=name), NO_ROWS)
    found = content_or(NO_ROWS, file.content, faults)
    faults.extend(found.faults)
    return found


def held_out_pairs(run: OpenedRun, faults: list[str]) -> list[PairRow]:
    return [
        pair_row(
            str(row.get("where", "")),
            (text(row, "prompt"), text(row, "chosen_text"), text(row, "rejected_text")),
            (number(row.get("chosen")), number(row.get("rejected"))),
        )
        for row in rows_of(run, "held_out.jsonl", faults).rows
    ]


def collected_pairs(run: OpenedRun, faults: list[str]) -> list[PairRow]:
    """Preferences, then ties."""
    found = []
    for name in ("preferences.jsonl", "ties.jsonl"):
        for row in rows_of(run, name, faults).rows:
            texts = text(row, "prompt"), text(row, "chosen"), text(row, "rejected")
            scores = number(row.get("chosen_reward")), number(row.get("rejected_reward"))
            judge = str(row.get("judge") or "")
            found.append(pair_row(str(row.get("pair", "")), texts, scores, tie=row.get("tie") is True, judge=judge))
    return found


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
            texts = text(a, "prompt"), text(a, "completion"), text(b, "completion")
            found.append(pair_row(where, texts, (number(a.get("reward")), number(b.get("reward")))))
    return found


def better_first(row: Mapping[str, object]) -> tuple[float, int]:
    """As DPO ranks a group: of equal rewards the first sample is the better one."""
    return -(number(row.get("reward")) or 0.0), int(number(row.get("sample")) or 0)


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
    """The calibration before or after training; none in runs without."""
    measured = mapping(summary.get(when))
    bins = measured.get("calibration")
    if not isinstance(bins, list) or not bins:
        return []
    points = [calibration_point(mapping(each)) for each in bins]
    error, by_chance = measured.get("calibration_error"), measured.get("calibration_error_by_chance")
    return [CalibrationCurve(when=when, points=points, error=number(error), by_chance=number(by_chance))]


def calibration_point(each: Mapping[str, object]) -> CalibrationPoint:
    """A bin of summary.json."""
    low, high = ends(each.get("confidence"))
    right_low, right_high = ends(each.get("share_right_interval"))
    return CalibrationPoint(
        low=low,
        high=high,
        num_pairs=number(each.get("num_pairs")),
        confidence=number(each.get("mean_confidence")),
        right=number(each.get("share_right")),
        right_low=right_low,
        right_high=right_high,
    )


def ends(value: object) -> tuple[Number, Number]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return None, None
    return number(value[0]), number(value[1])
