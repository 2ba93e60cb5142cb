"""Models of the hub: from the local cache, or by one attempt at a download that fails within seconds, and says why."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from posttrain.config import load_recipe
from posttrain.errors import UserError
from posttrain.models.loading import folder_kinds as hub_module
from posttrain.models.loading.folder_kinds import cached_folder
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import ModelOptions
from posttrain.runs.named_inputs import named_files
from tests.support.model_folders import COMMIT, LocalHub, cached, serving_hub, small_folder
from tests.support.refusals import refused

NAME = "acme/counter"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no hub, and a folder without models to work in."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the port that nobody answers at
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "cache"


@pytest.fixture
def local_hub(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    refusals = {"acme/private": 401, "acme/gated": 403, "acme/broken": 503}
    with serving_hub(LocalHub(models={NAME: source}, refusals=refusals)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def silent_socket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


def refusal(path: str, **options: str) -> str:
    with pytest.raises(UserError) as told:
        load_policy(ModelOptions(path=path, **options))
    return str(told.value)


@pytest.mark.parametrize("given", [NAME, f"{NAME}@main", f"{NAME}@{COMMIT}"])
def test_a_model_in_the_cache_is_loaded_without_asking_the_hub(given: str, cache: Path, source: Path) -> None:
    cached(cache, NAME, source)
    assert load_policy(ModelOptions(path=given)).model.num_parameters() > 0


def test_the_revision_that_is_asked_for_is_the_one_that_is_loaded(cache: Path, source: Path) -> None:
    cached(cache, NAME, source)
    other = cached(cache, NAME, source, commit="f" * 40, branch="v2")
    assert cached_folder(NAME, "v2") == other != cached_folder(NAME)
    assert load_policy(ModelOptions(path=NAME, revision="v2")).model.name_or_path == str(other)
    assert "not in the cache" in refusal(f"{NAME}@v3")


def test_where_the_hub_refuses_the_connection_one_message_names_the_remedy() -> None:
    start = time.monotonic()
    said = refusal(NAME)
    assert time.monotonic() - start < 5
    assert said.startswith(f"model.path = {NAME}: not in the cache of this machine, and http://127.0.0.1:9 cannot be")
    for remedy in (f"`hf download {NAME}`", "HF_HOME", "model.path", str(constants.HF_HUB_CACHE)):
        assert remedy in said


def test_a_hub_that_never_answers_is_waited_for_once(silent_socket: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "SECONDS", 0.5)
    start = time.monotonic()
    assert "cannot be reached" in refusal(NAME)
    assert 0.4 < time.monotonic() - start < 1.0  # once, and neither at once nor again


def test_offline_means_that_nobody_is_asked(local_hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal(NAME)
    assert local_hub.asked == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("acme/private", "does not let you in (401)…private…HF_TOKEN"),
        ("acme/gated", "does not let you in (403)…Accept its terms at http://127.0.0.1:…/acme/gated"),
        ("acme/nothing", "neither a folder here nor a model of the hub …404"),
        ("acme/broken", "answers 503.  Try again later…hf download"),
        (f"{NAME}@v9", "no revision v9"),
    ],
)
def test_what_the_hub_refuses_is_told_apart(name: str, says: str, local_hub: LocalHub) -> None:
    with refused(says):
        load_policy(ModelOptions(path=name))
    assert len(local_hub.asked) == 1


def test_a_model_is_downloaded_once_from_the_endpoint_that_the_environment_names(
    local_hub: LocalHub, source: Path, cache: Path, tmp_path: Path
) -> None:
    (source / "surprise.py").write_text("raise SystemExit")
    (source / "flax_model.msgpack").write_text("large")
    # A process of its own: huggingface_hub reads the environment when it is imported.
    program = f"from posttrain.models.loading.folder_kinds import hub_folder; print(hub_folder({NAME!r}))"
    environment = os.environ | {"HF_ENDPOINT": local_hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}

    def asked() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)

    done = asked()
    assert f"downloading {NAME} to {cache}" in done.stderr
    folder = Path(done.stdout.strip())
    assert folder == cached_folder(NAME)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert not {"surprise.py", "flax_model.msgpack"} & {file.name for file in folder.iterdir()}
    assert load_policy(ModelOptions(path=NAME)).model.name_or_path == str(folder)
    requests = len(local_hub.asked)
    assert asked().stdout == done.stdout
    assert len(local_hub.asked) == requests


def test_a_download_that_broke_off_is_no_model(cache: Path, source: Path) -> None:
    (cached(cache, NAME, source) / "model.safetensors").unlink()
    assert cached_folder(NAME) is None


@pytest.mark.parametrize(
    ("path", "make", "name"),
    [
        ("acme/counter", lambda: None, "acme/counter"),
        ("acme/counter@a/b", lambda: None, "acme/counter"),
        ("runs/model", lambda: Path("runs").mkdir(), None),  # a folder that was mistyped, and no model of `runs`
        ("acme/counter", lambda: Path("acme/counter").mkdir(parents=True), None),
        ("./acme", lambda: None, None),
        ("/acme/counter", lambda: None, None),
        ("counter", lambda: None, None),
        ("a/b/c", lambda: None, None),
    ],
)
def test_a_folder_goes_before_a_model_of_the_hub(path: str, make: Callable[[], None], name: str | None) -> None:
    make()
    assert ModelOptions(path=path).hub_name == name


def test_a_mistyped_folder_is_not_looked_for_elsewhere() -> None:
    Path("runs").mkdir()
    assert refusal("runs/modle").startswith("model.path = runs/modle: no such folder.")


def test_a_revision_of_a_folder_is_refused() -> None:
    with refused("revision = v2…only for hub models"):
        ModelOptions(revision="v2")


def test_a_run_notes_which_files_of_the_hub_it_was_made_of(cache: Path, source: Path) -> None:
    config = load_recipe(model={"path": NAME})
    with refused("model.path = acme/counter: not in the cache"):
        named_files(config)  # what cannot be read has no digest, and is never taken as unchanged
    snapshot = cached(cache, NAME, source)
    of_the_folder = named_files(load_recipe(model={"path": str(snapshot)}))["model.path"].digest
    assert named_files(config)["model.path"].digest == of_the_folder != ""
