"""The text of a tokenizer's chat template: which of several it is, what options it reads, and what date it writes."""

import inspect
import re
from collections.abc import Mapping
from datetime import date
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.schemas import did_you_mean

OURS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"tools", "documents"}
"""Arguments of the call itself, which no template option may take over."""
TODAY = "strftime_now"
"""The function by which chat templates ask for the date of today."""
DATE = "2024-07-26"
"""What it is told, unless the options say another."""
DIRECTIVES = "aAbBdeGHIjmMpSuUVwWyY"
"""The letters behind % that a format may have."""
FILTER = "replace"
"""Jinja's filter that puts one text for another."""
NO_TEMPLATE = (
    " has no chat template.  Use an instruction-tuned model, name a template's file as model.chat_template, or, of"
    " a dataset, have messages written as plain text by task.prompt_format: plain"
)


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a tokenizer's chat template, of several the one named default; empty where it has none."""
    template = tokenizer.chat_template
    return template.get("default", "") if isinstance(template, dict) else template or ""


def require_template(tokenizer: PreTrainedTokenizerBase, id: str) -> None:
    """Refuse messages, those of the prompt `id`, where there is no template to write them with."""
    template = tokenizer.chat_template
    if isinstance(template, dict) and "default" not in template:
        raise UserError(
            f"the model's tokenizer has chat templates of the names {', '.join(template)} and none of the name"
            " default.  Put the one to use into a file, and name that as model.chat_template."
        )
    if not template:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise UserError(f"prompt {id!r} is a list of messages, but the model's tokenizer ({name}){NO_TEMPLATE}.")


def known_options(template: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a chat template, each of which its text must speak of: a misspelt one would change nothing."""
    words = set(re.findall(r"\w+", template))
    for name in options:
        where = f"model.template_options.{name}"
        if name in OURS:
            raise UserError(f"{where}: that is decided where the template is called; leave it out")
        if not template:
            raise UserError(f"{where}: the model's tokenizer{NO_TEMPLATE}, and leave model.template_options out.")
        if name not in words:
            near = did_you_mean(name, words)
            hint = near if near.startswith("Did") else "Look for `if` in it to see which it reads."
            raise UserError(f"{where}: the chat template reads no variable of that name.  {hint}")
    return dict(options)


def with_one_date(template: str, day: object) -> str:
    """A template that has a date written for the one of today, if it asks for that; other templates as they are.

    Prompts would else change overnight: a run that is resumed, or made again, would not be the same run.  What a
    template sees is data, so the function stands as a macro above the text, on a line that leaves nothing behind.
    """
    if TODAY not in template:
        return template
    try:
        written = date.fromisoformat(str(day))
    except ValueError:
        raise UserError(
            f"model.template_options.{TODAY} = {day!r}: the template writes a date, which is said as {DATE}"
        ) from None
    parts = {f"%{letter}": written.strftime(f"%{letter}") for letter in DIRECTIVES}
    parts |= {f"%-{letter}": parts[f"%{letter}"].lstrip("0") for letter in "dm"}
    filled = "".join(f" | {FILTER}({part!r}, {text!r})" for part, text in parts.items())
    return f"{{% macro {TODAY}(format) %}}{{{{ format{filled} }}}}{{% endmacro %}}\n{template}"
