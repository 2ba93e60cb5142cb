"""Tools: functions with type hints and a docstring that a policy may call.

    def population(city: str) -> int:
        \"\"\"The number of people who live in a city.

        Args:
            city: its English name
        \"\"\"

The description for the chat template is made from the hints and the docstring, as in transformers.
Arguments are checked by their types before a call.  A tool may be `async`; `reproducible = False` on the function says
that the same call may have another answer, such as that of a search engine.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from posttrain.binding import arguments_for, is_name_in_file, object_in_file, object_in_module
from posttrain.environments.calculator import calculator, ending_sum
from posttrain.environments.protocol import nothing
from posttrain.environments.python_tool import SandboxedPython
from posttrain.environments.tool_calls import CallFailed, ReadCall
from posttrain.errors import UserError
from posttrain.options.sandbox import SandboxOptions
from posttrain.schemas import Schema, did_you_mean

MOST_CHARACTERS = 4000
"""Longest answer of a tool; a longer one is cut, and says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a policy may call."""

    name: str
    call: Callable[..., Any]
    description: Mapping[str, Any]
    """Its description for the chat template: name, meaning and the JSON schema of its arguments."""
    in_text: Callable[[str], Any] | None = None
    """Answers at a stop text from the text before it; None for the call with that text as its required argument."""

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call)

    @property
    def reproducible(self) -> bool:
        return bool(getattr(self.call, "reproducible", True))

    def asked(self, question: str) -> Any:
        """The answer at a stop text, awaitable if the tool is async."""
        if self.in_text is not None:
            return self.in_text(question)
        (name,) = self.description["function"]["parameters"]["required"]
        return self.call(**{name: question})


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The tools of a run."""

    tools: Mapping[str, Tool] = field(default_factory=dict)
    close: Callable[[], None] = nothing
    """Closes the sandbox of `python`."""

    def __bool__(self) -> bool:
        return bool(self.tools)

    @property
    def descriptions(self) -> list[Mapping[str, Any]]:
        return [tool.description for tool in self.tools.values()]

    @property
    def reproducible(self) -> bool:
        return all(tool.reproducible for tool in self.tools.values())


def toolbox_of(tools: Sequence[str | Callable[..., Any]], sandbox: SandboxOptions | None = None) -> Toolbox:
    """The tools that a recipe names, or functions.  `python` starts its sandbox now, which is checked first."""
    made: dict[str, Tool] = {}
    with ExitStack() as closes:
        for asked in tools:
            if asked == "calculator":
                tool = tool_of(calculator, asked, in_text=ending_sum)
            elif asked == "python":
                running = SandboxedPython(sandbox or SandboxOptions())
                closes.callback(running.close)
                tool = tool_of(running.python, asked)
            else:
                tool = tool_of(function_at(asked) if isinstance(asked, str) else asked, str(asked))
            if tool.name in made:
                raise UserError(f"tools: two are called {tool.name}.  Rename a function, or name one of them only.")
            made[tool.name] = tool
        return Toolbox(tools=made, close=closes.pop_all().close)


def function_at(path: str) -> Callable[..., Any]:
    """The function FILE.py:FUNCTION or package.module:FUNCTION."""
    if ":" not in path:
        remedy = did_you_mean(path, ("calculator", "python"))
        raise UserError(f"tools: {path!r} is unknown.  {remedy}  For your own give FILE.py:FUNCTION.")
    in_file = is_name_in_file(path)
    found = object_in_file(path, where="tools") if in_file else object_in_module(path, where="tools")
    if not callable(found) or isinstance(found, type):
        raise UserError(f"tools: {path} is a {type(found).__name__}, not a function.  Name a function.")
    return found


def tool_of(function: Callable[..., Any], where: str, *, in_text: Callable[[str], Any] | None = None) -> Tool:
    """A function as a tool.  Raises UserError if its hints or its docstring do not describe all arguments."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        description = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError, ValueError) as error:
        said = str(error).splitlines()[0]
        remedy = "Give every argument a type hint and a line under `Args:` in the docstring"
        raise UserError(f"tools: {where} cannot be described: {said}  {remedy}.") from error
    require_by_name(function, where)
    name = description["function"]["name"]
    return Tool(name=name, call=function, description=description, in_text=in_text)


def require_by_name(function: Callable[..., Any], where: str) -> None:
    """Reject a function whose arguments no call can give, or whose result is not an answer."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(f"tools: {where} yields.  Return its whole answer.")
    for each in inspect.signature(function).parameters.values():
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise UserError(f"tools: {where} takes `{each}`, and calls give arguments by name.  Name each argument.")


def arguments_of(tools: Mapping[str, Tool], call: ReadCall) -> dict[str, Any]:
    """The checked arguments of a call.  Raises CallFailed."""
    if call.fault:
        raise CallFailed(call.fault)
    if call.name not in tools:
        raise CallFailed(f"no tool is called {call.name!r}.  {did_you_mean(call.name, tools)}")
    try:
        return arguments_for(Schema(tools[call.name].call), call.arguments, where=call.name)
    except (UserError, RecursionError) as error:
        raise CallFailed(str(error)) from error


def answer_of_value(value: object) -> str:
    """A tool's result as text: JSON if it is not text, and only its beginning if it is long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n[cut: {len(text)} characters, of which {MOST_CHARACTERS} are shown]"
