"""Inference servers for tests: the routes of vLLM or of ours over the in-process engine, which misbehave when told to.

`faults` has, for a route, what becomes of its next requests in place of an answer, such as plays of `faulty_endpoint`.
"""

import hashlib
import json
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation, Request, Sampled, StreamKey
from posttrain.generation.rl_protocol import (
    FINISH,
    GENERATE,
    INIT,
    IS_PAUSED,
    PAUSE,
    RELEASE,
    RESUME,
    START,
    UPDATE,
    WEIGHT_INFO,
)
from posttrain.models.context import num_embeddings
from posttrain.models.forward import Completions
from posttrain.models.policy import Policy
from posttrain.models.rendering import tokenizer_digest
from posttrain.options.rollout import SamplingParams
from tests.support.faulty_endpoint import Play, reply
from tests.support.tiny import twin

UPLOADS = "/weights/"


class Refused(Exception):
    """The status and the words of an answer that is an error."""

    def __init__(self, status: int, says: str) -> None:
        super().__init__(says)
        self.status = status


class FakeInference:
    """The state of a server."""

    def __init__(self, policy: Policy, *, ours: bool = True, folder: Path | None = None) -> None:
        self.policy = twin(policy)
        self.engine = InProcessEngine(self.policy)
        self.ours, self.folder = ours, folder
        self.lock = threading.Lock()
        self.version = "default"
        self.faults: defaultdict[str, deque[Play]] = defaultdict(deque)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        """Route and body of each request."""
        self.uploads: dict[str, bytes] = {}
        self.facts: dict[str, Any] = {}
        """What it says of itself that is not so."""
        self.settings: dict[str, dict[str, Any]] = {}
        """vLLM's settings that are not the usual ones."""
        self.hidden: set[str] = set()
        """Sections of vLLM's settings that it leaves out."""
        self.adds = SamplingParams()
        """What it adds to a request's sampling."""
        self.keeps_old_weights = self.raw_logprobs = self.started = self.paused = False
        self.url = ""

    def routes(self) -> list[str]:
        return [path for path, _ in self.asked]

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        answers = {
            WEIGHT_INFO: self.weight_info,
            GENERATE: lambda: self.generate(body),
            UPDATE: lambda: self.update(**body.get("update_info", {})),
            START: self.start,
            FINISH: lambda: self.finish(body["weight_version"]),
            PAUSE: lambda: self.pause(paused=True),
            RESUME: lambda: self.pause(paused=False),
            INIT: dict,
            **({RELEASE: dict} if self.ours else {}),
            **({} if self.ours else {"/server_info": self.server_info, "/tokenize": lambda: self.tokenize(body)}),
            IS_PAUSED: lambda: {"is_paused": self.paused},
        }
        if route not in answers:
            raise Refused(404, "Not Found")
        with self.lock:
            return answers[route]()

    def weight_info(self) -> dict[str, Any]:
        policy = self.policy
        facts = {
            "model_digest": "",
            "vocabulary": num_embeddings(policy.model),
            "tokenizer_digest": tokenizer_digest(policy.tokenizer),
            "max_positions": policy.max_positions,
            "dtype": "float32",
            "max_rows": 8,
            "transfer_folder": str(self.folder or ""),
        }
        return {"weight_version": self.version, **({"posttrain": facts | self.facts} if self.ours else {})}

    def server_info(self) -> dict[str, Any]:
        usual = {
            "model_config": {
                "max_model_len": self.policy.max_positions,
                "dtype": "torch.float32",
                "logprobs_mode": "processed_logprobs",
                "generation_config": "vllm",
                "override_generation_config": {},
            },
            "scheduler_config": {"max_num_seqs": 8},
            "cache_config": {"enable_prefix_caching": False},
            "weight_transfer_config": {"backend": "safetensors_file"},
        }
        return {
            "vllm_config": {
                name: {**usual[name], **self.settings.get(name, {})} for name in usual if name not in self.hidden
            }
        }

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": self.policy.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}

    def pause(self, *, paused: bool) -> dict[str, Any]:
        self.paused = paused
        return {}

    def start(self) -> dict[str, Any]:
        if self.started:
            raise Refused(500, "a weight update is already active")
        self.started = True
        return {}

    def update(self, sha256: str, path: str, adapter: object = None) -> dict[str, Any]:
        if not self.started:
            raise Refused(500, "start_weight_update must be called before update_weights")
        self.started = False
        if path and not Path(path).is_file():
            raise Refused(500, f"{path}: no such file on this machine")
        content = Path(path).read_bytes() if path else self.uploads[sha256]
        if hashlib.sha256(content).hexdigest() != sha256:
            raise Refused(500, "its SHA-256 is another one")
        tensors = load(content)
        if not self.keeps_old_weights and adapter is None:
            self.policy.model.load_state_dict(tensors, strict=False)
        self.started = True
        return {}

    def finish(self, version: str) -> dict[str, Any]:
        self.started, self.version = False, version
        self.engine.load(None, int(version))  # type: ignore[arg-type]
        return {}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        prefix, params, own = tuple(body["token_ids"]), body["sampling_params"], body["posttrain"]
        if max(prefix) >= num_embeddings(self.policy.model):
            raise Refused(400, f"Token id {max(prefix)} is out of vocabulary")
        own = own or {"seed": 0, "purpose": "none", "step": 0, "draw": 0, "sample": 0, "first_position": 0}
        asked = {name: params[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        greedy = asked["temperature"] == 0
        sampling = SamplingParams(greedy=True) if greedy else SamplingParams(**asked)
        if self.adds.cuts:
            sampling = replace(sampling, top_k=self.adds.top_k)
        request = Request(
            sampling=sampling,
            key=StreamKey(own["seed"], own["purpose"], own["step"]),
            keep_alternatives=params["logprobs"] or 0,
            suppressed=tuple(own.get("suppressed", ())),
        )
        continuations = [
            Continuation(
                prefix=prefix,
                draw=own["draw"],
                sample=own["sample"] + number,
                first_position=own["first_position"],
                limit=params["max_tokens"],
            )
            for number in range(params["n"])
        ]
        done: list[Sampled] = []
        with self.engine.open(request) as sampling_now:
            sampling_now.put(continuations)
            while len(done) < len(continuations):
                done += sampling_now.take(60)
        done.sort(key=lambda each: each.continuation.sample)
        scored = params.get("prompt_logprobs") is not None and not self.ours
        return {
            "request_id": f"generate-tokens-{body['request_id']}",
            "choices": [self.choice(number, each) for number, each in enumerate(done)],
            "prompt_logprobs": self.prompt_logprobs(prefix) if scored else None,
        }

    def choice(self, index: int, done: Sampled) -> dict[str, Any]:
        logprobs = done.logprobs
        if self.raw_logprobs:
            logprobs = tuple(self.scores(done.continuation.prefix, done.tokens))
        elif done.cut_logprobs is not None and not self.ours:
            logprobs = done.cut_logprobs
        content = [{"token_id": token, "logprob": value} for token, value in zip(done.tokens, logprobs, strict=True)]
        return {
            "index": index,
            "token_ids": done.tokens,
            "logprobs": {"content": content},
            "finish_reason": "stop" if done.finish.has_stop_token else "length",
            "weight_versions": [{"version": self.version, "start": 0, "end": len(done.tokens)}],
        }

    def prompt_logprobs(self, prefix: tuple[int, ...]) -> list[dict[str, Any] | None]:
        values = self.scores(prefix[:1], prefix[1:]) if prefix[1:] else []
        return [None, *({str(token): {"logprob": value}} for token, value in zip(prefix[1:], values, strict=True))]

    def scores(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            return self.policy.completion_logprobs(Completions([prompt], [tokens], [0])).double().tolist()


class Listening(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


@contextmanager
def fake_inference(policy: Policy, *, ours: bool = True, folder: Path | None = None) -> Iterator[FakeInference]:
    """A server on this machine, with a copy of the policy's model."""
    made = FakeInference(policy, ours=ours, folder=folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else a second write of an answer waits 40 ms for an acknowledgement

        def do_GET(self) -> None:
            self.handle_one()

        def do_POST(self) -> None:
            self.handle_one()

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            made.uploads[self.path.removeprefix(UPLOADS)] = content
            self.answer(UPLOADS, {})

        def handle_one(self) -> None:
            route = self.path.partition("?")[0]
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(content) if content else {}
            made.asked.append((route, body))
            self.answer(route, body)

        def answer(self, route: str, body: dict[str, Any]) -> None:
            try:
                if made.faults[route]:
                    made.faults[route].popleft()(body, self)
                elif route == UPLOADS:
                    reply(self, 200, "{}")
                else:
                    reply(self, 200, json.dumps(made.answer(route, body)))
            except Refused as refused:
                reply(self, refused.status, json.dumps({"error": {"message": str(refused)}}))
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = Listening(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
