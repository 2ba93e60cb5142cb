"""The bundled model behind `posttrain serve`, and what it answers."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of
from posttrain.options.model import ModelOptions
from posttrain.server.model_server import ModelServer
from posttrain.server.openai_routes import MAX_REQUESTS, Service

JSON = {"Content-Type": "application/json"}
QUESTION = "Use all of 11, 25, 11 to make 25."
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKS = {CHAT: {"messages": [{"role": "user", "content": QUESTION}]}, TEXT: {"prompt": QUESTION + "\n"}}
LONG = {"prompt": "Use all of ", "max_tokens": 10**6, "n": 16, "temperature": 100.0, "seed": 1, "stream": True}


def serving(
    policy: Policy, *, name: str, seconds: float = 600.0, max_requests: int = MAX_REQUESTS, **how: Any
) -> ModelServer:
    service = Service(policy, renderer_of(policy), name=name, seconds=seconds, max_requests=max_requests)
    return ModelServer(service, **how)


@contextmanager
def served(policy: Policy | None = None, *, name: str = "bundled", **how: Any) -> Iterator[ModelServer]:
    """A server of a policy, the bundled model's if none is given, in a thread of this process, on a free port."""
    with serving(policy or load_policy(ModelOptions()), name=name, **how).in_thread() as made:
        yield made


def asked(
    server: ModelServer, path: str, body: Any = None, *, raw: bytes | None = None, headers: Mapping[str, str] = JSON
) -> tuple[int, Any]:
    """Status and content of the answer to a request; a body makes it a POST."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data, dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


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


def until(holds: Callable[[], Any]) -> None:
    while not holds():
        time.sleep(0.005)


def idle(server: ModelServer) -> bool:
    return not server.service.sampler.num_open and not server.service.num_requests
