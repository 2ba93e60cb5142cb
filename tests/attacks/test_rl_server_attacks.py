"""`posttrain serve --rl` among strangers: files that it must not read, bodies that it must not believe."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save

from posttrain.commands.serve import ServeSwitches, transfer_folder_of
from posttrain.generation import rl_protocol as wire
from tests.support.commands import refusal
from tests.support.rl_server import JSON, RlServer, asks, own_server, save_model, weights_of

PROMPT = (11, 7, 23)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RlServer]:
    folder = tmp_path_factory.mktemp("rl")
    with own_server(save_model(folder / "model"), folder / "weights") as made:
        yield made


@pytest.fixture(scope="module")
def content(server: RlServer) -> bytes:
    return save(weights_of(server.policy))


def told(server: RlServer, path: str, body: object) -> tuple[int, str]:
    """Status and message of a refusal."""
    status, said = server.post(path, body)
    return status, said["error"]["message"]


def outside(server: RlServer, content: bytes, how: str) -> str:
    """A path of whole and right weights that are outside the transfer folder, or of something that is no file."""
    elsewhere, inside = server.transfer.parent / "elsewhere.safetensors", server.transfer / how.replace(" ", "-")
    elsewhere.write_bytes(content)
    if how == "a link":
        inside.symlink_to(elsewhere)
    elif how == "a pipe":
        os.mkfifo(inside)
    elif how == "a folder":
        inside.mkdir()
    paths = {"its own path": str(elsewhere), "two points": "../elsewhere.safetensors", "a device": "/dev/zero"}
    return paths.get(how, str(inside))


@pytest.mark.parametrize("how", ["its own path", "two points", "a link", "a pipe", "a folder", "a device"])
def test_nothing_outside_the_transfer_folder_is_read(server: RlServer, content: bytes, how: str) -> None:
    server.begin()
    info = wire.UpdateInfo(path=outside(server, content, how), sha256=hashlib.sha256(content).hexdigest())
    status, said = told(server, wire.UPDATE, wire.UpdateRequest(update_info=info))
    assert status in (400, 403)
    assert "SHA-256" not in said  # nor is the digest of another file told
    server.post(wire.RESUME)


def test_a_sent_file_has_the_digest_that_names_it_and_is_not_too_large(server: RlServer, content: bytes) -> None:
    digest = hashlib.sha256(content).hexdigest()
    for name, sent, status in (
        (digest, content[:-1], 400),
        (digest, content + b" ", 400),
        ("f" * 64, content, 400),
        ("..%2f..%2felsewhere", content, 404),
        (digest.upper(), content, 400),
        (digest[:-1], content, 400),
        (digest, b"", 400),
    ):
        assert server.put(wire.UPLOAD.format(sha256=name), sent)[0] == status
    assert not list(server.transfer.glob(".tmp-*"))
    assert not list(server.transfer.glob("uploaded-*"))

    large = server.server.service.policy.model.num_parameters() * 8 + (17 << 20)
    assert server.put(wire.UPLOAD.format(sha256=digest), b" " * large)[0] == 413

    def chunks() -> Iterator[bytes]:  # without a length
        for _ in range(large >> 16):
            yield b" " * (1 << 16)

    with suppress(httpx.TransportError):  # the connection may be closed while it is still sending
        said = server.client.put(server.url + wire.UPLOAD.format(sha256=digest), content=chunks())
        assert said.status_code == 413
    assert not list(server.transfer.glob(".tmp-*"))


def test_only_the_last_sent_files_are_kept(server: RlServer, content: bytes) -> None:
    for number in range(4):
        sent = save({"a": next(iter(weights_of(server.policy).values()))[: number + 1].clone()})
        assert server.put(wire.UPLOAD.format(sha256=hashlib.sha256(sent).hexdigest()), sent)[0] == 200
    assert len(list(server.transfer.glob("uploaded-*"))) == 2


HOSTILE: dict[str, Any] = {
    "no JSON": b"{",
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "no prompt": {"token_ids": [], "sampling_params": {"max_tokens": 1}},
    "a negative id": {"token_ids": [-1], "sampling_params": {"max_tokens": 1}},
    "an id beyond the vocabulary": {"token_ids": [10**6], "sampling_params": {"max_tokens": 1}},
    "an id beyond 64 bits": {"token_ids": [2**70], "sampling_params": {"max_tokens": 1}},
    "a text for an id": {"token_ids": ["1"], "sampling_params": {"max_tokens": 1}},
    "no limit": {"token_ids": [1], "sampling_params": {}},
    "a limit beyond the context": {"token_ids": [1], "sampling_params": {"max_tokens": 10**9}},
    "a prompt as long as the context": {"token_ids": [1] * 512, "sampling_params": {"max_tokens": 1}},
    "a million completions": {"token_ids": [1], "sampling_params": {"max_tokens": 1, "n": 10**6}},
    "NaN": b'{"token_ids": [1], "sampling_params": {"max_tokens": 1, "temperature": NaN}}',
    "a temperature below 0": {"token_ids": [1], "sampling_params": {"max_tokens": 1, "temperature": -1}},
    "top-p above 1": {"token_ids": [1], "sampling_params": {"max_tokens": 1, "top_p": 2}},
    "a field that is not known": {"token_ids": [1], "sampling_params": {"max_tokens": 1, "presence_penalty": 1}},
    "another model": {"token_ids": [1], "sampling_params": {"max_tokens": 1}, "model": "gpt-4"},
    "other stop tokens": {"token_ids": [1], "sampling_params": {"max_tokens": 1, "stop_token_ids": [1]}},
    "without stop tokens": {"token_ids": [1], "sampling_params": {"max_tokens": 1, "ignore_eos": True}},
    "log-probs of the prompt": {"token_ids": [1], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}},
    "an empty stop text": {"token_ids": [1], "sampling_params": {"max_tokens": 1, "stop": [""]}},
    "a place before the first": {
        "token_ids": [1],
        "sampling_params": {"max_tokens": 1},
        "posttrain": {"seed": 0, "purpose": "", "step": 0, "draw": -1, "sample": 0},
    },
    "a suppressed token that is none": {
        "token_ids": [1],
        "sampling_params": {"max_tokens": 1},
        "posttrain": {"seed": 0, "purpose": "", "step": 0, "draw": 0, "sample": 0, "suppressed": [10**6]},
    },
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_request_is_refused_in_one_line_and_the_server_goes_on(server: RlServer, body: Any) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    said = server.client.post(server.url + wire.GENERATE, content=content, headers=JSON)
    assert said.status_code in (400, 404)
    message = said.json()["error"]["message"]
    assert message
    assert len(message) < 400
    assert "\n" not in message
    assert server.generate(PROMPT, max_tokens=1)


def test_a_seed_of_any_size_is_a_seed(server: RlServer) -> None:
    own = wire.OwnFields(seed=10**30, purpose="x" * 1000, step=-5, draw=2**31 - 1, sample=0)
    twice = [server.generate(PROMPT, own=own, max_tokens=3) for _ in range(2)]
    assert twice[0] == twice[1]


UPDATES: dict[str, tuple[str, Any]] = {
    "a digest that is none": (wire.UPDATE, {"update_info": {"path": "x", "sha256": "0"}}),
    "a path with a zero": (wire.UPDATE, {"update_info": {"path": "\0", "sha256": "0" * 64}}),
    "a path that is no text": (wire.UPDATE, {"update_info": {"path": 5, "sha256": "0" * 64}}),
    "a version that is no number": (wire.FINISH, {"weight_version": "seven"}),
    "a version of other digits": (wire.FINISH, {"weight_version": "٧"}),
    "a version beyond 64 bits": (wire.FINISH, {"weight_version": "9" * 30}),
    "no streams": (wire.RELEASE, {"streams": [{}]}),
}


@pytest.mark.parametrize(("path", "body"), UPDATES.values(), ids=UPDATES)
def test_a_hostile_update_is_refused(server: RlServer, path: str, body: Any) -> None:
    server.begin()
    status, message = told(server, path, body)
    assert status == 400
    assert "\n" not in message
    server.post(wire.RESUME)


def test_a_pickle_is_not_weights(server: RlServer) -> None:
    import pickle

    content = pickle.dumps({"model.norm.weight": [1.0]})
    (server.transfer / "evil.safetensors").write_bytes(content)
    server.begin()
    info = wire.UpdateInfo(path="evil.safetensors", sha256=hashlib.sha256(content).hexdigest())
    status, said = told(server, wire.UPDATE, wire.UpdateRequest(update_info=info))
    assert (status, "not a complete safetensors file" in said) == (400, True)
    server.post(wire.RESUME)


ALL = (
    *(("POST", path) for path in (wire.GENERATE, wire.PAUSE, wire.RESUME, wire.INIT, wire.START, wire.UPDATE)),
    *(("POST", path) for path in (wire.FINISH, wire.RELEASE)),
    *(("GET", path) for path in (wire.WEIGHT_INFO, wire.IS_PAUSED)),
    ("PUT", wire.UPLOAD.format(sha256="0" * 64)),
)


@pytest.mark.parametrize(("method", "path"), ALL)
def test_a_page_of_another_site_changes_nothing(server: RlServer, method: str, path: str) -> None:
    for foreign in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}):
        assert server.client.request(method, server.url + path, headers=foreign).status_code == 403
    assert not server.client.get(server.url + wire.IS_PAUSED).json()["is_paused"]


def test_with_a_token_every_route_but_health_needs_it(server: RlServer, tmp_path: Path) -> None:
    folder = Path(server.server.service.policy.model.name_or_path)
    with own_server(folder, tmp_path, token="s3cret") as made:
        for method, path in ALL:
            assert made.client.request(method, made.url + path).status_code == 401
        assert made.client.get(made.url + wire.HEALTH).status_code == 200
        assert made.post(wire.GENERATE, asks(PROMPT), Authorization="Bearer s3cret")[0] == 200


def test_a_model_that_is_not_served_for_training_has_none_of_the_routes(server: RlServer) -> None:
    from tests.support.served import asked, served

    with served() as made:
        for path in (wire.GENERATE, wire.START, wire.UPDATE):
            assert asked(made, path, {})[0] == 404


def test_the_command_serves_for_training_and_ends_cleanly_at_sigterm(server: RlServer) -> None:
    folder = server.server.service.policy.model.name_or_path
    command = [sys.executable, "-m", "posttrain", "serve", folder, "--rl", "--port", "0", "--max-rows", "7"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        port = process.stdout.readline().split("http://127.0.0.1:")[1].split("/")[0]
        info = wire.read(wire.WeightInfo, server.client.get(f"http://127.0.0.1:{port}{wire.WEIGHT_INFO}").content)
        assert (info.weight_version, info.posttrain.max_rows) == ("0", 7)
        assert Path(info.posttrain.transfer_folder).is_dir()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert not Path(info.posttrain.transfer_folder).exists()


def test_a_transfer_folder_is_only_for_training_and_is_not_removed(tmp_path: Path) -> None:
    assert "is only for --rl" in refusal("serve", "bundled", "--transfer-folder", "x")
    with transfer_folder_of(ServeSwitches(rl=True, transfer_folder=str(tmp_path))) as folder:
        assert folder == tmp_path
    assert tmp_path.is_dir()
    with transfer_folder_of(ServeSwitches()) as folder:
        assert folder is None


def test_nobody_may_replace_weights_without_a_token_from_elsewhere() -> None:
    assert "would let anybody replace the weights" in refusal(
        "serve", "bundled", "--rl", "--public", "--host", "0.0.0.0"
    )
    assert "lets other machines send requests" in refusal("serve", "bundled", "--rl", "--host", "0.0.0.0")
