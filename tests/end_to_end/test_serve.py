"""`posttrain serve`: a real server over the bundled model, asked as OpenAI's clients ask."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest
import torch

from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import ModelOptions
from posttrain.server.model_server import ModelServer
from posttrain.server.openai_answers import added_texts
from tests.support.commands import refusal
from tests.support.served import QUESTION, asked, served

CHAT = {"messages": [{"role": "user", "content": QUESTION}]}


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with served() as made:
        yield made


def refused_request(server: ModelServer, path: str, body: Any, status: int = 400) -> str:
    """What a request that ends so is told."""
    code, answer = asked(server, path, body)
    assert code == status
    said: str = answer["error"]["message"]
    return said


def test_models_and_health(server: ModelServer) -> None:
    assert asked(server, "/v1/models")[1]["data"][0]["id"] == "bundled"
    assert asked(server, "/health") == (200, {"status": "ok", "engine": "idle", "waiting": 0})


def test_completions_are_counted_seeded_and_cut_at_stop_texts(server: ModelServer) -> None:
    body = {"prompt": QUESTION, "max_tokens": 60, "n": 3, "seed": 5}
    code, first = asked(server, "/v1/completions", body)
    assert code == 200
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in first["choices"]}) > 1
    usage = first["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    again = asked(server, "/v1/completions", body)[1]
    assert [choice["text"] for choice in again["choices"]] == [choice["text"] for choice in first["choices"]]
    cut = asked(server, "/v1/completions", {**body, "stop": "="})[1]["choices"]
    assert all("=" not in choice["text"] for choice in cut)
    assert {choice["finish_reason"] for choice in cut} == {"stop"}
    short = asked(server, "/v1/completions", {"prompt": [QUESTION, QUESTION], "max_tokens": 2})[1]["choices"]
    assert [choice["finish_reason"] for choice in short] == ["length", "length"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": QUESTION, "max_tokens": "many"}, "max_tokens = 'many'"),
        ("/v1/completions", {"prompt": QUESTION, "temperature": -1}, "temperature = -1"),
        ("/v1/completions", {"prompt": QUESTION, "n": 1000}, "n = 1000"),
        ("/v1/completions", {"prompt": "x" * 5000}, "context of 1024.  Send at most 1023"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, "Send at most 1023"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 2}, "knows single questions"),
        ("/v1/completions", [1], "JSON object"),
        ("/v1/completions", {"prompt": QUESTION, "temprature": 0.5}, "Did you mean `temperature`?"),
        ("/v1/completions", {"prompt": QUESTION, "messages": [QUESTION]}, "messages = "),
        ("/v1/chat/completions", {**CHAT, "prompt": QUESTION}, "prompt = "),
        ("/v1/completions", {"prompt": QUESTION, "logprobs": 21}, "logprobs = 21: must be 0 to 20"),
        ("/v1/completions", {"prompt": QUESTION, "logprobs": True}, "logprobs = True: must be a whole number"),
        ("/v1/chat/completions", {**CHAT, "logprobs": 1}, "logprobs = 1: must be true or false"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs = 2: is only for logprobs = true"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", ""]}, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, "token ids"),
        ("/v1/completions", {"prompt": [True]}, "token ids"),
        ("/v1/completions", {"prompt": [[1.5]]}, "token ids"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, "token id -1"),
        ("/v1/completions", {"prompt": [5, 10**9]}, "token id 1000000000"),
        ("/v1/completions", {"prompt": "\ud800"}, "surrogate"),
        ("/v1/completions", {"prompt": "a", "stop": "\udfff"}, "surrogate"),
        ("/v1/completions", {"prompt": "a", "stop": 5}, "stop = 5"),
        ("/v1/completions", {"prompt": "a", "stop": ["b"] * 100}, "stop"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_completion_tokens = 0"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -(10**30)}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": True}, "max_tokens = True"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "n = 0"),
        ("/v1/completions", {"prompt": ["a"] * 65, "n": 2}, "n = 2 for 65 prompts"),
        ("/v1/completions", {"prompt": "a", "temperature": 10**400}, "temperature"),
        ("/v1/completions", {"prompt": "a", "temperature": float("nan")}, "temperature = nan"),
        ("/v1/completions", {"prompt": "a", "top_p": [[]]}, "top_p = a list"),
        ("/v1/completions", {"prompt": "a", "top_k": -1}, "top_k = -1"),
        ("/v1/completions", {"prompt": "a", "seed": "x"}, "seed = 'x'"),
        ("/v1/chat/completions", {"messages": "hello"}, "messages"),
        ("/v1/chat/completions", {"messages": {"a": 1}}, "messages"),
        ("/v1/chat/completions", {"messages": [1]}, "messages[0]"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content = null"),
        ("/v1/chat/completions", {"messages": [{"role": 5, "content": "a"}]}, "messages[0].role = 5"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": []}]}, "messages[0].content = a list"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "messages[0].content[1] has the type 'image_url': must be a text part",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "a", "content": "a", "tool_calls": 5}]}, "tool_calls"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(server: ModelServer, path: str, body: Any, says: str) -> None:
    assert says in refused_request(server, path, body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "field",
    [
        {"stream_options": {"include_usage": True}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"50256": -100}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"best_of": 3, "n": 2},
        {"echo": True},
        {"suffix": "end"},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy"}},
        {"reasoning_effort": "high"},
        {"verbosity": "low"},
        {"service_tier": "flex"},
        {"store": True},
        {"web_search_options": {}},
        {"repetition_penalty": 1.1},
    ],
)
def test_what_is_not_done_is_refused_by_its_name(server: ModelServer, path: str, field: dict[str, Any]) -> None:
    body = {"prompt": QUESTION} if path == "/v1/completions" else CHAT
    assert refused_request(server, path, {**body, "max_tokens": 1, **field}).startswith(next(iter(field)) + " = ")


NOTHING = {
    **dict.fromkeys(["stream_options", "tool_choice", "suffix", "audio", "store", "anything"]),
    **dict.fromkeys(["stream", "echo"], False),
    **{name: [] for name in ("tools", "functions")},
    **dict.fromkeys(["presence_penalty", "frequency_penalty"], 0),
    **dict.fromkeys(["function_call", "service_tier"], "auto"),
    "response_format": {"type": "text"},
    "logit_bias": {},
    "best_of": 1,
    "user": "me",
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
}


def test_values_that_ask_for_nothing_and_fields_that_change_nothing_are_taken(server: ModelServer) -> None:
    rest = {"max_tokens": 8, "seed": 3}
    plain = asked(server, "/v1/completions", {"prompt": QUESTION, **rest})[1]["choices"]
    assert asked(server, "/v1/completions", {"prompt": QUESTION, **rest, **NOTHING})[1]["choices"] == plain
    chat = {**CHAT, **rest, **NOTHING, "logprobs": False, "top_logprobs": 0, "store": False}
    assert asked(server, "/v1/chat/completions", chat)[0] == 200
    assert asked(server, "/v1/completions", {"prompt": QUESTION, "n": 3, "best_of": 3, **rest})[0] == 200


def test_a_chat_with_the_bundled_model_puts_the_question_as_it_was_trained_to_read_it(server: ModelServer) -> None:
    rest = {"max_tokens": 40, "seed": 7}
    parts = [{"type": "text", "text": QUESTION[:9]}, {"type": "text", "text": QUESTION[9:]}]
    said = asked(server, "/v1/completions", {"prompt": QUESTION + "\n", **rest})[1]["choices"][0]["text"]
    for content in (QUESTION, QUESTION + "\n", parts):
        body = {"messages": [{"role": "user", "content": content}], **rest}
        code, answer = asked(server, "/v1/chat/completions", body)
        assert (code, answer["choices"][0]["message"]["content"]) == (200, said)


def test_another_model_than_the_served_one_is_not_found(server: ModelServer) -> None:
    body = {"prompt": QUESTION, "max_tokens": 1}
    assert asked(server, "/v1/completions", {**body, "model": "bundled"})[0] == 200
    said = refused_request(server, "/v1/completions", {**body, "model": "gpt-4"}, 404)
    assert "no such model.  Use `bundled`" in said
    code, answer = asked(server, "/v1/models/bundled")
    assert (code, answer["id"]) == (200, "bundled")
    assert asked(server, "/v1/models/gpt-4")[0] == 404
    with served(name="runs/a run/model") as made:
        assert asked(made, "/v1/models/runs%2Fa%20run/model")[1]["id"] == "runs/a run/model"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        *((method, "/v1/completions", "POST") for method in ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS")),
        ("PUT", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("HEAD", "/v1/models/bundled", "GET"),
        ("DELETE", "/health", "GET"),
        ("BREW", "/v1/completions", ""),
    ],
)
def test_another_method_is_told_the_one_that_is_taken(server: ModelServer, method: str, path: str, allow: str) -> None:
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
        connection.request(method, path)
        response = connection.getresponse()
        assert (response.status, response.getheader("Allow")) == ((405, allow) if allow else (501, None))
        body = response.read()
    told = f"this path supports {allow}" if allow else method
    assert body == b"" if method == "HEAD" else told in json.loads(body)["error"]["message"]


def test_a_stop_text_ends_the_sampling_too(server: ModelServer) -> None:
    body = {"prompt": QUESTION + "\n", "max_tokens": 60, "seed": 5, "n": 4}
    whole = asked(server, "/v1/completions", body)[1]
    for stop in ("=", ["\n</think>", ",2"], "no such text"):
        cut = asked(server, "/v1/completions", {**body, "stop": stop})[1]
        texts = [choice["text"] for choice in whole["choices"]]
        for each in [stop] if isinstance(stop, str) else stop:
            texts = [text.partition(each)[0] for text in texts]
        assert [choice["text"] for choice in cut["choices"]] == texts
        if stop != "no such text":
            # A token or two behind each text is the end of the stop text.
            characters = sum(map(len, texts))
            assert cut["usage"]["completion_tokens"] <= characters + 4 * 9 < whole["usage"]["completion_tokens"]


def test_token_ids_are_a_prompt_as_their_text_is(server: ModelServer) -> None:
    ids = load_policy(ModelOptions()).tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    body = {"max_tokens": 12, "seed": 5}
    answers = [
        asked(server, "/v1/completions", {"prompt": prompt, **body})[1]
        for prompt in (QUESTION, ids, [ids], [QUESTION, ids], [ids, ids])
    ]
    texts = [[choice["text"] for choice in answer["choices"]] for answer in answers]
    assert texts[0] == texts[1] == texts[2]
    assert texts[3] == texts[4]
    assert answers[1]["usage"] == answers[0]["usage"]


def test_what_is_null_is_as_left_out_and_a_limit_is_cut_to_the_context(server: ModelServer) -> None:
    nulls = dict.fromkeys(["n", "temperature", "top_p", "stop", "seed", "max_completion_tokens"])
    code, answer = asked(server, "/v1/completions", {"prompt": QUESTION, "max_tokens": 4, **nulls})
    assert (code, len(answer["choices"])) == (200, 1)
    for many in (10**9, 10**40):
        code, answer = asked(server, "/v1/completions", {"prompt": QUESTION, "max_tokens": many, "seed": 3})
        assert code == 200
        assert answer["usage"]["total_tokens"] <= load_policy(ModelOptions()).max_positions


@pytest.mark.parametrize("length", ["²", "-1", "9" * 5000, "1e3", "+5"])
def test_a_length_that_is_none_is_refused(server: ModelServer, length: str) -> None:
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", length.encode("latin-1"))
        connection.endheaders()
        assert connection.getresponse().status == 400


def test_the_body_of_a_request_for_nothing_is_no_next_request(server: ModelServer) -> None:
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
        connection.request("POST", "/v1/nothing", "GET /health HTTP/1.1\r\n\r\n")
        assert connection.getresponse().read()
        assert connection.sock is None or connection.sock.recv(1) == b""  # closed, and nothing more is answered


def test_a_request_ends_in_time_and_so_does_the_wait_for_one_before_it() -> None:
    with served(name="slow", seconds=0.2) as made:
        long = {"prompt": "Use all of ", "max_tokens": 10**6, "n": 128, "temperature": 100.0}
        assert "not finished in 0.2 seconds" in refused_request(made, "/v1/completions", long, 503)
        short = {"prompt": QUESTION, "max_tokens": 1}
        with made.service.sampler.hands_off():  # as while other requests are answered
            assert "busy with earlier requests for 0.2 seconds" in refused_request(made, "/v1/completions", short, 503)
        assert asked(made, "/v1/completions", short)[0] == 200


TEMPLATE = """{%- if messages[0].role != "user" %}{{ raise_exception("the user first") }}{% endif -%}
{%- for message in messages %}{{ message.content + "\n" }}
{%- for call in message.tool_calls %}{{ call.function.name + call.id }}{% endfor %}{% endfor %}"""


def test_messages_that_a_template_refuses_or_would_stumble_over() -> None:
    policy = load_policy(ModelOptions())
    policy.tokenizer.chat_template = TEMPLATE
    hello = {"role": "user", "content": QUESTION}
    with served(policy, name="chat") as made:
        as_clients_send_it = {"name": "me", "tool_calls": None, "refusal": None}
        for body in (hello, {**hello, **as_clients_send_it}):
            code, answer = asked(made, "/v1/chat/completions", {"messages": [body], "max_tokens": 2})
            assert (code, answer["choices"][0]["message"]["role"]) == (200, "assistant")
        for change, says in (
            ({"tool_calls": [5]}, "messages[0].tool_calls"),
            ({"role": "king"}, "the user first"),
            ({"role": "assistant"}, "user"),
        ):
            assert says in refused_request(made, "/v1/chat/completions", {"messages": [{**hello, **change}]})


def test_what_is_no_request_is_refused_and_the_server_goes_on(server: ModelServer) -> None:
    assert asked(server, "/v1/completions", raw=b"{nonsense")[0] == 400
    assert asked(server, "/v1/nothing", {})[0] == 404
    assert asked(server, "/nothing")[0] == 404
    assert asked(server, "/health")[0] == 200


def test_a_port_that_is_taken_is_one_message(server: ModelServer) -> None:
    assert "another port" in refusal("serve", "bundled", "--port", server.port)


def test_log_probs_are_those_of_the_sampled_tokens(server: ModelServer) -> None:
    policy = load_policy(ModelOptions())
    body = {"prompt": QUESTION + "\n", "max_tokens": 30, "seed": 5, "logprobs": 0}
    (choice,) = asked(server, "/v1/completions", body)[1]["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    shown = zip(found["text_offset"], found["tokens"], strict=True)
    assert [choice["text"][at : at + len(token)] for at, token in shown] == found["tokens"]
    ids = policy.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
    start = policy.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
    assert found["tokens"] == [policy.tokenizer.decode([each]) for each in ids]  # the bundled model's text is ASCII
    with torch.no_grad():
        logits = policy.model(torch.tensor([start + ids])).logits[0, len(start) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert found["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)

    cut = asked(server, "/v1/completions", {**body, "stop": "="})[1]["choices"][0]
    shown = len(cut["logprobs"]["tokens"])
    assert "".join(cut["logprobs"]["tokens"]) == cut["text"]
    assert cut["logprobs"]["token_logprobs"] == found["token_logprobs"][:shown]

    chat = {**CHAT, "max_tokens": 30, "seed": 5, "logprobs": True}
    content = asked(server, "/v1/chat/completions", chat)[1]["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == found["tokens"]
    assert [each["logprob"] for each in content] == found["token_logprobs"]
    assert [bytes(each["bytes"]).decode() for each in content] == found["tokens"]


def test_a_character_of_several_tokens_comes_with_its_last() -> None:
    tokenizer = load_policy(ModelOptions()).tokenizer  # bytes: é is two tokens, 😀 four
    ids = tokenizer("a é😀b", add_special_tokens=False)["input_ids"]
    texts = added_texts(tokenizer, ids)
    assert "".join(texts) == "a é😀b"
    assert sum(text == "" for text in texts) == len(ids) - len("a é😀b")
    assert "".join(added_texts(tokenizer, ids[:-2])) == tokenizer.decode(ids[:-2])  # ends inside of 😀


def test_a_short_request_joins_a_long_one_and_is_answered_before_it(server: ModelServer) -> None:
    long = {"prompt": "Use all of ", "max_tokens": 10**6, "n": 64, "temperature": 1.5, "seed": 1}
    short = {"prompt": QUESTION, "max_tokens": 1, "temperature": 1.5}
    with ThreadPoolExecutor(1) as other:
        under_way = other.submit(asked, server, "/v1/completions", long)
        while not server.service.sampler.num_open:
            time.sleep(0.01)
        assert asked(server, "/v1/completions", short)[0] == 200
        assert not under_way.done()
        assert under_way.result()[0] == 200
