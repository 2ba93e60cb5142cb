"""A server of the routes for training, ours in this process or another by its address, as a trainer sees it."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save
from torch import Tensor

from posttrain.generation import rl_protocol as wire
from posttrain.models.forward import Completions
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of
from posttrain.options.model import ModelOptions, NewModelOptions
from posttrain.server.model_server import ModelServer
from posttrain.server.openai_routes import Service

ADDRESS, MODEL, TRANSFER = "POSTTRAIN_RL_SERVER", "POSTTRAIN_RL_MODEL", "POSTTRAIN_RL_TRANSFER"
"""Variables that name another server, its model's folder, and the folder that it reads weights from."""
PROCESSES = "POSTTRAIN_RL_PROCESSES"
"""The same for two servers that may be killed: the port and the process group of each, as `8000:4711 8001:4712`."""
SHAPE = NewModelOptions(hidden_size=128, mlp_size=32, num_layers=2, num_heads=2, num_kv_heads=1, max_positions=512)
"""vLLM's attention on a CPU knows a head width of 64."""
NATS = 3e-5
"""How far log-probs of the same weights may be apart in float32."""


def save_model(folder: Path, *, seed: int = 0) -> Path:
    """The random model that these tests serve; its weights are large enough that it prefers some tokens."""
    tokenizer = new_tokenizer()
    model = new_model(SHAPE, tokenizer, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class RlServer:
    """A server with its model, as a trainer sees it."""

    url: str
    policy: Policy
    """The weights that it was started with, as the trainer has them."""
    transfer: Path
    server: ModelServer | None = None
    """None where it is not in this process."""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    def post(self, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        """Status and content of an answer; a body is a record of the wire, or JSON."""
        content = b"" if body is None else json.dumps(body).encode() if isinstance(body, dict) else wire.written(body)
        given = {"Content-Type": "application/json", "Connection": "close", **headers}  # vLLM ends it after a 500
        said = self.client.post(self.url + path, content=content, headers=given)
        return said.status_code, json.loads(said.content) if said.content else None

    def put(self, path: str, content: bytes) -> tuple[int, Any]:
        said = self.client.put(self.url + path, content=content)
        return said.status_code, said.json()

    def info(self) -> wire.WeightInfo:
        return wire.read(wire.WeightInfo, self.client.get(self.url + wire.WEIGHT_INFO).content)

    def generate(self, tokens: tuple[int, ...], *, own: wire.OwnFields | None = None, **fields: Any) -> Any:
        """The choices of an answer."""
        request = asks(tokens, own=own, **fields)
        said = self.client.post(self.url + wire.GENERATE, content=wire.written(request), headers=JSON)
        assert said.status_code == 200, said.text
        return wire.read(wire.GenerateResponse, said.content).choices

    def write(self, tensors: Mapping[str, Tensor], name: str = "weights") -> wire.UpdateInfo:
        """A file of weights in the transfer folder."""
        content = save({key: each.contiguous() for key, each in tensors.items()}, metadata={"format": "pt"})
        path = self.transfer / f"{name}.safetensors"
        path.write_bytes(content)
        return wire.UpdateInfo(path=str(path), sha256=hashlib.sha256(content).hexdigest())

    def take(self, owner: str, seconds: float, *, renews: bool = False) -> tuple[int, str]:
        """Take the server for a run, or give it back after 0 seconds; status and content."""
        info = wire.OwnerInfo(owner=owner, lease_seconds=seconds, renews=renews)
        status, said = self.post(wire.INIT, wire.InitRequest(init_info=info))
        return status, str(said)

    def begin(self) -> None:
        for path, body in (
            (f"{wire.PAUSE}?mode=keep", None),
            (wire.INIT, wire.InitRequest(init_info=wire.OwnerInfo())),
            (wire.START, None),
        ):
            status, said = self.post(path, body)
            assert status == 200, said

    def update(self, info: wire.UpdateInfo, version: int) -> None:
        """A whole update."""
        self.begin()
        for path, body in (
            (wire.UPDATE, wire.UpdateRequest(update_info=info)),
            (wire.FINISH, wire.FinishRequest(weight_version=str(version))),
            (wire.RESUME, None),
        ):
            status, said = self.post(path, body)
            assert status == 200, said


JSON = {"Content-Type": "application/json"}


def asks(tokens: tuple[int, ...], *, own: wire.OwnFields | None = None, **fields: Any) -> wire.GenerateRequest:
    params = wire.SamplingFields(**{"max_tokens": 12, "logprobs": 0, **fields})
    return wire.GenerateRequest(token_ids=tokens, sampling_params=params, posttrain=own)


def moved(policy: Policy, seed: int) -> Policy:
    """A copy with other weights, which move log-probs by tenths of a nat."""
    made, generator = policy.copy(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return made


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return ExportedWeights(policy).merged()


@torch.no_grad()
def logprobs(policy: Policy, prefix: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
    """The trainer's log-probs of a completion."""
    return policy.completion_logprobs(Completions([prefix], [tokens], [0]), temperature=1.0).tolist()


@contextmanager
def own_server(folder: Path, transfer: Path, *, token: str = "") -> Iterator[RlServer]:
    """Ours, in a thread of this process."""
    policy = load_policy(ModelOptions(path=str(folder)))
    trainer = policy.copy()
    service = Service(policy, renderer_of(policy), name="tiny", seconds=60)
    with ModelServer(service, token=token, transfer_folder=transfer).in_thread() as made:
        yield RlServer(f"http://127.0.0.1:{made.port}", trainer, transfer, made)


@contextmanager
def any_server(folder: Path) -> Iterator[RlServer]:
    """The server that the environment names, or ours."""
    if ADDRESS not in os.environ:
        with own_server(save_model(folder / "model"), folder / "weights") as made:
            yield made
        return
    policy = load_policy(ModelOptions(path=os.environ[MODEL]))
    yield RlServer(os.environ[ADDRESS].rstrip("/"), policy, Path(os.environ[TRANSFER]))
