"""`posttrain serve` in chunks: what OpenAI's clients read while tokens are sampled, and what ends it."""

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from posttrain.generation.decoder_steps import DecoderSteps
from posttrain.generation.in_process import InProcessSampling
from posttrain.generation.steps import PrefilledPrompts
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.native.native_decoder import native_refusal
from posttrain.options.model import ModelOptions
from posttrain.server.model_server import ModelServer
from posttrain.server.openai_answers import MOST_HELD, TextPieces
from tests.support.served import (
    ASKS,
    CHAT,
    LONG,
    QUESTION,
    TEXT,
    asked,
    chunks_of,
    idle,
    lines_of,
    put_together,
    served,
    until,
    whole,
)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    torch.set_num_threads(1)
    with served() as made:
        yield made


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
    """32 callers need fewer than twice the steps of one who asks for as many completions; one prefill for all."""
    num_steps, prefilled = 0, list[int]()
    advance, prefill = InProcessSampling._advance, DecoderSteps.prefill

    def noted(steps: DecoderSteps, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        prefilled.append(len(prompts))
        return prefill(steps, prompts)

    def counted(sampling: InProcessSampling) -> None:
        nonlocal num_steps
        num_steps += 1
        advance(sampling)

    monkeypatch.setattr(InProcessSampling, "_advance", counted)
    monkeypatch.setattr(DecoderSteps, "prefill", noted)
    body = {**ASKS[TEXT], "max_tokens": 60, "stop": ["no such text"]}
    assert asked(server, TEXT, {**body, "n": 32, "seed": 1})[0] == 200
    together, num_steps = num_steps, 0
    with ThreadPoolExecutor(32) as pool, server.service.sampler.hands_off():
        callers = [pool.submit(asked, server, TEXT, {**body, "seed": number}) for number in range(32)]
        until(lambda: len(server.service.sampler.waiting) == 32)
    assert all(each.result()[0] == 200 for each in callers)
    assert together <= num_steps <= 2 * together
    assert prefilled == [1, 1], "the same prompt, first of one caller and then of 32"


def test_tokens_are_read_once_a_pass_and_not_after_every_step(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, tokens_after = list[int](), InProcessSampling.tokens_after

    def noted(sampling: InProcessSampling, seen: Mapping[int, int]) -> Any:
        looks.append(len(seen))
        return tokens_after(sampling, seen)

    monkeypatch.setattr(InProcessSampling, "tokens_after", noted)
    monkeypatch.setattr("posttrain.server.openai_routes.CHUNK_SECONDS", 60.0)
    body = {**ASKS[TEXT], "max_tokens": 40, "seed": 3, "n": 4}
    assert put_together(chunks_of(server, TEXT, body)) == whole(server, TEXT, body)[0]
    assert looks == [4], "the first tokens; the other ones come with the end"


def test_the_native_kernel_serves_the_same_tokens_whole_and_streamed(server: ModelServer) -> None:
    native = replace(server.service.policy, native_reason=None)
    if (refusal := native_refusal(native)) is not None:
        pytest.skip(refusal)
    for wish in ({"logprobs": 0}, {"logprobs": 2}, {"stop": [")"]}):  # the first draws 16 tokens a call, the others one
        body = {**ASKS[TEXT], "max_tokens": 40, "seed": 3, "n": 3, **wish}
        expected = whole(server, TEXT, body)[0]
        with served(native) as made:
            answer = whole(made, TEXT, body)[0]
            assert put_together(chunks_of(made, TEXT, body)) == answer
        for one, other in zip(answer, expected, strict=True):
            assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
            if "logprobs" in wish:
                theirs = other["logprobs"]["token_logprobs"]
                assert one["logprobs"]["token_logprobs"] == pytest.approx(theirs, abs=1e-4)


def test_chunks_of_all_answers_leave_in_one_pass(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass is later than the last chunk, at most a period later, and the same whenever that was sent."""
    for num_requests, period in ((0, 0.02), (10, 0.02), (32, 0.064), (1000, 0.1)):
        monkeypatch.setattr(server.service, "num_requests", num_requests)
        begin = 5000 * period
        passes = [server.service._pass_after(begin + share * period) for share in (0.01, 0.5, 0.99)]
        assert passes == pytest.approx([begin + period] * 3)


def test_small_requests_are_answered_without_a_change_of_threads(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {**ASKS[TEXT], "max_tokens": 8, "seed": 3}
    expected = whole(server, TEXT, body)[0]
    used = []

    async def threaded(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        used.append(call.__name__)
        return call(*given, **named)

    monkeypatch.setattr("posttrain.server.openai_routes.run_in_threadpool", threaded)
    assert whole(server, TEXT, body)[0] == expected
    assert used == []
    assert asked(server, TEXT, {**body, "user": "a" * 5000})[0] == 200
    assert used == ["read_completion_request"], "a large one"
    assert asked(server, TEXT, {**body, "n": 16, "max_tokens": 40, "logprobs": 5})[0] == 200
    assert used == ["read_completion_request", "_whole"], "an answer with many texts"


# What ends an answer


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
    assert "not finished in 0 seconds" in [*events][-1]["error"]["message"]
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


def test_a_server_that_ends_says_so_in_its_streams(server: ModelServer) -> None:
    with served(server.service.policy) as made:
        events = begun(made, LONG)
        made.service.sampler.stop()  # what a signal does first
        assert [*events][-1]["error"]["message"] == "the server is stopping.  Try again later"


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
        assert "Internal error" in last["error"]["message"]
    monkeypatch.undo()
    until(lambda: idle(server))


def test_what_is_wrong_before_the_first_token_is_a_status(server: ModelServer) -> None:
    assert asked(server, TEXT, {**LONG, "temperature": -1})[0] == 400
    with served(name="slow", seconds=0.2) as slow, slow.service.sampler.hands_off():
        status, said = asked(slow, TEXT, LONG)
        assert (status, "busy with earlier requests for 0.2 seconds" in said["error"]["message"]) == (503, True)


def test_a_client_that_leaves_amid_an_answer_ends_its_rows(server: ModelServer) -> None:
    events = lines_of(server, TEXT, LONG)
    next(events)
    events.close()
    until(lambda: idle(server))


def ask_raw(client: socket.socket, server: ModelServer, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
    client.connect(("127.0.0.1", server.port))
    client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)


def test_a_client_that_has_only_ended_its_sending_gets_all_chunks(server: ModelServer) -> None:
    with socket.socket() as client:
        ask_raw(client, server, {**ASKS[TEXT], "max_tokens": 30, "stream": True})
        client.shutdown(socket.SHUT_WR)
        assert b"data: [DONE]" in b"".join(iter(lambda: client.recv(1 << 16), b""))


def test_a_client_that_does_not_read_is_left(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.server.listening.QUIET_SECONDS", 0.3)
    with served(server.service.policy) as made, socket.socket() as client:
        for end, buffer in ((client, socket.SO_RCVBUF), (made.socket, socket.SO_SNDBUF)):
            end.setsockopt(socket.SOL_SOCKET, buffer, 4096)
        ask_raw(client, made, {**LONG, "n": 128})
        until(lambda: made.service.num_requests)
        until(lambda: idle(made))
        assert b"[DONE]" not in b"".join(iter(lambda: client.recv(1 << 16), b""))


def test_other_lines_than_line_feeds_stay_inside_of_an_event(server: ModelServer, monkeypatch) -> None:
    hostile = "\u2028data: [DONE]\r\n\x85\x0b\x1c{}\x00"
    monkeypatch.setattr(TextPieces, "add", lambda self, *tokens: hostile)
    monkeypatch.setattr("posttrain.server.openai_answers.shown_text", lambda *_: (hostile, "stop"))
    events = [*lines_of(server, TEXT, {**ASKS[TEXT], "max_tokens": 3})]
    assert all(event.isascii() and len(event.decode().splitlines()) == 1 for event in events)
    assert json.loads(events[0])["choices"][0]["text"].startswith(hostile)
