"""A run that is killed, wherever it is, and resumed leaves the bits of one that never stopped; earlier runs resume."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.accidents import Accident
from tests.support.runs import Ended, command, metrics_of, require_same, tiny_recipe

KILLED = -9

SEVERAL_UPDATES: dict[str, Mapping[str, Any]] = {
    "algorithm": {"name": "grpo", "kl": {"coefficient": 0.05}},
    "reference": {"refresh_every": 2},  # step 4 reads that of step 2, which only the checkpoint of step 3 still holds
    "update": {"epochs_per_step": 2, "minibatches_per_epoch": 2, "schedule": "cosine", "warmup_steps": 3},
    "checkpoint": {"every_steps": 3},
    "run": {"num_steps": 5},
}
DYNAMIC_SAMPLING: dict[str, Mapping[str, Any]] = {"algorithm": {"name": "dapo", "resample": {"max_rounds": 2}}}

MOMENTS = [
    "os.rename checkpoints/.tmp-step-000000 1",  # no checkpoint yet
    "dice call 2",  # step 1, step 2
    "os.rename rollouts/.tmp-step-000002.parquet 1",
    "open checkpoints/.tmp-step-000003/.tmp-manifest.json 1",  # three steps are lost with it
    "open metrics.jsonl 6",  # one more step is not logged, whose completions are
    "os.rename rollouts/.tmp-step-000005.parquet 1",
    "open metrics.jsonl 2",  # while the journals are cut, before any step
    "os.rename .tmp-summary.json 1",  # all is done but the last file
]


def lives(place: Path, recipe: Path, moments: list[str]) -> list[Ended]:
    """Run a recipe, killed at the first moment; resume it, killed at the next ...; and once more to the end."""
    endings: list[Ended] = []
    for moment in moments:
        what = ("--resume", place / "run") if endings else (recipe,)
        endings.append(command("rl", *what, folder=place, accident=Accident(moment=moment)))
        assert endings[-1].code == KILLED, f"{moment} never came: {endings[-1]}"
    return [*endings, command("rl", "--resume", place / "run", folder=place)]


@pytest.fixture(scope="module")
def four_steps(folder: Path) -> Path:
    """A run that was never stopped."""
    assert command("rl", tiny_recipe(folder / "four", **DYNAMIC_SAMPLING), folder=folder / "four").code == 0
    return folder / "four" / "run"


def test_a_run_that_is_killed_eight_times_is_the_same_run(folder: Path) -> None:
    whole, place = folder / "whole", folder / "eight"
    assert command("rl", tiny_recipe(whole, **SEVERAL_UPDATES), folder=whole).code == 0
    *_, last = lives(place, tiny_recipe(place, **SEVERAL_UPDATES), MOMENTS)
    assert last.code == 0, last.err
    require_same(place / "run", whole / "run")


def test_dynamic_sampling_draws_the_same_refills_after_a_kill(folder: Path, four_steps: Path) -> None:
    assert sum(step.get("num_replaced_groups", 0) for step in metrics_of(four_steps)) > 0
    place = folder / "killed"
    _, last = lives(place, tiny_recipe(place, **DYNAMIC_SAMPLING), ["os.rename rollouts/.tmp-step-000004.parquet 1"])
    assert last.code == 0, last.err
    assert "Resumed after step 2." in last.out
    require_same(place / "run", four_steps)


def test_a_finished_run_can_go_on_for_longer_and_be_measured_again(folder: Path, four_steps: Path) -> None:
    place = folder / "longer"
    assert command("rl", tiny_recipe(place, **DYNAMIC_SAMPLING, run={"num_steps": 2}), folder=place).code == 0
    run = place / "run"
    with (run / "scores.jsonl").open("a") as journal:
        journal.write('{"step": 2, "dra')  # as a power cut leaves it
    ended = command("rl", "--resume", run, "--run.num-steps", "4", folder=place)
    assert ended.code == 0, ended.err
    require_same(run, four_steps)
    again = command("rl", "--resume", run, "--run.num-steps", "4", folder=place)
    assert again.code == 0, again.err
    assert "Resumed after step 4.  That was the last step" in again.out
    require_same(run, four_steps)


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts/step-000003.parquet", "model/model.safetensors"])
def test_the_comparison_of_runs_sees_one_digit(name: str, four_steps: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(four_steps, tmp_path / "run"))
    require_same(copy, four_steps)
    content = bytearray((copy / name).read_bytes())
    digit = content.rindex(b'"reward": ') + 10 if name == "metrics.jsonl" else -1
    content[digit] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(AssertionError, match=name.removesuffix(".jsonl")):
        require_same(copy, four_steps)


def test_a_run_that_was_killed_before_its_first_checkpoint_keeps_its_recipes_name(folder: Path) -> None:
    recipe = tiny_recipe(folder / "early", run={"num_steps": 1}, evaluation={"every_steps": 0, "samples": 1})
    lives(folder / "early", recipe, ["os.rename checkpoints/.tmp-step-000000 1"])
    assert json.loads((folder / "early" / "run" / "summary.json").read_text())["recipe"] == str(recipe)


EARLIER = Path(__file__).parents[1] / "data" / "earlier_run"
KEPT = ("reward", "loss", "grad_norm", "tokens/trained", "num_tokens", "entropy_estimate", "eval/accuracy_sampled")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EARLIER, tmp_path / "earlier"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_it_is_resumed_to_the_numbers_of_a_run_that_never_stopped(earlier: Path) -> None:
    before = metrics_of(earlier / "run")
    ended = command("rl", "--resume", "run", "--run.num-steps", 6, "--trust-code", folder=earlier)
    assert ended.code == 0, ended.err
    after = metrics_of(earlier / "run")
    assert after[:5] == before  # step 0 and the four that were taken
    for mine, kept in zip(after[5:], lines(earlier / "steps-5-and-6.jsonl"), strict=True):
        for name in (name for name in KEPT if name in kept):
            # float32 on another processor rounds otherwise; another draw or order of updates would be far off
            assert mine[name] == pytest.approx(kept[name], rel=1e-3), (mine["step"], name)


def test_its_model_is_measured(earlier: Path) -> None:
    flags = ("--task.held-out-size", 4, "--rollout.max-completion-tokens", 6, "--output", "measured.json")
    ended = command("eval", "run/model", *flags, folder=earlier)
    assert ended.code == 0, ended.err
    kept = json.loads((earlier / "run" / "summary.json").read_text())["after"]
    measured = json.loads((earlier / "measured.json").read_text())
    assert measured["num_problems"] == kept["num_problems"] == 4
    assert kept.keys() <= measured.keys()


def test_its_files_are_read(earlier: Path) -> None:
    table = pq.read_table(earlier / "run" / "rollouts" / "step-000004.parquet").to_pydict()
    assert len(table["tokens"]) == 16
    assert [line["step"] for line in lines(earlier / "run" / "metrics.jsonl")] == [0, 1, 2, 3, 4]
