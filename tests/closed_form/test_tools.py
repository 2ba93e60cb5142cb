"""Tools: what a policy is told of them, what they answer, and what stands in a text behind their stop text."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from posttrain.environments.calculator import calculator, ending_sum
from posttrain.environments.making import TurnSettings, environments_of
from posttrain.environments.protocol import Environment, Environments, Reply
from posttrain.environments.python_tool import SandboxedPython
from posttrain.environments.text_turns import TextTurns
from posttrain.environments.tool_calls import MAX_CALLS
from posttrain.environments.tools import MOST_CHARACTERS, Toolbox, toolbox_of
from posttrain.errors import RunError
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.environment import EnvironmentOptions
from posttrain.turns import ToolCall
from tests.support.pages import python
from tests.support.refusals import refused
from tests.support.turn_templates import CALLING, stop_ids, turn_tokenizer


def shelf(title: str, copies: int = 1, kind: Literal["book", "map"] = "book") -> Any:
    """Puts something on a shelf.

    Args:
        title: its name
        copies: how many
        kind: what it is
    """
    return {"title": title, "copies": copies, "kind": kind}


async def waits(word: str) -> str:
    """Says a word later.

    Args:
        word: which
    """
    await asyncio.sleep(0)
    return f"{word} in {threading.current_thread().name}"


def breaks(how: str) -> str:
    """Fails.

    Args:
        how: the exception
    """
    raise {"value": ValueError("no good"), "exit": SystemExit(3), "run": RunError("the sandbox is gone")}[how]


def long(size: int) -> str:
    """Says much.

    Args:
        size: characters
    """
    return "x" * size


def environments(toolbox: Toolbox, **settings: Any) -> Environments:
    tokenizer = turn_tokenizer(CALLING["qwen"])
    tools = [] if settings.get("tools_at") else toolbox.descriptions
    renderer = TokenizerRenderer(tokenizer, tools=tools)
    made = environments_of(TurnSettings(max_turns=4, **settings), toolbox, renderer, stop_ids(tokenizer))
    assert made is not None
    return made


def replied(environment: Environment, said: str) -> Reply:
    reply = environment.reply(said)
    found = asyncio.run(reply) if inspect.iscoroutine(reply) else reply  # type: ignore[arg-type]
    assert isinstance(found, Reply)
    return found


def answers(environment: Environment, said: str) -> list[str]:
    content = replied(environment, said).content
    assert not isinstance(content, str)
    return [str(message["content"]) for message in content]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_a_functions_hints_and_docstring_are_its_description() -> None:
    (description,) = toolbox_of([shelf]).descriptions
    assert description["function"]["name"] == "shelf"
    assert description["function"]["description"] == "Puts something on a shelf."
    assert description["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "title": {"type": "string", "description": "its name"},
            "copies": {"type": "integer", "description": "how many"},
            "kind": {"type": "string", "enum": ["book", "map"], "description": "what it is"},
        },
        "required": ["title"],
    }


def test_the_prompt_describes_the_tools_and_a_rows_own_column_does_not_replace_them() -> None:
    toolbox = toolbox_of([shelf])
    renderer = TokenizerRenderer(turn_tokenizer(CALLING["qwen"]), tools=toolbox.descriptions)
    prompt = renderer.render([{"role": "user", "content": "a"}], id="row", columns={"tools": [{"name": "other"}]})
    assert '"name": "shelf"' in prompt.text
    assert "other" not in prompt.text


# Arguments as written, and what the reply says
CALLS = [
    ('{"title": "a"}', '{"title": "a", "copies": 1, "kind": "book"}'),
    ('{"title": "a", "copies": 2, "kind": "map"}', '{"title": "a", "copies": 2, "kind": "map"}'),
    ('{"title": 3}', "Error: shelf.title = 3 should be a string"),
    ('{"title": "a", "copies": "2"}', "Error: shelf.copies = '2' should be a whole number"),
    ('{"title": "a", "copies": true}', "Error: shelf.copies = true should be a whole number"),
    ('{"title": "a", "kind": "bok"}', "Error: shelf.kind = 'bok' should be 'book' or 'map'.  Did you mean `book`?"),
    ("{}", "Error: shelf.title is missing; it has no default"),
    ('{"title": "a", "colour": 1}', "Error: shelf.colour: no such field.  There are: title, copies, kind."),
    ('"{\\"title\\": \\"a\\"}"', '{"title": "a", "copies": 1, "kind": "book"}'),
    ("[1]", "Error: its `arguments` are not an object"),
]


@pytest.mark.parametrize(("arguments", "said"), CALLS)
def test_arguments_are_checked_by_their_types_and_the_reply_says_what_is_wrong(arguments: str, said: str) -> None:
    reply = replied(environments(toolbox_of([shelf])).make(), call("shelf", arguments))
    (message,) = reply.content
    assert message["content"] == said  # type: ignore[index]
    assert reply.calls == (ToolCall("shelf", failed=said.startswith("Error")),)


def test_calls_of_one_turn_are_answered_in_their_order_each_by_a_message_of_its_own() -> None:
    environment = environments(toolbox_of(["calculator", shelf])).make()
    said = "Let me see. " + call("calculator", '{"expression": "1/3"}') + " and " + call("shlf", "{}")
    reply = replied(environment, said)
    assert [message["name"] for message in reply.content] == ["calculator", "shlf"]  # type: ignore[index]
    assert answers(environment, said) == ["1/3", "Error: no tool is called 'shlf'.  Did you mean `shelf`?"]
    assert reply.calls == (ToolCall("calculator"), ToolCall("unreadable", failed=True))
    assert environment.reply("No call.") is None


def test_what_a_tool_raises_is_an_answer_and_a_broken_tool_is_not() -> None:
    environment = environments(toolbox_of([breaks])).make()
    assert answers(environment, call("breaks", '{"how": "value"}')) == ["Error: ValueError: no good"]
    assert answers(environment, call("breaks", '{"how": "exit"}')) == ["Error: SystemExit: 3"]
    with pytest.raises(RunError, match="sandbox is gone"):
        environment.reply(call("breaks", '{"how": "run"}'))


def test_async_tools_run_on_the_loop_and_others_beside_it() -> None:
    environment = environments(toolbox_of([waits, "calculator"])).make()
    said = call("waits", '{"word": "now"}') + call("calculator", '{"expression": "6*7"}')
    assert answers(environment, said) == ["now in MainThread", "42"]


def test_long_answers_are_cut_and_say_so_and_too_many_calls_are_not_made() -> None:
    environment = environments(toolbox_of([long])).make()
    (shown,) = answers(environment, call("long", '{"size": 9999}'))
    assert shown == "x" * MOST_CHARACTERS + f"\n[cut: 9999 characters, of which {MOST_CHARACTERS} are shown]"
    reply = replied(environment, call("long", '{"size": 1}') * (MAX_CALLS + 2))
    assert len(reply.content) == MAX_CALLS
    assert [each.failed for each in reply.calls] == [*[False] * MAX_CALLS, True]
    assert f"only the first {MAX_CALLS} were made" in reply.content[-1]["content"]  # type: ignore[index,operator]


# By hand: exact, in lowest terms
SUMS = {"(17-5)*3": "36", "1/3+1/6": "1/2", "2-5": "-3", "7": "7", "-(2/4)": "-1/2", "0/5": "0"}


@pytest.mark.parametrize("expression", SUMS)
def test_the_calculator_is_exact(expression: str) -> None:
    assert calculator(expression) == SUMS[expression]


@pytest.mark.parametrize(
    "expression", ["1/0", "1/(2-2)", "2**9", "2 3", "x", "", "1" * 201, "__import__('os')", "１+1"]
)
def test_the_calculator_refuses_what_is_no_expression(expression: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError)):
        calculator(expression)


# What was said since the last line break or reply, and what is written behind it
ENDINGS = {
    "17+5": "22",
    ",22-3": "19",  # after a reply on the same line
    "so (1+2)*3": "9",
    "3 * 4 ": "12",
    "22": None,  # a number alone
    "5.5+1": "6",  # the expression that it ends with is 5+1: decimals are not in the language
    "1/0": None,
    "2 3+4": None,
    "(3+4": None,
    "x": None,
    "": None,
    "1+" * 150 + "1": None,
}


@pytest.mark.parametrize("said", ENDINGS)
def test_the_sum_that_a_text_ends_with_is_written_behind_it(said: str) -> None:
    assert ending_sum(said) == ENDINGS[said]


def test_in_text_a_tool_answers_at_its_stop_text_and_the_policy_goes_on() -> None:
    made = environments(toolbox_of(["calculator"]), tools_at={"calculator": "="})
    assert (made.stop_texts, made.only_at_stop_texts) == (("=",), True)
    assert isinstance(made.renderer, TextTurns)
    environment = made.make()
    assert replied(environment, "1+1\n17+5=") == Reply("22", calls=(ToolCall("calculator"),))
    assert replied(environment, "x=") == Reply("", calls=(ToolCall("calculator", failed=True),))
    assert replied(environment, "17+5= ") == Reply("")  # the token held more than the stop text
    assert replied(environment, "17+5") == Reply("")


def test_of_two_stop_texts_the_longer_one_counts_and_async_tools_answer_too() -> None:
    made = environments(toolbox_of(["calculator", waits]), tools_at={"calculator": "=", "waits": "=="})
    environment = made.make()
    assert str(replied(environment, "1+1==").content).startswith("1+1 in ")
    assert replied(environment, "1+1=").content == "2"


BAD: list[tuple[Callable[[], object], tuple[str, ...]]] = [
    (lambda: toolbox_of(["calculater"]), ("'calculater'", "`calculator`")),
    (lambda: toolbox_of(["calculator", "calculator"]), ("two are called calculator",)),
    (lambda: toolbox_of([lambda x: x]), ("Args:",)),
    (lambda: environments(toolbox_of(["calculator"]), tools_at={"python": "="}), ("tools_at.python", "calculator")),
    (lambda: environments(toolbox_of(["calculator", shelf]), tools_at={"shelf": "="}), ("calculator has no",)),
    (lambda: environments(toolbox_of(["calculator"]), tools_at={"calculator": ""}), ("stop text", "'='")),
    (
        lambda: environments(toolbox_of(["calculator"]), options=EnvironmentOptions(path="a.py:A")),
        ("environment.path and tools", "Remove"),
    ),
    (
        lambda: environments(toolbox_of(["calculator"]), options=EnvironmentOptions(options={"a": 1})),
        ("environment.options", "environment.path"),
    ),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_mistakes_are_named_before_anything_is_sampled(number: int) -> None:
    make, words = BAD[number]
    with refused(*words):
        make()


def test_tools_in_chat_need_a_chat_template() -> None:
    tokenizer = turn_tokenizer("")
    with refused("no chat template", "tools_at"):
        environments_of(TurnSettings(max_turns=2), toolbox_of([shelf]), TokenizerRenderer(tokenizer), (1,))


NEVER_RETURNS = """
import time
from posttrain.environments.tool_calls import ReadCall
from posttrain.environments.tool_environments import CalledTools
from posttrain.environments.tools import toolbox_of
from posttrain.environments.workers import Asking, LiveEnvironment, ReplyWorkers
from tests.support.turns import environments

