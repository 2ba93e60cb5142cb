"""`posttrain serve` as its clients meet it: OpenAI's own, curl, and pages of other sites; and a full server."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from posttrain.commands import serve
from posttrain.server.model_server import ModelServer
from tests.support.commands import refusal
from tests.support.refusals import refused
from tests.support.served import (
    ASKS,
    CHAT,
    LONG,
    QUESTION,
    TEXT,
    asked,
    idle,
    lines_of,
    put_together,
    served,
    until,
    url,
    whole,
)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    torch.set_num_threads(1)
    with served() as made:
        yield made


def test_no_more_requests_than_the_limit_are_taken() -> None:
    with served(max_requests=2) as made:
        streams = [lines_of(made, TEXT, LONG) for _ in range(2)]
        for each in streams:
            next(each)
        answer = httpx.post(url(made, TEXT), json=ASKS[TEXT])
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "5")
        assert "the limit of 2 requests" in answer.json()["error"]["message"]
        assert asked(made, "/health")[0] == 200
        streams[0].close()
        until(lambda: made.service.num_requests == 1)
        assert asked(made, TEXT, {**ASKS[TEXT], "max_tokens": 1})[0] == 200
        assert made.service.num_requests == 1
        streams[1].close()


def test_openai_s_client_reads_a_stream(server: ModelServer) -> None:
    openai = pytest.importorskip("openai", reason="the extra `dev` has it")
    base = url(server, "/v1")
    with openai.OpenAI(base_url=base, api_key="any", max_retries=0) as client:
        said = {"model": "bundled", "max_tokens": 30, "seed": 5}
        chat = {**said, "messages": ASKS[CHAT]["messages"]}
        expected = client.chat.completions.create(**chat, n=2, logprobs=True, top_logprobs=2)
        texts, ends, logprobs = ["", ""], [None, None], [[], []]
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        for chunk in client.chat.completions.create(**chat, n=2, logprobs=True, top_logprobs=2, **counted):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] = choice.finish_reason or ends[choice.index]
                logprobs[choice.index] += choice.logprobs.content
        assert texts == [each.message.content for each in expected.choices]
        assert ends == [each.finish_reason for each in expected.choices]
        assert logprobs == [each.logprobs.content for each in expected.choices]
        assert chunk.usage == expected.usage

        text = client.completions.create(**said, prompt=QUESTION, stop="=").choices[0].text
        stream = client.completions.create(**said, prompt=QUESTION, stop="=", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == text

        with client.chat.completions.stream(**{**chat, "max_tokens": 300}) as stream:
            told = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion().choices[0]
            assert "".join(told) == final.message.content
            assert final.finish_reason == "stop"

        stream = client.completions.create(**{"model": "bundled", **LONG})
        next(stream)
        server.service.sampler.abort()
        with refused("aborted", error=openai.APIError):
            list(stream)
        with client.completions.create(**{"model": "bundled", **LONG}) as stream:
            next(stream)
        until(lambda: idle(server))
        with refused("stream_options", error=openai.BadRequestError):
            client.completions.create(**said, prompt=QUESTION, stream_options={"include_usage": True})


def test_openai_s_client_reads_that_the_server_is_full() -> None:
    openai = pytest.importorskip("openai", reason="the extra `dev` has it")
    with served(max_requests=1) as made:
        ours = openai.OpenAI(base_url=url(made, "/v1"), api_key="any", max_retries=0)
        with ours, ours.completions.create(**{"model": "bundled", **LONG}) as stream:
            next(stream)
            with refused("1 requests", error=openai.RateLimitError):
                ours.completions.create(model="bundled", prompt=QUESTION)


CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(server: ModelServer, *arguments: str, path: str = TEXT) -> subprocess.CompletedProcess[bytes]:
    command = ["curl", "--silent", "--no-buffer", *arguments, url(server, path)]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


def posts(body: dict[str, Any]) -> tuple[str, ...]:
    return ("--header", "Content-Type: application/json", "--data-binary", json.dumps(body))


@CURL
@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
def test_curl_prints_events(server: ModelServer, version: str) -> None:
    done = curl(server, version, *posts({**ASKS[TEXT], "max_tokens": 20, "seed": 3, "stream": True}))
    *events, end, nothing = done.stdout.split(b"\n\n")
    assert (done.returncode, end, nothing) == (0, b"data: [DONE]", b"")
    said = put_together([json.loads(each.removeprefix(b"data: ")) for each in events])
    assert said == whole(server, TEXT, {**ASKS[TEXT], "max_tokens": 20, "seed": 3})[0]


@CURL
def test_curl_that_stops_early_leaves_nothing(server: ModelServer) -> None:
    assert curl(server, "--max-time", "0.5", *posts({**LONG, "n": 128})).returncode == 28
    until(lambda: idle(server))


@CURL
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"stream": "yes"}, "stream = 'yes': must be true or false"),
        ({"stream": 1}, "stream = 1: must be true or false"),
        ({"stream": True, "stream_options": True}, "stream_options = True: must be an object"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage = 1"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "only include_usage is supported"),
        ({"stream_options": {"include_usage": True}}, "is only for stream = true"),
        ({"stream": True, "logprobs": 21}, "logprobs = 21: must be 0 to 20"),
        ({"stream": True, "logprobs": -1}, "logprobs = -1: must be 0 to 20"),
        ({"stream": True, "stop": "\ud800"}, "surrogate"),
    ],
)
def test_curl_reads_what_is_wrong_with_a_stream(server: ModelServer, wrong: dict[str, Any], says: str) -> None:
    done = curl(server, "--write-out", "\n%{http_code}", *posts({**ASKS[TEXT], **wrong}))
    body, _, status = done.stdout.rpartition(b"\n")
    assert (int(status), says in json.loads(body)["error"]["message"]) == (400, True)


# Pages of other sites that are named

PAGE = "http://localhost:3000"


def test_a_page_that_is_named_may_ask_and_no_other() -> None:
    with served(origins=[PAGE], token="s3cret") as made, httpx.Client(base_url=url(made, "")) as browser:
        wants = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-any"}
        asks_first = browser.options(TEXT, headers={"Origin": PAGE, **wants})
        assert (asks_first.status_code, asks_first.headers["Access-Control-Allow-Origin"]) == (200, PAGE)
        assert "authorization" in asks_first.headers["Access-Control-Allow-Headers"].lower()
        key = {"Authorization": "Bearer s3cret"}
        body = {**ASKS[TEXT], "max_tokens": 2}
        for origin, brings, status in ((PAGE, key, 200), (PAGE, {}, 401), ("http://localhost:3001", key, 403)):
            for stream in (False, True):
                answer = browser.post(TEXT, json={**body, "stream": stream}, headers={"Origin": origin, **brings})
                assert answer.status_code == status
                assert answer.headers.get("Access-Control-Allow-Origin") == (PAGE if origin == PAGE else None)
        other = browser.options(TEXT, headers={"Origin": "https://evil.example", **wants})
        assert (other.status_code, "Access-Control-Allow-Origin" in other.headers) == (405, False)
        assert browser.options(TEXT, headers=wants).status_code == 405


def test_without_a_named_page_no_site_is_allowed(server: ModelServer) -> None:
    answer = httpx.options(url(server, TEXT), headers={"Origin": PAGE, "Access-Control-Request-Method": "POST"})
    assert answer.status_code == 405
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "localhost:3000", "http://a.example/", "http://a.example/b", "HTTP://a.example", "ftp://a.b"],
)
def test_a_page_is_named_by_its_origin(origin: str) -> None:
    assert f"--cors = [{origin}] must be origins" in refusal("serve", "bundled", "--cors", origin)


def test_a_page_may_not_replace_weights() -> None:
    assert "replace the weights" in refusal("serve", "bundled", "--cors", PAGE, "--rl")


def test_the_command_hands_its_limits_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ModelServer] = []
    monkeypatch.setattr(ModelServer, "serve_until_signal", lambda server: made.append(server))
    assert serve.main(["bundled", "--port", "0", "--max-requests", "3", "--cors", PAGE, "https://a.example"]) == 0
    with made[0].in_thread() as server:
        assert server.service.max_requests == 3
        for origin in (PAGE, "https://a.example"):
            answer = httpx.get(url(server, "/v1/models"), headers={"Origin": origin})
            assert answer.headers["Access-Control-Allow-Origin"] == origin
