"""`posttrain rl` from end to end: its plan, its limits, and one clear message for whatever keeps it from going on."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.config.recipes import recorded_time
from posttrain.training.report import time_lines
from tests.support.accidents import Accident
from tests.support.commands import called
from tests.support.refusals import mentions
from tests.support.runs import Ended, command, lines_of, metrics_of, save_tiny_model, start, tiny_recipe


@pytest.fixture
def place(folder: Path, request: pytest.FixtureRequest) -> Path:
    """A folder for this test, beside the model."""
    made = folder / f"place-{len(list(folder.iterdir()))}"
    made.mkdir()
    return made


def require_one_message(ended: Ended, code: int, *says: str) -> None:
    assert ended.code == code, ended.err
    assert ended.err.count("posttrain: ") == 1
    assert ended.err.startswith("posttrain: ")
    assert "Traceback" not in ended.err + ended.out
    for part in says:
        assert part in ended.err


def rows_of(place: Path, *prompts: str) -> dict[str, Any]:
    """The task of a file with these prompts."""
    (place / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return {"name": "dataset", "path": str(place / "rows.jsonl"), "held_out_share": 0.0}


# Mistakes in what was given.


def test_a_model_without_chat_template_is_told_when_one_is_needed(place: Path) -> None:
    bare = save_tiny_model(place / "bare")
    (bare / "chat_template.jinja").unlink()
    recipe = tiny_recipe(place, task={"prompt_style": "r1"}, model={"path": str(bare)})
    says = ("prompt 'train/0' is a list of messages", "has no chat template", "set model.chat_template")
    require_one_message(called("rl", recipe), 2, *says)


PATIENT = """
import time
from pathlib import Path
from types import SimpleNamespace
from dice import dice

calls = []

def patient(completions, **columns):
    calls.append("call")
    while len(calls) > 1 and not Path(__file__).with_name("go").exists():  # in step 2
        time.sleep(0.01)
    return dice(completions)
