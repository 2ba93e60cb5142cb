"""Rows for tests of data sets, in files and as a task."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.records import Prompt
from posttrain.tasks.base import Messages
from posttrain.tasks.dataset import DatasetTask

RENDERER = TokenizerRenderer(new_tokenizer())
SUMS = [{"prompt": f"{i} + {i} = ", "answer": 2 * i} for i in range(40)]


def task_of_rows(
    rows: Sequence[Mapping[str, object]] | None = None, *, seed: int = 0, prompts_per_step: int = 8, **given: Any
) -> DatasetTask:
    """The task of these rows, or of a file that is among the options; no row is held out unless they say so."""
    apart = given.pop("held_out_rows", None)
    options = DatasetOptions(**{"held_out_share": 0.0, **given})
    return DatasetTask(options, RENDERER, seed=seed, prompts_per_step=prompts_per_step, rows=rows, held_out_rows=apart)


def json_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class CharacterRenderer:
    """One token per character, and messages one after another."""

    def render(self, content: str | Messages, *, id: str, prefill: str, columns: Mapping[str, object]) -> Prompt:
        messages = None if isinstance(content, str) else tuple(content)
        text = content if isinstance(content, str) else "\n".join(turn["content"] for turn in content)
        text += prefill
        tokens = tuple(map(ord, text))
        return Prompt(id=id, text=text, tokens=tokens, prefill=prefill, messages=messages, columns=columns)
