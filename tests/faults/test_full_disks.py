"""A disk that is full at each kind of write of a run: one message, and a resume has the undisturbed bits."""

import errno
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from posttrain.runs.files import saved_steps
from tests.faults.phases import STEP_2, phase_recipe
from tests.faults.servers import Server
from tests.support.accidents import Accident
from tests.support.commands import called
from tests.support.full_disk import FullDisk, full_disk
from tests.support.rank_runs import by_ranks, ended_ranks, start_ranks
from tests.support.runs import Ended, require_same, save_tiny_model, tiny_recipe

GAME = """
from posttrain import Reply

class Game:
    reproducible = False  # so that its replies are kept

    def reset(self, row, seed):
        self.heard = []
        return f"{seed % 10}:"

    def reply(self, said):
        self.heard.append(said)
        return Reply(str(len(said)), reward=0.5, done=len(self.heard) == 2)

    stop_texts = tuple("aeiou 0123456789")
"""
SHORT: dict[str, Mapping[str, Any]] = {
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 6},
    "task": {"name": "countdown", "held_out_size": 2},
    "evaluation": {"every_steps": 1, "samples": 1, "brief_problems": 1},
    "checkpoint": {"every_steps": 1, "keep_last": 1},
    "run": {"num_steps": 2, "keep_token_columns": True},
}


def with_adapter_and_replies(folder: Path) -> Path:
    """Exports as an adapter and merged, replies that are kept, and a reference with the adapter off."""
    folder.mkdir()
    (folder / "game.py").write_text(GAME)
    model = {"path": str(folder.parent / "model"), "adapter": {"rank": 2, "save": "both"}}
    environment = {"path": f"{folder}/game.py:Game"}
    kl = {"name": "grpo", "kl": {"coefficient": 0.1}}
    return tiny_recipe(folder, **SHORT, model=model, environment=environment, algorithm=kl)


def with_critic(folder: Path) -> Path:
    return tiny_recipe(folder, **SHORT, algorithm={"name": "ppo"})


RECIPES = {"adapter and replies": with_adapter_and_replies, "critic": with_critic}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full-disks")
    save_tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def writes(place: Path) -> Callable[[str], Sequence[tuple[str, str]]]:
    """What an undisturbed run of a recipe writes, in order."""

    @cache
    def of(name: str) -> Sequence[tuple[str, str]]:
        folder = place / f"whole {name}"
        with full_disk(FullDisk(folder / "run")) as disk:
            ended = called("rl", RECIPES[name](folder))
        assert ended.code == 0, ended.err
        return disk.writes

    return of


def require_one_message(ended: Ended, run: Path) -> None:
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert len(re.findall("cannot be written", ended.err)) == 1, ended.err
    assert str(run) in ended.err
    assert "No space left on device" in ended.err
    if saved := saved_steps(run / "checkpoints"):
        assert saved[max(saved)].name in ended.err


def disturbed(place: Path, name: str, number: int, *, short: bool) -> None:
    """A run whose n-th write fails, or is short, and its resume."""
    recipe = RECIPES[name](place / f"{name} {number} {short}")
    disturbed_run(recipe, place / f"whole {name}" / "run", number, short=short)


def disturbed_run(recipe: Path, whole: Path, number: int, *, short: bool) -> None:
    run = recipe.parent / "run"
    with full_disk(FullDisk(run, number, short=short)):
        ended = called("rl", recipe)
    assert short or ended.code, "nobody noticed"
    if ended.code:
        assert not short
        require_one_message(ended, run)
        ended = called("rl", *(["--resume", run] if (run / "config.yaml").exists() else [recipe]))
        assert ended.code == 0, ended.err
    require_same(run, whole)


def kinds_of(writes: Sequence[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """The first write of each kind: what is done, and to which file of a step."""
    found: dict[tuple[str, str], int] = {}
    for number, (what, path) in enumerate(writes):
        found.setdefault((what, re.sub(r"\d{6}", "N", path)), number)
    return found


@pytest.mark.scale
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("short", [False, True], ids=["full", "short"])
def test_a_full_disk_at_each_kind_of_write_ends_in_one_message_and_a_resume_has_the_same_bits(
    place: Path, writes: Callable[[str], Sequence[tuple[str, str]]], name: str, short: bool
) -> None:
    for (what, _), number in kinds_of(writes(name)).items():
        if what == "write" or not short:
            disturbed(place, name, number, short=short)


def test_a_full_disk_at_some_writes(place: Path, writes: Callable[[str], Sequence[tuple[str, str]]]) -> None:
    """The tokenizer's file is written by other code, which raises errors of its own."""
    numbers = kinds_of(writes("critic"))
    for kind in (("write", "metrics.jsonl"), ("write", ".tmp-tokenizer/tokenizer.json")):
        disturbed(place, "critic", numbers[kind], short=False)


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    started = Server.started(place / "model", place / "server")
    yield started
    started.kill()


def over(server: Server, folder: Path) -> Path:
    urls = [f"http://127.0.0.1:{server.port}"]
    return tiny_recipe(folder, **SHORT, engine={"name": "http", "urls": urls})


@pytest.mark.scale
def test_a_full_disk_at_weights_for_servers_ends_in_one_message(place: Path, server: Server) -> None:
    whole = place / "whole over http"
    with full_disk(FullDisk(whole / "run")) as disk:
        ended = called("rl", over(server, whole))
    assert ended.code == 0, ended.err
    numbers = [number for (_, path), number in kinds_of(disk.writes).items() if path.startswith("weights")]
    assert len(numbers) > 4
    for number in numbers:
        disturbed_run(over(server, place / f"http {number}"), whole / "run", number, short=False)


SHARDS = "open step-000002/shard-0000{}-model-00001-of-00001.safetensors {}"
MOMENTS = {
    "a shard of rank 0": (0, SHARDS.format(1, 1)),
    "a shard of rank 1": (1, SHARDS.format(2, 1)),
    "the sync of a shard of rank 1": (1, SHARDS.format(2, 2)),
    "the manifest": (0, STEP_2["checkpoint"]),
    "the rename": (0, "os.rename checkpoints/.tmp-step-000002 1"),
}


@pytest.fixture(scope="module")
def by_two(place: Path) -> Path:
    ended = by_ranks("rl", phase_recipe(place / "two ranks"), folder=place / "two ranks")
    assert ended.code == 0, ended.err
    return place / "two ranks" / "run"


@pytest.mark.scale
@pytest.mark.parametrize("what", MOMENTS)
def test_a_full_disk_of_one_rank_ends_all_in_one_message(place: Path, by_two: Path, what: str) -> None:
    folder, (rank, moment) = place / what, MOMENTS[what]
    accidents = {rank: Accident(moment=moment, error=errno.ENOSPC)}
    first, other = ended_ranks(start_ranks("rl", phase_recipe(folder), folder=folder, accidents=accidents))
    require_one_message(first, folder / "run")
    assert (other.code, other.err) == (1, "")
    resumed = by_ranks("rl", "--resume", folder / "run", folder=folder)
    assert resumed.code == 0, resumed.err
    require_same(folder / "run", by_two)
