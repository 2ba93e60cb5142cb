"""The parquet file of a step: one row per completion, with everything needed to replay the step."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jaxtyping import Float64
from torch import Tensor

from posttrain.records import Grades, Group, Rollout

NO_COLUMNS: Mapping[str, Tensor] = MappingProxyType({})
EXACT = 2**53
"""The greatest of the integers that a float tells apart."""


def parquet_bytes(
    step: int,
    groups: Sequence[Group],
    grades: Grades,
    advantages: Float64[Tensor, "prompt group"],
    *,
    token_columns: Mapping[str, Float64[Tensor, " token"]] = NO_COLUMNS,
) -> bytes:
    """All rollouts of a step as a parquet file.

    `tokens` has all tokens of a completion and `sampled` which of them the policy sampled.  `logprobs`, `cut_logprobs`
    and token columns, such as `token_advantages`, have a number for each sampled token.  Null
    means: not scored (`reward`, `score/<function>`), took no part in the update (`advantage`, token columns),
    nothing was cut (`cut_logprobs`), not marked (`marks/<function>`).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    assert grades.rewards.shape == advantages.shape == (len(groups), len(groups[0].rollouts))
    types = {
        "tokens": pa.list_(pa.int32()),
        "sampled": pa.list_(pa.bool_()),
        "prompt_tokens": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "cut_logprobs": pa.list_(pa.float32()),
        **dict.fromkeys(token_columns, pa.list_(pa.float64())),
    }
    columns = {**rollout_columns(step, groups), **grade_columns(grades, advantages)}
    columns |= {name: token_lists(groups, column) for name, column in token_columns.items()}
    arrays = {name: pa.array(column, type=types.get(name)) for name, column in columns.items()}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(arrays), sink, compression="zstd")
    return bytes(sink.getvalue())


def rollout_columns(step: int, groups: Sequence[Group]) -> dict[str, list[object]]:
    """What was sampled: prompt by prompt, and within a prompt sample by sample."""
    rows: list[tuple[Group, Rollout]] = [(group, rollout) for group in groups for rollout in group.rollouts]
    columns_json = {group.draw: as_json(group.prompt.columns) for group in groups}
    return {
        "step": [step for _ in rows],
        "draw": [group.draw for group, _ in rows],
        "sample": [rollout.sample for _, rollout in rows],
        "prompt_id": [group.prompt.id for group, _ in rows],
        "prompt": [group.prompt.text for group, _ in rows],
        "completion": [rollout.text for _, rollout in rows],
        "prompt_tokens": [group.prompt.tokens for group, _ in rows],
        "tokens": [rollout.tokens for _, rollout in rows],
        "sampled": [rollout.sequence.sampled for _, rollout in rows],
        "logprobs": [rollout.logprobs for _, rollout in rows],
        "cut_logprobs": [rollout.cut_logprobs for _, rollout in rows],
        "finish": [rollout.finish.value for _, rollout in rows],
        "weights_version": [rollout.weights_version for _, rollout in rows],
        "columns": [columns_json[group.draw] for group, _ in rows],
    }


def grade_columns(grades: Grades, advantages: Float64[Tensor, "prompt group"]) -> dict[str, list[object]]:
    """What became of it: reward, advantage, and each function's score and outcome."""
    columns = {"reward": nullable(grades.rewards), "advantage": nullable(advantages)}
    columns |= {f"score/{name}": nullable(scores) for name, scores in zip(grades.names, grades.scores, strict=True)}
    for name, outcomes in grades.outcomes.items():
        columns[f"outcome/{name}"] = [outcome for group in outcomes for outcome in group]
    for name, extras in grades.extras.items():
        rows = [extra or {} for group in extras for extra in group]
        for column in sorted({column for row in rows for column in row}):
            columns[f"extra/{name}/{column}"] = of_one_type([row.get(column) for row in rows])
    for name, marks in plain_marks(grades).items():
        columns[f"marks/{name}"] = [None if each is None else json.dumps(each) for group in marks for each in group]
    return columns


def token_lists(groups: Sequence[Group], column: Float64[Tensor, " token"]) -> list[object]:
    """The numbers of each completion's sampled tokens; None for completions behind the last that has some."""
    values, start = column.tolist(), 0
    lists: list[object] = []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        lists.append(values[start : start + rollout.num_sampled] or None)
        start += rollout.num_sampled
    return lists


def plain_marks(grades: Grades) -> dict[str, tuple[tuple[dict[str, object] | None, ...], ...]]:
    """What functions marked, as plain JSON."""
    return {
        name: tuple(
            tuple(None if marks is None else {"tokens": marks.tokens, "spans": marks.spans} for marks in group)
            for group in by_group
        )
        for name, by_group in grades.marks.items()
    }


def of_one_type(values: Sequence[object]) -> list[object]:
    """The values where all of them, but None, are truth values, texts or numbers; else each as JSON text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {bool}:
        return list(values)
    if kinds == {str}:
        return [whole(value) if isinstance(value, str) else None for value in values]
    if kinds <= {int, float}:
        numbers = [value for value in values if isinstance(value, int | float)]
        if all(abs(number) <= EXACT for number in numbers if isinstance(number, int)):
            as_float = float in kinds
            return [float(value) if as_float and isinstance(value, int) else value for value in values]
    return [None if value is None else json.dumps(value) for value in values]


def whole(text: str) -> str:
    """A text without halves of characters, which no file takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def nullable(values: Float64[Tensor, "prompt group"]) -> list[object]:
    """The values row by row, None for NaN."""
    return [None if math.isnan(value) else value for value in values.flatten().tolist()]


def as_json(columns: Mapping[str, object]) -> str:
    """A problem's columns as text: records become objects, and what JSON does not know becomes its Python text."""

    def plain(item: object) -> object:
        return dataclasses.asdict(item) if dataclasses.is_dataclass(item) and not isinstance(item, type) else str(item)

    return json.dumps(dict(columns), default=plain)
