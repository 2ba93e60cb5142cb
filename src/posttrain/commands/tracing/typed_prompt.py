"""Putting a question that a person typed to a model."""

import re
from collections.abc import Mapping
from dataclasses import replace

from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.records import Prompt
from posttrain.tasks.prompt_content import prompt_content

COUNTDOWN = re.compile(r"Use (all|some) of ([0-9]+(?:, [0-9]+)*) to make ([0-9]+)\.")
"""A Countdown problem as the bundled model knows it; an answer to it can be graded."""
AS_TYPED = DatasetOptions()
ASKED = "asked"
"""The id of a typed prompt; problems of a task have others."""


def typed_prompt(text: str, renderer: TokenizerRenderer, how: DatasetOptions = AS_TYPED) -> Prompt:
    """A typed question as a prompt, made as from a dataset's row, except that `auto` means the chat template, if any.

    A Countdown problem on one line is rendered as the bundled model was trained, unless `how` says otherwise, and has
    the columns that graders read.
    """
    columns = countdown_columns(text)
    if columns and how == AS_TYPED:
        return renderer.render(text.strip() + "\n", id=ASKED, columns=columns)
    if how.prompt_format == "auto":
        how = replace(how, prompt_format="chat" if renderer.template else "plain")
    return renderer.render(prompt_content(text, how, ASKED), id=ASKED, prefill=how.prefill)


def countdown_columns(text: str) -> Mapping[str, object]:
    match = COUNTDOWN.fullmatch(text.strip())
    if match is None:
        return {}
    how, numbers, target = match.groups()
    rule = "all" if how == "all" else "subset"
    return {"numbers": tuple(map(int, numbers.split(", "))), "target": int(target), "rule": rule}
