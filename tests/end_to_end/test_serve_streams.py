"""`posttrain serve` in chunks: what OpenAI's clients read while tokens are sampled, and what ends it."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
import torch

from posttrain.generation.in_process import InProcessSampling
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import ModelOptions
from posttrain.server.model_server import ModelServer
from posttrain.server.openai_answers import MOST_HELD, TextPieces
from tests.support.refusals import refused
from tests.support.served import QUESTION, asked, served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKS = {CHAT: {"messages": [{"role": "user", "content": QUESTION}]}, TEXT: {"prompt": QUESTION + "\n"}}
LONG = {"prompt": "Use all of ", "max_tokens": 10**6, "n": 16, "temperature": 100.0, "seed": 1, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    torch.set_num_threads(1)
    with served() as made:
        yield made


def url(server: ModelServer, path: str) -> str:
    return f"http://127.0.0.1:{server.port}{path}"


def lines_of(server: ModelServer, path: str, body: dict[str, Any]) -> Iterator[bytes]:
    """The data of each event, as it comes."""
    with httpx.stream("POST", url(server, path), json={**body, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        rest = b""
        for part in answer.iter_raw():
            *whole, rest = (rest + part).split(b"\n\n")
            for event in whole:
                assert event.startswith(b"data: ")
                yield event.removeprefix(b"data: ")
        assert rest == b""


def chunks_of(server: ModelServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    *chunks, last = lines_of(server, path, body)
    assert last == b"[DONE]"
    return [json.loads(each) for each in chunks]


def put_together(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of an answer in chunks, as those of a whole one."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        first = choice["index"] not in found
        made = found.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None})
        assert "finish_reason" not in made, "a chunk behind the last"
        delta = choice.get("delta", {})
        assert ("role" in delta) == (first and "delta" in choice)
        made["text"] += delta.get("content", choice.get("text", ""))
        for name, values in (choice["logprobs"] or {}).items():
            logprobs = made["logprobs"] = made["logprobs"] or {}
            logprobs[name] = values if values is None else [*(logprobs.get(name) or []), *values]
        if choice["finish_reason"] is not None:
            made["finish_reason"] = choice["finish_reason"]
    return [found[index] for index in sorted(found)]


def whole(server: ModelServer, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """The choices of an answer that is not streamed, and its counts."""
    status, answer = asked(server, path, body)
    assert status == 200, answer
    for choice in answer["choices"]:
        choice["text"] = choice.pop("message", choice).get("content", choice.get("text"))
    return answer["choices"], answer["usage"]


WISHES: dict[str, dict[str, Any]] = {
    "one": {"max_tokens": 40},
    "several": {"max_tokens": 30, "n": 3},
    "bytes that are no characters": {"max_tokens": 80, "n": 2, "temperature": 100.0},
    "log-probs": {"max_tokens": 40, "temperature": 20.0, "logprobs": 0},
    "alternatives": {"max_tokens": 20, "logprobs": 3},
    "stop texts": {"max_tokens": 60, "n": 4, "stop": ["=2", "\n</think>", "=25!", "5,1"], "logprobs": 2},
    "a stop text at once": {"max_tokens": 9, "stop": ["<", "\n"]},
    "a stop text that never comes": {"max_tokens": 30, "stop": ["11" * 40, "no"]},
    "one token": {"max_tokens": 1},
    "greedy": {"max_tokens": 20, "temperature": 0},
}


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("wish", WISHES)
def test_chunks_make_the_whole_answer(server: ModelServer, path: str, wish: str) -> None:
    body = {**ASKS[path], "seed": 3, **WISHES[wish]}
    if path == CHAT and "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    expected, counts = whole(server, path, body)
    chunks = chunks_of(server, path, {**body, "stream_options": {"include_usage": True}})
    *others, last = chunks
    assert put_together(chunks) == expected
    assert {(each["id"], each["model"], each["created"], each["object"]) for each in chunks} == {
        (last["id"], "bundled", last["created"], "chat.completion.chunk" if path == CHAT else "text_completion")
    }
    assert (last["choices"], last["usage"]) == ([], counts)
    assert all(each["usage"] is None for each in others)
    assert not any("usage" in each for each in chunks_of(server, path, body))


def test_several_prompts_are_streamed_by_their_place(server: ModelServer) -> None:
    body = {"prompt": [QUESTION, "Use all of "], "n": 2, "max_tokens": 12, "seed": 8}
    assert put_together(chunks_of(server, TEXT, body)) == whole(server, TEXT, body)[0]


def test_a_piece_of_text_is_whole_characters() -> None:
    tokenizer = load_policy(ModelOptions()).tokenizer  # bytes: é is two tokens, 😀 four
    pieces = TextPieces(tokenizer)
    said = [pieces.add(token) for token in tokenizer("a é😀b", add_special_tokens=False)["input_ids"]]
    assert said == ["a", " ", "", "é", "", "", "", "😀", "b"]
    (half, *_) = tokenizer("é", add_special_tokens=False)["input_ids"]
    endless = [pieces.add(half) for _ in range(3 * MOST_HELD)]
    assert max(map(len, endless)) <= MOST_HELD  # what is not a character is sent some day
    assert sum(map(len, endless)) == 3 * MOST_HELD


def test_what_may_become_a_stop_text_is_held_and_nothing_else(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk comes with its token: at most the length of a stop text is held."""
    monkeypatch.setattr("posttrain.server.openai_routes.CHUNK_SECONDS", 0.0)
    body = {**ASKS[TEXT], "max_tokens": 40, "seed": 3, "temperature": 0}
    text = whole(server, TEXT, body)[0][0]["text"]
    place = next(at for at in range(20, len(text)) if text.find(text[at : at + 4]) == at)
    stop = [text[10:14] + "never", text[place : place + 4]]
    chunks = [
        choice["text"] for chunk in chunks_of(server, TEXT, {**body, "stop": stop}) for choice in chunk["choices"]
    ]
    assert "".join(chunks) == text[:place]
    assert len(chunks) > 5
    assert all(len(each) < len("</think>") + len(stop[0]) for each in chunks)


