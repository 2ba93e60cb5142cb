"""Putting a question that a person typed to a model."""

import re
from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from posttrain.models.rendering import TokenizerRenderer
from posttrain.records import Prompt

COUNTDOWN = re.compile(r"Use (all|some) of ([0-9]+(?:, [0-9]+)*) to make ([0-9]+)\.")
"""A Countdown problem as the bundled model knows it; an answer to it can be graded."""


def asked(text: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """A typed question as a prompt: through the chat template where there is one, else as it stands.

    A Countdown problem on one line is put as the bundled model was taught, and carries the columns that graders read.
    """
    renderer, columns = TokenizerRenderer(tokenizer), countdown_columns(text)
    if columns:
        return renderer.render(text.strip() + "\n", id="asked", columns=columns)
    if tokenizer.chat_template:
        return renderer.render([{"role": "user", "content": text}], id="asked")
    return renderer.render(text, id="asked")


def countdown_columns(text: str) -> Mapping[str, object]:
    """What graders read of a Countdown problem; nothing where the text is none."""
    match = COUNTDOWN.fullmatch(text.strip())
    if match is None:
        return {}
    how, numbers, target = match.groups()
    rule = "all" if how == "all" else "subset"
    return {"numbers": tuple(map(int, numbers.split(", "))), "target": int(target), "rule": rule}
