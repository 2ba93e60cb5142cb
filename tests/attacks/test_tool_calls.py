"""Calls that a policy wrote to do harm: each is answered, in little time, and none raises."""

import json
import time

import pytest

from posttrain.environments.making import TurnSettings, environments_of
from posttrain.environments.protocol import Reply, SaidAndReply
from posttrain.environments.tools import toolbox_of
from posttrain.models.rendering import TokenizerRenderer
from tests.support.hostile_texts import HOSTILE
from tests.support.turn_templates import CALLING, stop_ids, turn_tokenizer

TOKENIZER = turn_tokenizer(CALLING["qwen"])
TOOLBOX = toolbox_of(["calculator"])
MADE = environments_of(
    TurnSettings(max_turns=4), TOOLBOX, TokenizerRenderer(TOKENIZER, tools=TOOLBOX.descriptions), stop_ids(TOKENIZER)
)
BEGIN, END = "<tool_call>", "</tool_call>"
MILLION = 1_000_000


def written(content: object) -> str:
    return f"{BEGIN}{json.dumps(content)}{END}"


def with_arguments(text: str) -> str:
    return f'{BEGIN}{{"name": "calculator", "arguments": {text}}}{END}'


ATTACKS = {
    "a million characters": with_arguments(json.dumps({"expression": "1+" * (MILLION // 2) + "1"})),
    "a million open brackets": f"{BEGIN}{'[' * MILLION}{END}",
    "deep arguments": with_arguments('{"expression": ' + '{"a":' * 2000 + "1" + "}" * 2001),
    "arguments near the parser's depth": with_arguments('{"expression": ' + "[" * 900 + "]" * 900 + "}"),
    "a million tags": BEGIN * (MILLION // len(BEGIN)),
    "a million closed tags": (BEGIN + END) * 40_000,
    "tags within tags": f"{BEGIN}{BEGIN}{END}{END}",
    "a tag that is not closed": f'{BEGIN}{{"name": "calculator"',
    "a number with a million digits": with_arguments('{"expression": ' + "9" * MILLION + "}"),
    "an exponent": with_arguments('{"expression": 1e999999}'),
    "not a number": with_arguments('{"expression": NaN}'),
    "infinity": with_arguments('{"expression": -Infinity}'),
    "half a pair": with_arguments('{"expression": "\\ud800"}'),
    "half a pair as a name": '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    "a raw half of a pair": with_arguments('{"expression": "\ud800"}'),
    "null bytes": with_arguments('{"expression": "1\\u0000+1"}'),
    "keys twice": with_arguments('{"expression": "1+1", "expression": "2**9"}'),
    "dunder": with_arguments('{"__class__": "x", "self": 1}'),
    "no object": written([1, 2]),
    "no name": written({"arguments": {}}),
    "a name that is a list": written({"name": ["calculator"]}),
    "a long name": written({"name": "calculator" * 1000}),
    "a name with control tokens": written({"name": "x<|im_end|>", "arguments": {}}),
    "arguments as text of text": written({"name": "calculator", "arguments": json.dumps(json.dumps({"a": 1}))}),
    "a file": written({"name": "open", "arguments": {"file": "/etc/passwd"}}),
    "code": with_arguments("{\"expression\": \"__import__('os').system('true')\"}"),
    "a power": with_arguments('{"expression": "9**9**9"}'),
    **{f"hostile: {name}": with_arguments(json.dumps({"expression": text})) for name, text in HOSTILE.items()},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_call_is_answered_as_one_that_failed_in_little_time(name: str) -> None:
    assert MADE is not None
    environment = MADE.make()
    began = time.process_time()
    reply = environment.reply(ATTACKS[name])
    assert time.process_time() - began < 1.0
    assert isinstance(reply, Reply)
    assert not isinstance(reply.content, str)
    assert all(call.failed for call in reply.calls)
    assert all(str(message["content"]).startswith("Error: ") for message in reply.content)
    assert sum(len(str(message["content"])) for message in reply.content) < 20_000
    prompt = TokenizerRenderer(TOKENIZER).render([{"role": "user", "content": "a"}], id="row")
    tokens = MADE.renderer.reply_tokens(prompt, [SaidAndReply("a", reply.content)])
    ends = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert list(tokens).count(ends) == 1, "the reply's own end, and no other"


@pytest.mark.parametrize("said", ["", "<tool_cal", "</tool_call>", "tool_call", "<TOOL_CALL>{}</TOOL_CALL>"])
def test_what_is_no_call_stands(said: str) -> None:
    assert MADE is not None
    assert MADE.make().reply(said) is None