# A request in company


def test_a_seed_gives_one_answer_alone_and_in_any_company(server: ModelServer) -> None:
    body = {**ASKS[TEXT], "max_tokens": 40, "seed": 11, "n": 2, "logprobs": 0}
    alone = whole(server, TEXT, body)[0]
    others = [
        {**ASKS[TEXT], "max_tokens": 8 + 4 * number, "seed": number, "temperature": (1.0, 0.5)[number % 2]}
        for number in range(8)
    ]
    with ThreadPoolExecutor(16) as pool:
        company = [pool.submit(chunks_of, server, TEXT, each) for each in others]
        streamed, plain = pool.submit(chunks_of, server, TEXT, body), pool.submit(whole, server, TEXT, body)
        assert put_together(streamed.result()) == plain.result()[0] == alone
    assert [put_together(each.result()) for each in company] == [whole(server, TEXT, each)[0] for each in others]


def test_callers_share_the_steps_of_the_model(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 callers together need fewer than twice the steps of one caller who asks for as many completions."""
    num_steps = 0
    advance = InProcessSampling._advance

    def counted(sampling: InProcessSampling) -> None:
        nonlocal num_steps
        num_steps += 1
        advance(sampling)

    monkeypatch.setattr(InProcessSampling, "_advance", counted)
    body = {**ASKS[TEXT], "max_tokens": 60, "stop": ["no such text"]}
    assert asked(server, TEXT, {**body, "n": 32, "seed": 1})[0] == 200
    together, num_steps = num_steps, 0
    with ThreadPoolExecutor(32) as pool, server.service.sampler.hands_off():
        callers = [pool.submit(asked, server, TEXT, {**body, "seed": number}) for number in range(32)]
        until(lambda: len(server.service.sampler.waiting) == 32)
    assert all(each.result()[0] == 200 for each in callers)
    assert together <= num_steps <= 2 * together


# What ends an answer


def until(holds: Callable[[], Any]) -> None:
    while not holds():
        time.sleep(0.005)


def idle(server: ModelServer) -> bool:
    return not server.service.sampler.num_open and not server.service.num_requests


def begun(server: ModelServer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of an answer whose first one has come."""
    events = map(json.loads, lines_of(server, TEXT, body))
    next(events)
    return events


def test_an_error_amid_an_answer_is_its_last_event(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    events = begun(server, LONG)
    server.service.sampler.abort()
    assert [*events][-1] == {"error": {"message": "aborted", "type": "server_error"}}
    until(lambda: idle(server))

    events = begun(server, LONG)
    monkeypatch.setattr(server.service, "seconds", 0.0)
    assert "not done in 0 seconds" in [*events][-1]["error"]["message"]
    monkeypatch.undo()
    until(lambda: idle(server))

    def not_finite(rows: Any, logits: torch.Tensor, places: torch.Tensor) -> None:
        sample(rows, torch.full_like(logits, torch.nan) if len(seen) > 3 else logits, places)
        seen.append(len(places))

    from posttrain.generation.decoding_rows import Rows

    seen, sample = list[int](), Rows._sample
    monkeypatch.setattr(Rows, "_sample", not_finite)
    assert "logits are NaN" in [*begun(server, LONG)][-1]["error"]["message"]
    monkeypatch.undo()
    assert asked(server, TEXT, {**ASKS[TEXT], "max_tokens": 1})[0] == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the terminal has it
def test_a_fault_of_the_server_amid_an_answer_is_an_event(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fault(*_: object) -> None:
        raise KeyError("a bug")

    events = map(json.loads, lines_of(server, TEXT, LONG))
    next(events)
    monkeypatch.setattr("posttrain.server.openai_answers.StreamedChoice.grown", fault)
    with suppress(httpx.RemoteProtocolError):  # the connection ends with it
        *_, last = events
        assert "a fault of the server" in last["error"]["message"]
    monkeypatch.undo()
    until(lambda: idle(server))


def test_what_is_wrong_before_the_first_token_is_a_status(server: ModelServer) -> None:
    assert asked(server, TEXT, {**LONG, "temperature": -1})[0] == 400
    with served(name="slow", seconds=0.2) as slow, slow.service.sampler.hands_off():
        status, said = asked(slow, TEXT, LONG)
        assert (status, "busy for 0.2 seconds" in said["error"]["message"]) == (503, True)


def test_a_client_that_leaves_amid_an_answer_ends_its_rows(server: ModelServer) -> None:
    events = lines_of(server, TEXT, LONG)
    next(events)
    events.close()
    until(lambda: idle(server))


def test_a_client_that_does_not_read_is_left(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.server.listening.QUIET_SECONDS", 0.3)
    with served(server.service.policy) as made, socket.socket() as client:
        for end, buffer in ((client, socket.SO_RCVBUF), (made.socket, socket.SO_SNDBUF)):
            end.setsockopt(socket.SOL_SOCKET, buffer, 4096)
        client.connect(("127.0.0.1", made.port))
        body = json.dumps(LONG).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: 127.0.0.1:{made.port}\r\nContent-Type: application/json\r\n"
        client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: made.service.num_requests)
        until(lambda: idle(made))
        assert b"[DONE]" not in b"".join(iter(lambda: client.recv(1 << 16), b""))


def test_no_more_requests_than_the_limit_are_taken() -> None:
    with served(max_requests=2) as made:
        streams = [lines_of(made, TEXT, LONG) for _ in range(2)]
        for each in streams:
            next(each)
        answer = httpx.post(url(made, TEXT), json=ASKS[TEXT])
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "5")
        assert "2 requests are answered or wait" in answer.json()["error"]["message"]
        assert asked(made, "/health")[0] == 200
        streams[0].close()
        until(lambda: made.service.num_requests == 1)
        assert asked(made, TEXT, {**ASKS[TEXT], "max_tokens": 1})[0] == 200
        assert made.service.num_requests == 1
        streams[1].close()


# The clients that people have


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
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "only include_usage is known"),
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


def test_other_lines_than_line_feeds_stay_inside_of_an_event(server: ModelServer, monkeypatch) -> None:
    hostile = "\u2028data: [DONE]\r\n\x85\x0b\x1c{}\x00"
    monkeypatch.setattr(TextPieces, "add", lambda self, token: hostile)
    monkeypatch.setattr("posttrain.server.openai_answers.shown_text", lambda *_: (hostile, "stop"))
    events = [*lines_of(server, TEXT, {**ASKS[TEXT], "max_tokens": 3})]
    assert all(event.isascii() and len(event.decode().splitlines()) == 1 for event in events)
    assert json.loads(events[0])["choices"][0]["text"].startswith(hostile)


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
