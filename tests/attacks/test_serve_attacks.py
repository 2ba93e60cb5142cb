"""`posttrain serve` among strangers: pages of other sites, clients that leave, texts without end."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import pytest

from posttrain.generation.engine import SamplingTimeout
from posttrain.generation.in_process import InProcessSampling
from posttrain.records import Prompt
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.judge_reward import JudgeReward
from posttrain.server import openai_routes
from posttrain.server.addresses import is_loopback
from posttrain.server.listening import LOOK_SECONDS
from posttrain.server.model_server import ModelServer
from tests.support.commands import refusal
from tests.support.refusals import refused
from tests.support.served import JSON, QUESTION, asked, served

ASKS = {"prompt": QUESTION, "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with served() as made:
        yield made


@pytest.fixture(scope="module")
def locked() -> Iterator[ModelServer]:
    """A server with a token."""
    with served(token="s3cret") as made:
        yield made


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that is sure to come, however busy the machine is."""
    while not holds():
        time.sleep(0.01)


def waits(server: ModelServer) -> bool:
    """Whether a client waits for its turn."""
    return any(not job.result.cancelled() for job in server.service.sampler.waiting)


def idle(server: ModelServer) -> bool:
    return not server.service.sampler.num_open and not waits(server)


@contextmanager
def endless(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine that samples one token after the other, and comes to no end."""

    def take(_: InProcessSampling, seconds: float) -> None:
        time.sleep(0.01)
        raise SamplingTimeout("Endless", seconds, 1)

    with monkeypatch.context() as patch:
        patch.setattr(InProcessSampling, "take", take)
        yield


def client(port: int, asks: Mapping[str, object] = ASKS) -> socket.socket:
    """A client that has asked for a completion and reads nothing."""
    body = json.dumps(asks).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    made = socket.create_connection(("127.0.0.1", port))
    made.sendall(head.encode() + body)
    return made


def test_a_client_that_leaves_ends_its_request(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with endless(server, monkeypatch):
        first = client(server.port)
        until(lambda: server.service.sampler.num_open)
        first.close()
        until(lambda: idle(server))
    assert asked(server, "/v1/completions", ASKS)[0] == 200


def test_a_client_that_has_only_ended_its_sending_gets_its_answer(server: ModelServer) -> None:
    with server.service.sampler.hands_off():  # as while other requests are answered
        first = client(server.port)
        first.shutdown(socket.SHUT_WR)
        until(lambda: len(server.service.sampler.waiting) == 1)
        time.sleep(3 * LOOK_SECONDS)  # it is looked at more than once
        assert waits(server)
    said = b"".join(iter(lambda: first.recv(1 << 16), b""))
    first.close()
    *interim, head, body = said.split(b"\r\n\r\n")
    assert set(interim) == {b"HTTP/1.1 100 Continue"}
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert json.loads(body)["choices"]


def test_a_client_that_leaves_later_ends_its_request(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with endless(server, monkeypatch):
        first = client(server.port)
        first.shutdown(socket.SHUT_WR)
        assert first.recv(1 << 10) == b"HTTP/1.1 100 Continue\r\n\r\n"
        until(lambda: server.service.sampler.num_open)
        first.close()
        until(lambda: idle(server))


def test_a_client_that_leaves_the_queue_is_not_served(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    monkeypatch.setattr(server.service.engine, "open", served.append)
    with server.service.sampler.hands_off():  # as while other requests are answered
        second = client(server.port)
        until(lambda: len(server.service.sampler.waiting) == 1)
        second.close()
        until(lambda: not waits(server))
    assert not served


def test_a_judge_that_waits_no_longer_leaves_no_request(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = Prompt(id="0", text="x", tokens=(5, 6))  # the bundled template refuses a judge's system message
    monkeypatch.setattr(server.service.renderer, "render", lambda *_, **__: asks)
    endpoint = f"http://127.0.0.1:{server.port}/v1"
    with endless(server, monkeypatch):
        judge = JudgeReward(endpoint=endpoint, model="bundled", timeout_seconds=0.2, tries=1)
        (said,) = asyncio.run(judge(prompts=["What is 1 + 1?"], completions=["2"]))
        assert isinstance(said, ScoringFailure)
        until(lambda: idle(server))
    assert asked(server, "/v1/completions", ASKS)[0] == 200


def test_health_is_that_of_the_engine(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with endless(server, monkeypatch):
        first = client(server.port)
        until(lambda: server.service.sampler.num_open)
        status, said = asked(server, "/health")
        assert (status, said["status"], said["engine"], said["waiting"]) == (200, "ok", "sampling", 0)
        assert said["seconds"] >= said["seconds_since_token"] >= 0
        # No token comes, beyond the time that a request may take: the engine hangs.
        monkeypatch.setattr(openai_routes, "PATIENCE_SECONDS", -server.service.seconds)
        assert asked(server, "/health")[0] == 503
        assert asked(server, "/health")[1]["status"] == "hangs"
        first.close()
        until(lambda: idle(server))


FOREIGN = {
    "another origin": ({"Origin": "https://evil.example"}, 403),
    "the origin of a file": ({"Origin": "null"}, 403),
    "another port's origin": ({"Origin": "http://127.0.0.1:1"}, 403),
    "a name that was made to point here": ({"Host": "evil.example"}, 403),
    "our address as a part of a name": ({"Host": "127.0.0.1.evil.example"}, 403),
    "a form": ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    "text, which a page sends without asking": ({"Content-Type": "text/plain"}, 415),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_page_of_another_site_is_not_answered(server: ModelServer, name: str) -> None:
    headers, status = FOREIGN[name]
    assert asked(server, "/v1/completions", ASKS, headers={**JSON, **headers})[0] == status
    if status == 403:
        assert asked(server, "/v1/models", headers=headers)[0] == status
    own = {"Origin": f"http://localhost:{server.port}", "Host": f"localhost:{server.port}"}
    assert asked(server, "/v1/completions", ASKS, headers={**JSON, **own})[0] == 200


@pytest.mark.parametrize(
    "given", [{}, *({"Authorization": each} for each in ("s3cret", "Bearer s3cre", "Bearer s3cret\xff", "bearer"))]
)
def test_without_the_token_nothing_is_answered_but_health(locked: ModelServer, given: Mapping[str, str]) -> None:
    for path, body in (("/v1/models", None), ("/v1/completions", ASKS), ("/v1/chat/completions", {})):
        assert asked(locked, path, body, headers={**JSON, **given})[0] == 401
    assert asked(locked, "/health", headers=given)[0] == 200


def test_with_the_token_any_name_of_this_machine_will_do(locked: ModelServer) -> None:
    brings = {**JSON, "Authorization": "Bearer s3cret", "Host": "gpu-box.lan:9000"}
    assert asked(locked, "/v1/completions", ASKS, headers=brings)[0] == 200
    assert asked(locked, "/v1/completions", ASKS, headers={**brings, "Origin": "http://evil.example"})[0] == 403


def test_openai_s_client_brings_the_token_as_its_key(locked: ModelServer) -> None:
    openai = pytest.importorskip("openai", reason="the extra `dev` has it")
    base_url = f"http://127.0.0.1:{locked.port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="s3cret", max_retries=0) as ours:
        assert [model.id for model in ours.models.list()] == ["bundled"]
        messages = [{"role": "user", "content": QUESTION}]
        answer = ours.chat.completions.create(model="bundled", messages=messages, max_tokens=4, n=2, seed=1)
        assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
        assert answer.usage.completion_tokens == 8
        with refused("text before a suffix", error=openai.BadRequestError):
            ours.completions.create(model="bundled", prompt="hi", suffix="end")
    other = openai.OpenAI(base_url=base_url, api_key="another", max_retries=0)
    with other, refused("the token", error=openai.AuthenticationError):
        other.models.list()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_long_text_is_refused_by_its_beginning(server, path, monkeypatch) -> None:
    seen = []
    tokenizer, most = server.service.renderer.tokenizer, server.service.policy.max_positions
    encode = type(tokenizer).__call__
    noting = lambda self, text, **given: (seen.append(len(text)), encode(self, text, **given))[1]
    monkeypatch.setattr(type(tokenizer), "__call__", noting)
    text = "ab " * 1_000_000
    body = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    status, said = asked(server, path, body)
    assert status == 400
    assert f"more than {most} tokens" in said["error"]["message"]
    assert max(seen, default=0) < 100 * most < len(text)


def raw(port: int, request: str, body: bytes = b"") -> int:
    """The status of an answer to a request as it is written, PORT being the server's."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as made:
        made.sendall(request.replace("PORT", str(port)).encode() + b"\r\n\r\n" + body)
        return int(made.makefile("rb").readline().split()[1])


HOST = "\r\nHost: 127.0.0.1:PORT"


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (f"GET http://127.0.0.1:PORT/v1/models HTTP/1.1{HOST}", 200),
        (f"GET http://a:b@c:99999999/v1/models HTTP/1.1{HOST}", 400),
        (f"GET http://[::1]:x/v1/models HTTP/1.1{HOST}", 400),
        *((f"{method} http://[::1/v1/models HTTP/1.1{HOST}", 400) for method in ("GET", "POST", "PUT")),
        (f"GET http://evil.example/v1/models HTTP/1.1{HOST}", 403),
        (f"GET /v1/models HTTP/1.1{HOST}\r\nHost: evil.example", 400),
        ("GET /v1/models HTTP/1.1\r\nHost: 127.0.0.2:PORT", 403),
    ],
)
def test_a_target_and_a_host_are_one_and_this_servers(request_line: str, status: int, server: ModelServer) -> None:
    assert raw(server.port, request_line) == status


