"""Reads the calls of tools in what a policy said.  The text is hostile: any length, any nesting, any name.

The tokenizer's `response_template`, if there is one, says how a model writes calls.  Else a call is a JSON object with
`name` and `arguments` between <tool_call> and </tool_call>.  A call that cannot be read counts as failed, with a reason
that the policy reads.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never, cast

from transformers import PreTrainedTokenizerBase

from posttrain.models.messages import ASSISTANT

BEGIN, END = "<tool_call>", "</tool_call>"
MAX_CALLS = 16
"""Most calls that are made in a turn.  If there are more, the reply says so."""
MAX_CALL_CHARACTERS = 50_000
"""Longest call that is read; with a response template, longest turn."""
UNREAD = "unreadable"
"""Names a call without a readable name, in replies and metrics."""
MAX_NAME = 64


class CallFailed(Exception):
    """A call that cannot be made, or that failed; its text is for the policy."""


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A call as it was written."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    """Why it cannot be made; empty if it can be tried."""


class CallReader:
    """Finds calls by a tokenizer's response template, or between tags."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]], *, opening: str, end: str
    ) -> None:
        """`opening` and `end` are how the chat template opens and ends a turn of the policy that calls."""
        self.tokenizer, self.tools, self.opening, self.end = tokenizer, tools, opening, end
        self.by_template = getattr(tokenizer, "response_template", None) is not None

    def calls(self, said: str) -> list[ReadCall]:
        return self.read(said)[1]

    def message(self, said: str) -> dict[str, Any]:
        """What was said as a message, with its calls where all of them could be read."""
        texts, calls = self.read(said)
        if not calls or any(call.fault for call in calls):
            return {"role": ASSISTANT, "content": said}
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        listed = [
            {"type": "function", "id": call_id(number), "function": each} for number, each in enumerate(functions)
        ]
        return {"role": ASSISTANT, **texts, "tool_calls": listed}

    def read(self, said: str) -> tuple[dict[str, str], list[ReadCall]]:
        """The texts around the calls, by their keys in a message, and the calls in their order."""
        if self.by_template:
            return self.parsed(said)
        content, calls = tagged_calls(said)
        return {"content": content}, calls

    def parsed(self, said: str) -> tuple[dict[str, str], list[ReadCall]]:
        """By the response template.  A turn that it cannot read is a call that failed."""
        if len(said) > MAX_CALL_CHARACTERS:
            return {"content": said}, [
                ReadCall(UNREAD, fault=f"the turn has more than {MAX_CALL_CHARACTERS} characters")
            ]
        try:
            message = self.parsed_message(said)
        except CallFailed as failed:
            return {"content": said}, [ReadCall(UNREAD, fault=str(failed))]
        listed = cast(list[object], message.get("tool_calls") or [])
        others = {name: text for name, text in message.items() if isinstance(text, str) and name != "role"}
        return {**others, "content": str(message.get("content") or "")}, [
            call_of(each) for each in listed[: MAX_CALLS + 1]
        ]

    def parsed_message(self, said: str) -> dict[str, Any]:
        tools: list[Any] = [dict(tool) for tool in self.tools]
        try:
            message = self.tokenizer.parse_response(said + self.end, prefix=self.opening, tools=tools)
        except Exception as error:  # a model's own description of its answers, over hostile text
            raise CallFailed(f"the answer cannot be read: {str(error)[:200]}") from error
        return dict(message)


def tagged_calls(said: str) -> tuple[str, list[ReadCall]]:
    """The calls between tags.  A tag that is not closed is a call that failed."""
    texts: list[str] = []
    calls: list[ReadCall] = []
    place = 0
    while len(calls) <= MAX_CALLS and (begin := said.find(BEGIN, place)) >= 0:
        texts.append(said[place:begin])
        begin += len(BEGIN)
        end = said.find(END, begin)
        if end < 0:
            calls.append(ReadCall(UNREAD, fault=f"{BEGIN} is not closed by {END}"))
            place = len(said)
            break
        calls.append(call_of_json(said[begin:end]))
        place = end + len(END)
    return "".join([*texts, said[place:]]).strip(), calls


def call_of_json(text: str) -> ReadCall:
    if len(text) > MAX_CALL_CHARACTERS:
        return ReadCall(UNREAD, fault=f"it has {len(text)} characters, and {MAX_CALL_CHARACTERS} are allowed")
    try:
        return call_of(json.loads(text, parse_constant=not_json))
    except ValueError as error:
        return ReadCall(UNREAD, fault=f"it is not JSON: {error}")
    except RecursionError:
        return ReadCall(UNREAD, fault="it is nested too deeply")


def not_json(constant: str) -> Never:
    raise ValueError(f"{constant} is not a JSON number")


def call_of(content: object) -> ReadCall:
    """A call of {"name": …, "arguments": {…}}, also within `function`, and with Llama's `parameters`."""
    if isinstance(content, Mapping) and isinstance(content.get("function"), Mapping):
        content = content["function"]
    if not isinstance(content, Mapping):
        return ReadCall(UNREAD, fault='it is not an object such as {"name": "…", "arguments": {…}}')
    name, arguments = content.get("name"), content.get("arguments", content.get("parameters", {}))
    if not isinstance(name, str) or not name or len(name) > MAX_NAME:
        return ReadCall(UNREAD, fault=f"its `name` is not a text of 1 to {MAX_NAME} characters")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=not_json)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        return ReadCall(name, fault="its `arguments` are not an object")
    return ReadCall(name, arguments)


def call_id(number: int) -> str:
    """The id of a turn's call; some templates require nine characters."""
    return f"call{number:05d}"