def hangs(word: str) -> str:
    \'\'\'Never returns.

    Args:
        word: any
    \'\'\'
    time.sleep(1000)

async def quick(word: str) -> str:
    \'\'\'Returns.

    Args:
        word: any
    \'\'\'
    return word

class Reader:
    def calls(self, said):
        return [ReadCall(name, {"word": "a"}) for name in ("quick", "hangs")]

made = environments(CalledTools, seconds=0.2)
tools = CalledTools(toolbox_of([hangs, quick]).tools, Reader())
with ReplyWorkers(made) as workers:
    asking = Asking(workers)
    asking.ask((0, 0), LiveEnvironment(), lambda: tools.reply(""), read=lambda reply: reply)
    while not (answers := asking.answered(1.0)):
        pass
    print("TimeoutError" in answers[0][1].failure)
"""


def test_a_plain_tool_beside_an_async_one_that_never_returns_does_not_keep_the_process(tmp_path: Path) -> None:
    ended = python(NEVER_RETURNS, tmp_path)
    assert (ended.code, ended.out.strip()) == (0, "True"), ended.err


def test_a_toolbox_that_cannot_be_made_closes_what_it_had_started_and_one_closes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[object] = []
    monkeypatch.setattr(SandboxedPython, "__init__", lambda self, options: None)
    monkeypatch.setattr(SandboxedPython, "close", lambda self: closed.append(self))
    with refused("cannot be described"):
        toolbox_of(["python", lambda: None])
    assert len(closed) == 1
    toolbox = toolbox_of(["python"])
    toolbox.close()
    toolbox.close()
    assert len(closed) == 2


async def silent(word: str) -> None:
    """Says nothing.

    Args:
        word: which
    """


def numbered(number: int) -> int:
    """A number.

    Args:
        number: which
    """
    return number


def pair(first: str, second: str) -> str:
    """Two words.

    Args:
        first: one
        second: two
    """
    return first + second


def test_an_async_tool_in_text_without_an_answer_writes_nothing() -> None:
    reply = replied(environments(toolbox_of([silent]), tools_at={"silent": "="}).make(), "a=")
    assert (reply.content, reply.calls) == ("", (ToolCall("silent", failed=True),))


@pytest.mark.parametrize("tool", [numbered, pair])
def test_a_tool_in_text_takes_one_text(tool: Callable[..., object]) -> None:
    with refused(f"tools_at.{tool.__name__}", "exactly one required argument"):
        environments(toolbox_of([tool]), tools_at={tool.__name__: "="})
