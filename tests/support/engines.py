"""Engines for tests: ours, with what it samples changed, and one behind a server, as in docs/guides/your_own.md."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load

from posttrain.generation.engine import Sampling
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation, Request, Sampled, StreamKey
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import SamplingParams

Change = Callable[[Sampled], Sampled]


class ChangedSampling(Sampling):
    """A sampling whose completions are changed as they are taken."""

    def __init__(self, inner: Sampling, change: Callable[[list[Sampled]], list[Sampled]]) -> None:
        self.inner, self.change = inner, change

    def put(self, continuations: Sequence[Continuation]) -> None:
        self.inner.put(continuations)

    def take(self, seconds: float) -> list[Sampled]:
        return self.change(self.inner.take(seconds))

    def release(self, sampled: Iterable[Sampled]) -> None:
        self.inner.release(sampled)

    def close(self) -> None:
        self.inner.close()


class ChangedEngine(InProcessEngine):
    """Ours, with a change of every completion for which `where` holds."""

    def __init__(
        self, policy: Policy, change: Change, *, where: Callable[[Request, Sampled], bool] = lambda *_: True
    ) -> None:
        super().__init__(policy)
        self.change, self.where = change, where

    def open(self, request: Request) -> Sampling:  # type: ignore[override]
        def changed(done: list[Sampled]) -> list[Sampled]:
            return [self.change(each) if self.where(request, each) else each for each in done]

        return ChangedSampling(super().open(request), changed)


@dataclass
class EngineServer:
    """Where it listens, and which versions of the weights it was sent."""

    engine: InProcessEngine
    port: int = 0
    versions: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        with self.lock:
            return self.load(int(path.split("/")[-1]), body) if path.startswith("/load") else self.sample(body)

    def load(self, version: int, body: bytes) -> dict[str, Any]:
        missing, unknown = self.engine.policy.model.load_state_dict(load(body), strict=False)
        assert not unknown
        assert set(missing) <= {"lm_head.weight"}  # tied
        self.engine.load(None, version)  # type: ignore[arg-type]
        self.versions.append(version)
        return {}

    def sample(self, body: bytes) -> dict[str, Any]:
        asked = json.loads(body)
        one = asked["continuation"]
        request = Request(sampling=SamplingParams(**asked["sampling"]), key=StreamKey(**asked["key"]))
        with self.engine.open(request) as sampling:
            sampling.put([Continuation(**{**one, "prefix": tuple(one["prefix"])})])
            (done,) = sampling.take(60)
        said = {"tokens": done.tokens, "logprobs": done.logprobs, "finish": done.finish}
        return {**said, "version": self.engine.weights_version}


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # a client puts a step's completions at once


@contextmanager
def engine_server(folder: Path) -> Iterator[EngineServer]:
    """A server with the model of a folder."""
    made = EngineServer(InProcessEngine(load_policy(ModelOptions(path=str(folder)), inference=True)))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said = json.dumps(made.answer(self.path, self.rfile.read(int(self.headers["Content-Length"])))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = Server(("127.0.0.1", 0), Handler)
    made.port = server.server_port
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
