"""A run told to trackers: TensorBoard's own files are read back, of the others the calls; a resume goes on."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import posttrain
from posttrain.runs import tracker
from tests.support.dice import dice

ROWS = [{"prompt": f"Throw {n}. "} for n in range(12)]
STAND_INS = Path(__file__).parents[1] / "support" / "stand_ins"


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[tuple[str, Any]]]]:
    """Stand-ins for the libraries, by the list of calls that each keeps."""
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setattr(tracker, "LOCAL_STORE", ())
    names = ("wandb", "trackio", "mlflow", "mlflow.entities", "mlflow.tracking")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow.tracking"}
    yield {name: importlib.import_module(module).CALLS for name, module in modules.items()}
    for name in names:
        sys.modules.pop(name, None)


def config(model: Path, folder: Path, report_to: list[str], num_steps: int, **options: Any) -> posttrain.Config:
    return posttrain.load_recipe(
        model={"path": str(model)},
        task={"name": "dataset", "held_out_share": 0.2},
        rollout={"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 3},
        update={"learning_rate": 1e-2},
        evaluation={"every_steps": 2, "samples": 1, "brief_problems": 2},
        checkpoint={"every_steps": 1},
        tracker=options,
        run={"folder": str(folder), "num_steps": num_steps, "threads": 1, "report_to": report_to},
    )


def lines(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """What metrics.jsonl has, without null."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (record.pop("step"), {name: value for name, value in record.items() if value is not None}) for record in records
    ]


def test_tensorboards_files_hold_the_metrics_and_a_step_taken_again_once(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    made = config(model, folder, ["tensorboard"], 3, completions=1)
    posttrain.train(made, rows=ROWS, rewards=[dice])
    first = lines(folder)
    posttrain.train(made, rows=ROWS, rewards=[dice], resume=True, from_step=2)

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    for name in ("reward", "step_time", "loss"):
        told = [(event.step, event.value) for event in events.Scalars(name)]
        assert told == [(step, pytest.approx(line[name], rel=1e-6)) for step, line in lines(folder) if name in line]
    names = {name for _, line in first for name in line}
    assert names == set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("eval/accuracy_sampled")] == [0, 2, 3]
    texts = {name.removesuffix("/text_summary") for name in events.Tags()["tensors"]}
    assert texts == {"config", "summary", "completions/0"}
    assert {event.step for event in events.Tensors("completions/0/text_summary")} == {1, 2, 3}
    assert b"Throw " in events.Tensors("completions/0/text_summary")[0].tensor_proto.string_val[0]
    assert json.loads((folder / "trackers.json").read_text()) == {"tensorboard": "tensorboard"}


def test_the_others_are_told_the_same_and_a_resumed_run_goes_on_in_theirs(
    model: Path, tmp_path: Path, libraries: dict[str, list[tuple[str, Any]]]
) -> None:
    names, folder = ["wandb", "mlflow", "trackio"], tmp_path / "run"
    told = {"project": "known", "name": "first", "offline": True, "completions": 3}
    posttrain.train(config(model, folder, names, 1, **told), rows=ROWS, rewards=[dice])
    wandb, mlflow, trackio = (dict(reversed(libraries[name])) for name in names)  # the first call of each kind
    begun, first = wandb["init"], lines(folder)
    assert (begun["project"], begun["name"], begun["mode"], begun["id"]) == ("known", "first", "offline", None)
    assert begun["config"]["rollout"]["group_size"] == 2
    assert begun["dir"] == str(folder)
    assert mlflow["uri"] == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert mlflow["create"] == ("e1", "first")
    assert trackio["init"]["project"] == "known"
    assert trackio["init"]["name"].startswith("first-")
    assert trackio["init"]["config"]["rollout.group_size"] == 2
    assert numbers_of(libraries) == dict.fromkeys(names, first)
    shown = [numbers["completions"] for kind, numbers in libraries["wandb"] if "completions" in numbers]
    assert [len(table.data) for table in shown] == [3]
    assert shown[0].columns == ["step", "prompt", "completion", "reward", "advantage"]
    assert wandb["finish"][0] == 0
    assert wandb["finish"][1]["after.num_problems"] == 2
    parameters = [each for kind, call in libraries["mlflow"] if kind == "batch" for each in call[2]]
    assert ("rollout.group_size", "2") in parameters
    assert mlflow["end"] == ("m1", "FINISHED")

    for calls in libraries.values():
        calls.clear()
    posttrain.train(config(model, folder, names, 2, **told), rows=ROWS, rewards=[dice], resume=True)
    new = [line for line in lines(folder) if line[0] == 2]
    assert dict(libraries["wandb"])["init"]["id"] == "w1"
    assert ("update", ("m1", "RUNNING")) in libraries["mlflow"]
    resumed = dict(libraries["trackio"])["init"]
    assert (resumed["resume"], resumed["name"]) == ("must", trackio["init"]["name"])
    assert {name: [line for line in found if line[0] == 2] for name, found in numbers_of(libraries).items()} == (
        dict.fromkeys(names, new)
    )


def numbers_of(libraries: dict[str, list[tuple[str, Any]]]) -> dict[str, list[tuple[int, dict[str, float]]]]:
    """What each library was told of steps."""
    wandb = [dict(numbers) for kind, numbers in libraries["wandb"] if kind == "log" and "completions" not in numbers]
    batches = [call[1] for kind, call in libraries["mlflow"] if kind == "batch" and call[1]]
    trackio = [call for kind, call in libraries["trackio"] if kind == "log" and "completions" not in call[1]]
    return {
        "wandb": [(numbers.pop("step"), numbers) for numbers in wandb],
        "mlflow": [(batch[0].step, {each.key: each.value for each in batch}) for batch in batches],
        "trackio": [(step, numbers) for step, numbers in trackio],
    }


def test_supervised_runs_are_told_too(model: Path, tmp_path: Path) -> None:
    made = posttrain.load_recipe(
        kind=posttrain.SftConfig,
        model={"path": str(model)},
        task={"name": "dataset", "held_out_size": 2},
        sft={"rows_per_batch": 4, "learning_rate": 1e-3},
        run={"folder": str(tmp_path / "run"), "num_steps": 2, "threads": 1, "report_to": ["tensorboard"]},
    )
    posttrain.train_sft(made, rows=[{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(8)])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    told = [(event.step, pytest.approx(event.value)) for event in events.Scalars("loss")]
    assert told == [(step, line["loss"]) for step, line in lines(tmp_path / "run") if "loss" in line]
    assert len(told) == 2