def test_a_body_that_is_too_large_is_read_past_and_its_client_told(server: ModelServer) -> None:
    size = 9 << 20
    head = f"POST /v1/completions HTTP/1.1{HOST}\r\nContent-Type: application/json\r\nContent-Length: {size}"
    assert raw(server.port, head, b" " * size) == 413


@pytest.mark.parametrize(
    ("brought", "status"), [("bearer s3cret", 200), ("BEARER s3cret", 200), ("Basic s3cret", 401), ("s3cret", 401)]
)
def test_the_scheme_of_a_token_may_be_in_small_letters(locked: ModelServer, brought: str, status: int) -> None:
    assert raw(locked.port, f"GET /v1/models HTTP/1.1{HOST}\r\nAuthorization: {brought}") == status


QUIET: dict[str, str] = {
    "nothing": "",
    "half a head": f"GET /v1/models HTTP/1.1{HOST}",
    "half a body": f"POST /v1/completions HTTP/1.1{HOST}\r\nContent-Type: application/json\r\n"
    "Content-Length: 9\r\n\r\n{",
}


@pytest.mark.parametrize("sent", QUIET.values(), ids=QUIET)
def test_a_connection_on_which_nothing_comes_is_closed(
    sent: str, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.server.listening.QUIET_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as made:
        made.sendall(sent.replace("PORT", str(server.port)).encode())
        with suppress(ConnectionResetError):
            assert made.recv(1) == b""


def test_all_of_this_machines_own_addresses_need_no_token() -> None:
    assert all(map(is_loopback, ("127.0.0.2", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "a.example")))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host", "0.0.0.0"], "--token"),
        (["--host", "0.0.0.0", "--token", "two words"], "--token"),
        (["--host", "0.0.0.0", "--token", "x", "--public"], "--public"),
        (["--public"], "--public"),
    ],
)
def test_who_may_ask_is_said_without_contradiction(flags: list[str], says: str) -> None:
    assert says in refusal("serve", "bundled", *flags)


