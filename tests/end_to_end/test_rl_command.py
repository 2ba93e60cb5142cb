"""`posttrain rl` from end to end: plan, limits, one message for what keeps it from going on, and its run as a model."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import posttrain
from posttrain.cli import main
from posttrain.config.recipes import recorded_time
from posttrain.errors import UserError
from posttrain.options.training import EvaluationOptions, RunOptions
from posttrain.server.model_server import ModelServer
from posttrain.training.report import steps_text, time_lines
from tests.support.accidents import Accident
from tests.support.commands import called, printed, refusal
from tests.support.refusals import mentions, refused
from tests.support.runs import Ended, command, lines_of, metrics_of, save_tiny_model, tiny_recipe


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


def test_a_dry_run_shows_the_plan_and_writes_nothing(place: Path) -> None:
    recipe = tiny_recipe(place)
    before = sorted(place.iterdir())
    ended = called("rl", recipe, "--dry-run", "--rollout.group-size", "6")
    assert ended.code == 0
    mentions(
        ended.out, "one step   4 prompts × 6 completions", "steps      4, about ", "rewards    dice × 1", "4 held-out"
    )
    assert re.search(r"time       about (\S+) min with completions of 6 tokens, which is their limit", ended.out)
    assert re.search(r"\((\S+) for steps, (\S+) for evaluations\)", ended.out)
    assert [path for path in sorted(place.iterdir()) if path.name != "__pycache__"] == before


def lines_about_time(held_out: int = 0, **run: Any) -> list[str]:
    """Of four completions of 2 tokens in 6 s, and up to 10 steps of it, each with an evaluation if any is held out."""
    step = SimpleNamespace(groups=[0, 0], replaced=[], num_completion_tokens=8, num_sampled_tokens=8)
    evaluation = EvaluationOptions(every_steps=1)
    rollout = SimpleNamespace(group_size=2, rollouts_per_step=4, max_completion_tokens=8)
    session = SimpleNamespace(
        config=SimpleNamespace(run=RunOptions(num_steps=10, **run), evaluation=evaluation, rollout=rollout),
        questions=lambda: SimpleNamespace(prompts=[0] * held_out, probes={}),
        trained=SimpleNamespace(run=SimpleNamespace(recipe="countdown-tiny")),
    )
    return time_lines(session, step, {"rollout": 4.0, "grade": 1.0, "update": 1.0}, whole_step=True)  # type: ignore[arg-type]


def test_the_plan_says_how_long_it_takes_if_completions_grow_to_their_limit() -> None:
    """1 min, and 4 at 8 tokens."""
    lines = lines_about_time()
    assert lines[0] == "time       1.0 to 4.0 min: completions have 2 tokens and may grow to 8"
    assert lines[2].endswith(
        "the recipe's own run took 1.9 to 2.1 minutes for at most 50 steps on the machine named in its header"
    )


@pytest.mark.parametrize(
    ("limits", "steps", "time", "for_steps"),
    [
        # 2 steps of 8 tokens in 6 s each, or one of 32 in 24 s
        ({"token_limit": 16}, "16 tokens are sampled", "0.2 to 0.4 min: completions", "0.2"),
        ({"token_limit": 10**9}, "1,000,000,000 tokens are sampled", "1.0 to 4.0 min: completions", "1.0"),
        ({"time_limit_minutes": 2}, "2 min have passed", "1.0 to 2 min, and the evaluation after training", "1.0"),
        ({"time_limit_minutes": 0.5}, "0.5 min have passed", "0.5 min, and the evaluation after training", "0.5"),
        ({"time_limit_minutes": 5}, "5 min have passed", "1.0 to 4.0 min: completions", "1.0"),
    ],
)
def test_the_plan_counts_what_may_end_a_run_early(
    limits: dict[str, Any], steps: str, time: str, for_steps: str
) -> None:
    first, second, *_ = lines_about_time(**limits)
    assert first.startswith(f"time       {time}")
    assert f"(at least {for_steps} for steps," in second
    assert steps_text(RunOptions(num_steps=10, **limits)) == f"at most 10, until {steps}"


def test_the_parts_of_a_run_that_its_minutes_end_add_up() -> None:
    first, second, *_ = lines_about_time(held_out=100, time_limit_minutes=30)
    assert first == "time       30 min, and the evaluation after training"
    steps, evaluations = map(float, re.findall(r"\d+\.\d", second))
    assert (steps, evaluations) == (0.5, 29.5)  # half of 1.0 and of 58.3


def test_the_plan_of_a_bundled_recipe_says_how_long_its_own_run_took() -> None:
    for name in ("countdown-tiny", "recipes/countdown-tiny.yaml"):
        assert recorded_time(name) == "1.9 to 2.1 minutes for at most 50 steps"
    assert recorded_time("countdown-tiny-ppo") == "5 min 20 s for at most 30 steps"
    assert recorded_time("own-model") == recorded_time("") == recorded_time("mine.yaml") == ""


def test_without_held_out_rows_the_end_says_so_and_how_to_have_some(place: Path) -> None:
    recipe = tiny_recipe(place, task=rows_of(place, "one", "two", "three", "four"), run={"num_steps": 1})
    ended = called("rl", recipe)
    assert ended.code == 0, ended.err
    mentions(
        ended.out,
        "No rows were held out, so there are no results before and after training.",
        "steps without their gradients",
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


ROWS = "".join(json.dumps({"prompt": f"{i} and {i} make ", "answer": 2 * i}) + "\n" for i in range(40))
ON_ROWS: dict[str, Any] = {
    "task": {"name": "dataset", "held_out_share": 0.25},
    "run": {"num_steps": 1},
    "evaluation": {"every_steps": 0, "samples": 3},
    "checkpoint": {"every_steps": 0},
}


@pytest.fixture(scope="module")
def trained_on_rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on rows of a file, and what it printed at its end."""
    from contextlib import redirect_stdout
    from io import StringIO

    made = tmp_path_factory.mktemp("run-as-model")
    save_tiny_model(made / "model")
    (made / "rows.jsonl").write_text(ROWS)
    recipe = tiny_recipe(made / "at", **ON_ROWS)
    content = yaml.safe_load(recipe.read_text())
    content["task"] = {**ON_ROWS["task"], "path": str(made / "rows.jsonl")}
    recipe.write_text(yaml.safe_dump(content))
    printed = StringIO()
    with redirect_stdout(printed):
        assert main(["rl", str(recipe)]) == 0
    return made / "at" / "run", printed.getvalue()


