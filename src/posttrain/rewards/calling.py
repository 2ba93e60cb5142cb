"""Calling reward functions: with the arguments they ask for, the asynchronous ones side by side."""

import asyncio
import difflib
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass

from posttrain.errors import RunError, UserError
from posttrain.records import Group, Rollout
from posttrain.rewards.function import Keywords, RewardFunction, ScoringFailure, keywords

WITHHELD = {"prompt", "completion"}
"""Columns that functions of lists do not see: the rendered prompt and what was sampled stand in their place."""


@dataclass(frozen=True, slots=True)
class Row:
    """One completion to be scored."""

    group: Group
    rollout: Rollout
    base: float | None = None
    """The score of the reward that the function looks at, where it looks at one that scored."""

    @property
    def text(self) -> str:
        """What is graded: the prefilled start of the answer and the completion."""
        return self.group.graded_text(self.rollout)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a reward function, for some rows."""

    function: RewardFunction
    rows: tuple[Row, ...]
    wanted: Keywords
    """What the function's signature asks for."""


class FunctionRaised(Exception):
    """A reward function raised its `__cause__`."""


Result = object | FunctionRaised | ScoringFailure
"""What a call returned, or what became of it."""


def calls_for(function: RewardFunction, rows: Sequence[Row]) -> list[Call]:
    """The calls that score these rows: one for all of them, or one for each."""
    wanted = keywords(function)
    if wanted.one_by_one:
        return [Call(function, (row,), wanted) for row in rows]
    return [Call(function, tuple(rows), wanted)] if rows else []


def run(calls: Sequence[Call]) -> list[Result]:
    """Make the calls in their order; what turns out to be awaitable then runs concurrently."""
    results = [begin(call) for call in calls]
    waiting = [index for index, result in enumerate(results) if inspect.isawaitable(result)]
    if waiting:
        finished = finish([results[index] for index in waiting])  # type: ignore[misc]  # isawaitable is no narrowing here
        for index, result in zip(waiting, finished, strict=True):
            results[index] = result
    return results


def begin(call: Call) -> Result:
    """The call's result, its awaitable, or what it raised."""
    arguments = arguments_of(call)
    try:
        return invoke(call.function.call, arguments)
    except (ScoringFailure, FunctionRaised) as failure:
        return failure


def invoke(call: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """Run a function that a user wrote, where anything may happen."""
    try:
        result = call(**arguments)
        return list(result) if isinstance(result, Iterator) else result
    except (ScoringFailure, RunError):
        raise  # a RunError is for the person: no row is at fault, and no score may stand in for it
    except Exception as error:
        raise FunctionRaised from error


def finish(awaitables: Sequence[Awaitable[object]]) -> list[Result]:
    """Await all of them at once, on the loop that reward functions share."""

    async def together() -> list[object]:
        return await asyncio.gather(*awaitables, return_exceptions=True)

    future = asyncio.run_coroutine_threadsafe(together(), shared_loop())
    try:
        return [told_apart(result) for result in future.result()]
    finally:
        future.cancel()  # after an interrupt nothing goes on in the background; else this does nothing


def told_apart(result: object) -> Result:
    """A result as it is, an exception as `invoke` would tell it."""
    if isinstance(result, RunError):
        raise result
    if isinstance(result, BaseException) and not isinstance(result, ScoringFailure):
        raised = FunctionRaised()
        raised.__cause__ = result
        return raised
    return result


@functools.cache
def shared_loop() -> asyncio.AbstractEventLoop:
    """An event loop that lives as long as the process, in a thread of its own.

    One for all steps, since clients that a function keeps belong to the loop they were made in; a thread, since
    notebooks already run a loop in theirs.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop


def arguments_of(call: Call) -> dict[str, object]:
    """The arguments that the function's signature asks for; every one is made anew for this call."""
    wanted = call.wanted
    if wanted.one_by_one:
        values = single(call.rows[0], call.function)
        require_known(call, values.keys())
    else:
        given = standard(call.rows, call.function)
        columns = {name: None for row in call.rows for name in row.group.prompt.columns if name not in WITHHELD}
        require_known(call, columns.keys() | given.keys())
        values = {name: column(name, call.rows) for name in columns if wanted.wants(name)} | given
    return {name: value for name, value in values.items() if wanted.wants(name)}


def standard(rows: Sequence[Row], function: RewardFunction) -> dict[str, object]:
    """The four lists that every reward function can have; they take precedence over columns of these names."""
    return {
        "prompts": [prompt_of(row, function) for row in rows],
        "completions": [completion_of(row, function) for row in rows],
        "completion_ids": [list(row.rollout.tokens) for row in rows],
        "finish_reasons": [row.rollout.finish for row in rows],
        **({"base": [row.base for row in rows]} if function.terms.of else {}),
    }


def single(row: Row, function: RewardFunction) -> dict[str, object]:
    """The same for a function that scores one response; `ground_truth` may be a column called `answer`."""
    values = {name: unshared(value) for name, value in row.group.prompt.columns.items()}
    if "ground_truth" not in values and "answer" in values:
        values["ground_truth"] = unshared(values["answer"])
    return values | {
        "prompt": prompt_of(row, function),
        "response": row.text,
        "finish_reason": row.rollout.finish,
        **({"base": row.base} if function.terms.of else {}),
    }


def column(name: str, rows: Iterable[Row]) -> list[object]:
    """One column of the prompts' dataset rows, None where a row lacks it."""
    return [unshared(row.group.prompt.columns.get(name)) for row in rows]


def unshared(value: object) -> object:
    """A copy of what could be changed: `numbers.remove(3)` in a reward function must not alter the problem."""
    return deepcopy(value) if isinstance(value, list | dict | set) else value


def prompt_of(row: Row, function: RewardFunction) -> object:
    """The prompt without the start of the answer: messages where there are any, else text."""
    prompt = row.group.prompt
    if prompt.messages is not None and not function.text_only:
        return [dict(message) for message in prompt.messages]
    return prompt.text.removesuffix(prompt.prefill)


def completion_of(row: Row, function: RewardFunction) -> object:
    """The graded text: as an assistant's message where the prompt is a conversation, else as it is."""
    if row.group.prompt.messages is not None and not function.text_only:
        return [{"role": "assistant", "content": row.text}]
    return row.text


def require_known(call: Call, offered: Set[str]) -> None:
    """Refuse a function that needs an argument which nothing here supplies."""
    for name in sorted(call.wanted.required - offered):
        near = difflib.get_close_matches(name, offered, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Rename the parameter, give it a default, or add the column."
        if name == "ground_truth":
            hint = "It is taken from a column `ground_truth` or `answer`; add one of these to the dataset."
        raise UserError(
            f"reward {call.function.name!r} needs an argument {name!r}, but there are only"
            f" {', '.join(sorted(offered))}. {hint}"
        )