@pytest.mark.parametrize(
    ("value", "flags", "says"),
    [
        ("", ["--host", "0.0.0.0"], "POSTTRAIN_SERVE_TOKEN: is empty"),
        ("two words", [], "POSTTRAIN_SERVE_TOKEN: must be printable ASCII"),
        ("s3cret", ["--host", "0.0.0.0", "--public"], "POSTTRAIN_SERVE_TOKEN is set"),
    ],
)
def test_a_token_of_the_environment_obeys_too(value, flags, says, monkeypatch) -> None:
    monkeypatch.setenv("POSTTRAIN_SERVE_TOKEN", value)
    said = refusal("serve", "bundled", *flags)
    assert says in said
    assert "s3cret" not in said


@contextmanager
def served_by_command(**variables: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """The process, what it says first, and its port."""
    command = [sys.executable, "-m", "posttrain", "serve", "bundled", "--port", "0"]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {**os.environ, **variables}, "text": True}
    with subprocess.Popen(command, **given) as process:
        said = process.stdout.readline()
        yield process, said, int(re.search(r"http://127.0.0.1:(\d+)/v1", said)[1])


def test_a_token_of_the_environment_protects_the_server_and_is_not_printed() -> None:
    with served_by_command(POSTTRAIN_SERVE_TOKEN="s3cret") as (process, address, port):
        told = process.stdout.readline()
        statuses = [
            raw(port, f"GET /v1/models HTTP/1.1{HOST}{header}") for header in ("", "\r\nAuthorization: Bearer s3cret")
        ]
        process.send_signal(signal.SIGINT)
    assert statuses == [401, 200]
    assert "POSTTRAIN_SERVE_TOKEN" in told
    assert "s3cret" not in address + told


def test_an_interrupt_ends_the_server_while_it_answers() -> None:
    with served_by_command() as (process, _, port):
        asks = {"prompt": QUESTION, "max_tokens": 10**6, "n": 128, "temperature": 100}
        with client(port, asks):
            time.sleep(0.3)  # it may have begun to sample; where it has not, the end must be as clean
            os.kill(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors.startswith("posttrain: ")
    assert "interrupted" in errors
    assert len(errors.splitlines()) == 1
