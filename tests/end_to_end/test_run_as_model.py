"""A run's folder in place of a model's: what was trained is asked, served, traced and measured as the run did."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import posttrain
from posttrain.cli import main
from posttrain.commands.serving import completion_service
from posttrain.errors import UserError
from tests.support.commands import printed, refusal
from tests.support.refusals import mentions, refused
from tests.support.runs import save_tiny_model, tiny_recipe

ROWS = "".join(json.dumps({"prompt": f"{i} and {i} make ", "answer": 2 * i}) + "\n" for i in range(40))
SECTIONS: dict[str, Any] = {
    "task": {"name": "dataset", "held_out_share": 0.25},
    "run": {"num_steps": 1},
    "evaluation": {"every_steps": 0, "samples": 3},
    "checkpoint": {"every_steps": 0},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on rows of a file, and what it printed at its end."""
    from contextlib import redirect_stdout
    from io import StringIO

    made = tmp_path_factory.mktemp("run-as-model")
    save_tiny_model(made / "model")
    (made / "rows.jsonl").write_text(ROWS)
    recipe = tiny_recipe(made / "at", **SECTIONS)
    content = yaml.safe_load(recipe.read_text())
    content["task"] = {**SECTIONS["task"], "path": str(made / "rows.jsonl")}
    recipe.write_text(yaml.safe_dump(content))
    printed = StringIO()
    with redirect_stdout(printed):
        assert main(["rl", str(recipe)]) == 0
    return made / "at" / "run", printed.getvalue()


def test_a_run_names_the_command_that_measures_it_by_its_own_recipe(
    trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, printed = trained
    lines = [line.strip() for line in printed.splitlines()]
    mentions(lines, f"measure it   posttrain eval {run}", f"ask it       posttrain chat {run}")
    assert main(["eval", str(run), "--output", str(tmp_path / "results.json")]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    after = json.loads((run / "summary.json").read_text())["after"]
    # The same held-out rows, samples and reward as the run's own last evaluation, so the same numbers.
    assert results == after
    assert "Countdown" not in capsys.readouterr().out


def test_recipes_that_are_named_take_the_place_of_the_run_s_own(trained: tuple[Path, str], tmp_path: Path) -> None:
    flags = ["--task.held-out-size", "5", "--rollout.max-completion-tokens", "3", "--evaluation.samples", "1"]
    output = tmp_path / "results.json"
    assert main(["eval", str(trained[0]), "countdown-tiny", *flags, "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    assert results["num_problems"] == 5
    assert "accuracy_never_giving_up" in results  # a number of Countdown's


def test_a_run_is_asked_traced_and_served(trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(trained[0])
    asked = []
    for model in (run, f"{run}/model"):
        asked.append(printed("chat", model, "--prompt", "2 and 2 make", "--sampling.max-completion-tokens", "4"))
    assert asked[0] == asked[1] != ""
    out = printed("trace", run, "0")
    assert " make " in out.splitlines()[0]  # a held-out row of the run's
    assert "rewards of the group: " in out

    served: list[str] = []
    monkeypatch.setattr(completion_service.HttpServer, "serve_forever", lambda self: served.append(self.service.name))
    assert main(["serve", f"{run}/", "--port", "0"]) == 0
    assert served == [run]


def test_a_run_that_saved_no_model_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {num_steps: 5}\n")
    says = refusal("chat", tmp_path)
    mentions(says, "saves a model when it ends", f"--resume {tmp_path}")


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
    assert posttrain.evaluate(run.model_folder, config, rows=rows, rewards=short) == {
        name: tuple(value) if isinstance(value, list) else value for name, value in run.summary["after"].items()
    }

    with pytest.raises(UserError) as refused:
        posttrain.train(config, rows=rows, rewards=[short])
    assert "resume=True" in str(refused.value)
    assert "run.overwrite = true" in str(refused.value)
    assert "--" not in str(refused.value)
    mentions(refused.value.command, "--resume", "--run.overwrite")
    again = posttrain.load_recipe(str(run.folder / "config.yaml"), run={"overwrite": True})
    posttrain.train(again, rows=rows, rewards=[short])


def test_a_device_that_is_not_there_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("posttrain.models.loading.model_folder.load_policy", None)
    monkeypatch.setattr("posttrain.training.rl.train", None)
    for command in (["chat", "bundled"], ["eval", "bundled"], ["serve", "bundled"], ["rl", "countdown-tiny"]):
        assert "torch sees no CUDA device" in refusal(*command, "--model.device", "cuda")


def test_a_config_of_another_kind_is_refused_by_name() -> None:
    with refused("a SftConfig is given, and a Config is needed"):
        posttrain.train(posttrain.load_recipe("countdown-base"))
    with refused("no such section in `posttrain sft`"):
        posttrain.load_recipe("countdown-tiny", kind=posttrain.SftConfig)
    assert posttrain.load_recipe("countdown-base", kind=posttrain.SftConfig) == posttrain.load_recipe("countdown-base")