"""


def test_a_run_is_not_overwritten_unless_told_and_has_one_writer(place: Path) -> None:
    (place / "patient.py").write_text(PATIENT)
    recipe = tiny_recipe(place, run={"num_steps": 2}, rewards=[{"path": f"{place}/patient.py:patient"}])
    running = start("rl", recipe, folder=place)
    running.wait_until((place / "run" / "config.yaml").exists)
    second = called("rl", recipe)
    require_one_message(second, 2, f"process {running.process.pid} is writing to this run folder", "--run.folder")
    (place / "go").touch()
    assert running.ended().code == 0
    says = ("already holds a run", "--resume", "--run.overwrite", "--run.folder")
    require_one_message(called("rl", recipe), 2, *says)
    before = (place / "run" / "summary.json").stat().st_mtime_ns
    assert called("rl", recipe, "--run.overwrite").code == 0
    assert (place / "run" / "summary.json").stat().st_mtime_ns > before
    assert "overwrite: false" in (place / "run" / "config.yaml").read_text()


# What can go wrong on the way.

FAULTS = {
    "raises": ("raise ZeroDivisionError('no divisor')", "raised ZeroDivisionError: no divisor"),
    "NaN": ("scores[5] = float('nan')\n    return scores", "prompt 'train/2097153', sample 1: returned nan "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reward_function_that_fails_stops_the_run_and_names_the_completion(fault: str, place: Path) -> None:
    body, says = FAULTS[fault]
    recipe = tiny_recipe(place, rewards=[{"path": f"{place}/bad.py:bad"}], checkpoint={"every_steps": 1})
    source = "calls = []\n\ndef bad(completions, **columns):\n    scores = [0.0] * len(completions)\n"
    # The second step fails; a call of fewer completions looks for the culprit.
    source += f"    calls.append(1)\n    if len(calls) < 2:\n        return scores\n    {body}\n"
    (place / "bad.py").write_text(source)
    ended = called("rl", recipe)
    require_one_message(ended, 1, "step 2: reward 'bad'", says, "last good checkpoint is", "step-000001")
    assert [step["step"] for step in metrics_of(place / "run")] == [0, 1]


def test_weights_that_are_not_numbers_are_told_before_anything_is_trained(place: Path) -> None:
    model = save_tiny_model(place / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    recipe = tiny_recipe(place, model={"path": str(model)})
    ended = called("rl", recipe)
    require_one_message(ended, 2, "its weights hold NaN or infinity")


def test_a_run_that_diverges_names_the_step_and_the_last_good_checkpoint(place: Path) -> None:
    recipe = tiny_recipe(place, update={"learning_rate": 1e30}, checkpoint={"every_steps": 1, "keep_last": 9})
    ended = called("rl", recipe)
    finished = metrics_of(place / "run")[-1]["step"]  # norms keep such weights at bay for a step or two
    assert finished < 4
    last_good = f"The last good checkpoint is {place}/run/checkpoints/step-{finished:06d}."
    require_one_message(ended, 1, f"step {finished + 1}: ", "learning_rate", last_good)


def test_a_disk_without_room_for_a_checkpoint_ends_in_one_message(place: Path) -> None:
    weights = (place.parent / "model" / "model.safetensors").stat().st_size
    recipe = tiny_recipe(place)
    ended = command("rl", recipe, folder=place, accident=Accident(largest_file=weights // 2))
    require_one_message(ended, 1, "checkpoints/step-000000: cannot be written", "File too large")
    assert list((place / "run" / "checkpoints").iterdir()) == []  # no piece of it stays
    # With room for the policy and none for the optimiser's two moments, step 2's checkpoint is the one that fails.
    room = Accident(largest_file=weights * 3 // 2)
    ended = command("rl", recipe, "--run.overwrite", folder=place, accident=room)
    require_one_message(ended, 1, "checkpoints/step-000002: cannot be written", "Kept: ", "step-000000", "--resume")
    assert command("rl", "--resume", place / "run", folder=place).code == 0


# Limits and plans.


def test_a_dry_run_shows_the_plan_and_writes_nothing(place: Path) -> None:
    recipe = tiny_recipe(place)
    before = sorted(place.iterdir())
    ended = called("rl", recipe, "--dry-run", "--rollout.group-size", "6")
    assert ended.code == 0
    mentions(
        ended.out, "one step   4 prompts × 6 completions", "steps      4, about ", "rewards    dice × 1", "4 held-out"
    )
    assert re.search(r"time       about (\S+) min with completions of 6 tokens, which is their limit", ended.out)
    assert re.search(r"\(the first is (\S+) for steps, (\S+) for evaluations\)", ended.out)
    assert [path for path in sorted(place.iterdir()) if path.name != "__pycache__"] == before


def test_the_plan_says_how_long_it_takes_if_completions_grow_to_their_limit() -> None:
    """Four completions of 2 tokens in 6 s, 10 steps of it, and nothing held out: 1 min, and 4 at 8 tokens."""
    step = SimpleNamespace(groups=[0, 0], replaced=[], num_completion_tokens=8)
    run, evaluation = SimpleNamespace(num_steps=10), SimpleNamespace(every_steps=0, samples=1, brief_problems=1)
    rollout = SimpleNamespace(group_size=2, rollouts_per_step=4, max_completion_tokens=8)
    session = SimpleNamespace(
        config=SimpleNamespace(run=run, evaluation=evaluation, rollout=rollout),
        questions=lambda: SimpleNamespace(prompts=[], probes={}),
        trained=SimpleNamespace(run=SimpleNamespace(recipe="countdown-tiny")),
    )
    lines = time_lines(session, step, {"rollout": 4.0, "grade": 1.0, "update": 1.0}, whole_step=True)  # type: ignore[arg-type]
    assert lines[0] == "time       about 1.0 min if completions stay at 2 tokens, up to 4.0 min if they grow to 8"
    assert lines[2].endswith(
        "the recipe's own run took 8 to 10 minutes for at most 60 steps, on the machine that its header names"
    )


def test_the_plan_of_a_bundled_recipe_says_how_long_its_own_run_took() -> None:
    for name in ("countdown-tiny", "recipes/countdown-tiny.yaml"):
        assert recorded_time(name) == "8 to 10 minutes for at most 60 steps"
    assert recorded_time("countdown-tiny-ppo") == "5 min 20 s for at most 30 steps"
    assert recorded_time("own-model") == recorded_time("") == recorded_time("mine.yaml") == ""


def test_without_held_out_rows_the_end_says_so_and_how_to_have_some(place: Path) -> None:
    recipe = tiny_recipe(place, task=rows_of(place, "one", "two", "three", "four"), run={"num_steps": 1})
    ended = called("rl", recipe)
    assert ended.code == 0, ended.err
    mentions(
        ended.out, "No rows were held out, so nothing was measured before and after.", "steps without their gradients"
    )
    assert "measure it" not in ended.out
    evaluated = called("eval", str(place / "run"))
    assert (evaluated.code, evaluated.out) == (2, "")
    assert "task.held_out_share" in evaluated.err
    assert not re.search(r"^held-out +before", ended.out, flags=re.MULTILINE)
    assert "No rows were held out" in (place / "run" / "model" / "README.md").read_text()
    assert len(lines_of(place / "run")) == 2  # step 0 and the first; nothing was measured after it
    assert json.loads((place / "run" / "summary.json").read_text())["after"]["reward"] is None


def test_the_bundled_recipe_for_a_model_of_ones_own_trains_one(place: Path, monkeypatch) -> None:
    monkeypatch.chdir(place)
    tiny_recipe(place)  # for dice.py
    rows = rows_of(place, *(f"What is {i} + {i}?" for i in range(30)))["path"]
    small = ("--rollout.max-completion-tokens", "6", "--run.num-steps", "1", "--run.threads", "1")
    data = ("--task.path", rows, "--rewards", "dice.py:dice", "--model.path", place.parent / "model")
    ended = called("rl", "own-model", *data, *small)
    assert ended.code == 0, ended.err
    summary = json.loads(Path("runs/own-model/summary.json").read_text())
    assert (summary["recipe"], summary["steps"]) == ("own-model", 1)
    assert summary["after"]["num_problems"] > 0
    (step,) = metrics_of(Path("runs/own-model"))[1:]
    assert step["num_groups"] == 8
    assert "kl" not in step


LIMITS: dict[str, tuple[Mapping[str, Any], list[int]]] = {
    "a time limit": ({"run": {"time_limit_minutes": 1e-6, "num_steps": 50}}, [0]),
    # 16 completions of at least a token each step.
    "a number of tokens": (
        {"run": {"token_limit": 17, "num_steps": 50}, "rollout": {"max_completion_tokens": 1}},
        [0, 1, 2],
    ),
    # A random model never solves Countdown: the first evaluation is the best, and the second and third are no better.
    "patience": (
        {"run": {"early_stop_evaluations": 2, "num_steps": 50}, "evaluation": {"every_steps": 1}},
        [0, 1, 2, 3],
    ),
    "no steps": ({"run": {"num_steps": 0}}, [0]),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_run_that_ends_early_is_measured_and_saved_like_any_other(limit: str, place: Path) -> None:
    sections, steps = LIMITS[limit]
    ended = called("rl", tiny_recipe(place, **sections))
    assert ended.code == 0, ended.err
    assert [step["step"] for step in metrics_of(place / "run")] == steps
    assert json.loads((place / "run" / "summary.json").read_text())["after"]["num_problems"] == 4
    assert f"for {steps[-1]} steps of" in (place / "run" / "model" / "README.md").read_text()
    assert max((place / "run" / "checkpoints").iterdir()).name == f"step-{steps[-1]:06d}"


def test_a_run_out_of_patience_takes_no_further_step_when_resumed(place: Path) -> None:
    sections, steps = LIMITS["patience"]
    recipe = tiny_recipe(place, **sections)
    assert called("rl", recipe).code == 0
    assert called("rl", "--resume", place / "run").code == 0
    assert [step["step"] for step in metrics_of(place / "run")] == steps