def test_a_run_names_the_command_that_measures_it_by_its_own_recipe(
    trained_on_rows: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, printed = trained_on_rows
    lines = [line.strip() for line in printed.splitlines()]
    mentions(lines, f"measure it   posttrain eval {run}", f"ask it       posttrain chat {run}")
    mentions(lines, f"look at it   posttrain view {run}")
    assert main(["eval", str(run), "--output", str(tmp_path / "results.json")]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    after = json.loads((run / "summary.json").read_text())["after"]
    # The same held-out rows, samples and reward as the run's own last evaluation, so the same numbers.
    assert results == after
    assert "Countdown" not in capsys.readouterr().out


def test_recipes_that_are_named_take_the_place_of_the_run_s_own(
    trained_on_rows: tuple[Path, str], tmp_path: Path
) -> None:
    flags = ["--task.held-out-size", "5", "--rollout.max-completion-tokens", "3", "--evaluation.samples", "1"]
    output = tmp_path / "results.json"
    assert main(["eval", str(trained_on_rows[0]), "countdown-tiny", *flags, "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    assert results["num_problems"] == 5
    assert "accuracy_never_giving_up" in results  # a number of Countdown's


def test_a_run_is_asked_traced_and_served(trained_on_rows: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(trained_on_rows[0])
    asked = []
    for model in (run, f"{run}/model"):
        asked.append(printed("chat", model, "--prompt", "2 and 2 make", "--sampling.max-completion-tokens", "4"))
    assert asked[0] == asked[1] != ""
    out = printed("trace", run, "0")
    assert " make " in out.splitlines()[0]  # a held-out row of the run's
    assert "rewards of the group: " in out

    served: list[str] = []
    monkeypatch.setattr(ModelServer, "serve_until_signal", lambda self: served.append(self.service.name))
    assert main(["serve", f"{run}/", "--port", "0"]) == 0
    assert served == [run]


def test_a_run_that_saved_no_model_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {num_steps: 5}\n")
    says = refusal("chat", tmp_path)
    mentions(says, "saves its model at its end", f"--resume {tmp_path}")


def test_a_run_of_rows_from_python_names_the_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(tmp_path / "model")
    config = posttrain.load_recipe(
        model={"path": str(tmp_path / "model")},
        task={"name": "dataset", "held_out_share": 0.5},
        rollout={"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 3},
        run={"folder": str(tmp_path / "run"), "num_steps": 1, "threads": 1},
        evaluation={"every_steps": 0, "samples": 2},
    )
    rows = [json.loads(line) for line in ROWS.splitlines()]

    def short(completions: list[str], **columns: object) -> list[float]:
        return [1.0 / (1 + len(text)) for text in completions]

    run = posttrain.train(config, rows=rows, rewards=short)  # one function, as it is
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("measure it")]
    assert line == f"measure it   posttrain.evaluate({str(run.model_folder)!r}, config, rows=rows, rewards=rewards)"
    after = {n: tuple(each) if isinstance(each, list) else each for n, each in run.summary["after"].items()}
    assert posttrain.evaluate(run.model_folder, config, rows=rows, rewards=short) == after

    with pytest.raises(UserError) as refused:
        posttrain.train(config, rows=rows, rewards=[short])
    mentions(str(refused.value), "resume=True", "run.overwrite = true")
    assert "--" not in str(refused.value)
    mentions(refused.value.command, "--resume", "--run.overwrite")
    again = posttrain.load_recipe(str(run.folder / "config.yaml"), run={"overwrite": True})
    posttrain.train(again, rows=rows, rewards=[short])


def test_a_device_that_is_not_there_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("posttrain.models.loading.model_folder.load_policy", None)
    monkeypatch.setattr("posttrain.training.rl.train", None)
    for asked in (["chat", "bundled"], ["eval", "bundled"], ["serve", "bundled"], ["rl", "countdown-tiny"]):
        assert "torch sees no CUDA device" in refusal(*asked, "--model.device", "cuda")


def test_a_config_of_another_kind_is_refused_by_name() -> None:
    with refused("a SftConfig is given, but a Config is required"):
        posttrain.train(posttrain.load_recipe("countdown-base"))
    with refused("no such section in `posttrain sft`"):
        posttrain.load_recipe("countdown-tiny", kind=posttrain.SftConfig)
    assert posttrain.load_recipe("countdown-base", kind=posttrain.SftConfig) == posttrain.load_recipe("countdown-base")
