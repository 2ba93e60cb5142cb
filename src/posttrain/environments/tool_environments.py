"""Environments made of tools: called in chat, or at a stop text and answered in place.

If a tool raises, its answer says so.  A RunError means that the tool itself is broken (a lost sandbox, say): the
completion ends as failed.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain.environments.protocol import Reply
from posttrain.environments.tool_calls import MAX_CALLS, UNREAD, CallFailed, CallReader, ReadCall, call_id
from posttrain.environments.tools import Tool, answer_of_value, arguments_of
from posttrain.errors import RunError
from posttrain.turns import ToolCall


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The result of a call, as text for the policy."""

    text: str
    failed: bool = False


@contextmanager
def failures_told() -> Iterator[None]:
    """Turns a tool's exception into a failure that the policy reads."""
    try:
        yield
    except (RunError, CallFailed):
        raise
    except (Exception, SystemExit) as error:  # a user's tool over what a policy wrote
        raise CallFailed(f"{type(error).__name__}: {error}") from error


def answer(call: Callable[[], object]) -> ToolAnswer:
    try:
        with failures_told():
            return ToolAnswer(answer_of_value(call()))
    except CallFailed as failed:
        return ToolAnswer(answer_of_value(f"Error: {failed}"), failed=True)


async def answer_async(call: Callable[[], Awaitable[object]]) -> ToolAnswer:
    try:
        with failures_told():
            return ToolAnswer(answer_of_value(await call()))
    except CallFailed as failed:
        return ToolAnswer(answer_of_value(f"Error: {failed}"), failed=True)


async def beside(call: Callable[[], ToolAnswer]) -> ToolAnswer:
    """Its answer, from a daemon thread: one that never returns must not keep the process from ending."""
    done: Future[ToolAnswer] = Future()
    done.set_running_or_notify_cancel()  # the caller may leave while the call continues

    def called() -> None:
        try:
            done.set_result(call())
        except RunError as broken:
            done.set_exception(broken)

    threading.Thread(target=called, name="tool", daemon=True).start()
    return await asyncio.wrap_future(done)


class CalledTools:
    """Makes the calls of a turn in their order, and replies with a message for each.

    A turn without a call is the answer.
    """

    def __init__(self, tools: Mapping[str, Tool], reader: CallReader) -> None:
        self.tools, self.reader = tools, reader

    def reset(self, row: Mapping[str, object], seed: int) -> None:
        """Nothing is added: the prompt describes the tools."""

    def reply(self, said: str) -> Reply | Awaitable[Reply] | None:
        calls = self.reader.calls(said)
        if not calls:
            return None
        if any(self.is_async(call) for call in calls):
            return self.reply_async(calls)
        return self.replied(calls, [answer(partial(self.made, call)) for call in calls[:MAX_CALLS]])

    async def reply_async(self, calls: list[ReadCall]) -> Reply:
        """On an event loop, which tools that are not async do not block."""
        answers = []
        for call in calls[:MAX_CALLS]:
            made = partial(self.made, call)
            answers.append(await (answer_async(made) if self.is_async(call) else beside(partial(answer, made))))
        return self.replied(calls, answers)

    def is_async(self, call: ReadCall) -> bool:
        return call.name in self.tools and self.tools[call.name].is_async

    def made(self, call: ReadCall) -> Any:
        arguments = arguments_of(self.tools, call)
        return self.tools[call.name].call(**arguments)

    def replied(self, calls: list[ReadCall], answers: list[ToolAnswer]) -> Reply:
        if len(calls) > MAX_CALLS:
            left_out = f"Error: too many calls in one turn; only the first {MAX_CALLS} were made"
            answers = [*answers[:-1], ToolAnswer(f"{answers[-1].text}\n{left_out}", answers[-1].failed)]
        messages = [
            {"role": "tool", "name": call.name, "tool_call_id": call_id(number), "content": each.text}
            for number, (call, each) in enumerate(zip(calls, answers, strict=False))
        ]
        known = [call.name if call.name in self.tools else UNREAD for call in calls]
        failed = [*(each.failed for each in answers), *(True for _ in calls[MAX_CALLS:])]
        return Reply(messages, calls=tuple(map(ToolCall, known, failed)))


class ToolsInText:
    """Writes a tool's answer after its stop text, and the policy continues in the same text.

    A tool reads what was said since the last line break or reply.  If it fails, or has no answer (None), nothing is
    written.
    """

    def __init__(self, tools_at: Mapping[str, Tool]) -> None:
        """`tools_at` are the tools by their stop texts."""
        self.tools_at = dict(sorted(tools_at.items(), key=lambda at: len(at[0]), reverse=True))

    def reset(self, row: Mapping[str, object], seed: int) -> None:
        """Nothing is added."""

    def reply(self, said: str) -> Reply | Awaitable[Reply]:
        # A token may hold more than the stop text, such as "= "; nothing can be written after it.
        stop = next((stop for stop in self.tools_at if said.endswith(stop)), None)
        if stop is None:
            return Reply("")
        tool, question = self.tools_at[stop], said.removesuffix(stop).rpartition("\n")[2]
        if tool.is_async:
            return self.reply_async(tool, question)
        return in_place(tool, answer(lambda: given(tool.asked(question))))

    async def reply_async(self, tool: Tool, question: str) -> Reply:
        async def value() -> object:
            return given(await tool.asked(question))

        return in_place(tool, await answer_async(value))


def given(value: object) -> object:
    """The value of a tool in text.  Raises CallFailed for None."""
    if value is None:
        raise CallFailed("no answer")
    return value


def in_place(tool: Tool, answer: ToolAnswer) -> Reply:
    return Reply("" if answer.failed else answer.text, calls=(ToolCall(tool.name, failed=answer.failed),))
