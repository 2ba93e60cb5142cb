"""Real runs in the viewer: what their files hold of each token, the commands that open it, and tables in Python."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from pyarrow import parquet

import posttrain
from posttrain.commands import view
from posttrain.runs.reports import Run
from tests.support.refusals import refused
from tests.support.runs import rollout_rows, save_tiny_model, tiny_recipe
from tests.support.viewed_folders import ask, write_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of two updates, with all that a run can keep of its tokens."""
    folder = tmp_path_factory.mktemp("trained")
    save_tiny_model(folder / "model")
    recipe = tiny_recipe(
        folder / "a",
        task={"prefill_think": True},
        algorithm={"name": "grpo", "kl": {"coefficient": 0.1}, "clip_low": 1e-3, "clip_high": 1e-3},
        rollout={"keep_alternatives": 3, "prompts_per_step": 2},
        update={"measure_entropy": True, "epochs_per_step": 2},
        run={"num_steps": 2, "keep_token_columns": True, "curves": False},
    )
    return posttrain.train(posttrain.load_recipe(recipe))


def test_each_token_has_the_numbers_that_the_run_kept_of_it(trained: Run) -> None:
    columns = parquet.read_table(trained.folder / "token_columns/step-000002.parquet").to_pylist()
    for row in rollout_rows(trained.folder, 2):
        page = ask(trained.folder, path=f"run/0/rollout/rollouts/2/{row['draw']}/{row['sample']}")
        found = {each["name"]: each["values"] for each in page["quantities"]}
        assert found["logprobs"] == pytest.approx(row["logprobs"])
        assert found["token_advantages"] == row["token_advantages"]
        computed = [each for each in columns if (each["draw"], each["sample"]) == (row["draw"], row["sample"])]
        [after] = [update for update in computed if update["update"] is None]
        names = {"policy_logprobs": "updated_logprobs", "ratio": "updated_ratio", "clipped": "updated_clipped"}
        for name, shown in names.items():
            assert found[shown] == pytest.approx([*map(float, after[name])])
        computed.remove(after)
        for update in computed:
            for name in ("policy_logprobs", "ratio", "kl", "entropy", "reference_logprobs"):
                assert found[f"{name}.{update['update']}"] == pytest.approx(update[name])
            assert found[f"clipped.{update['update']}"] == [int(each) for each in update["clipped"]]
        assert len(computed) in (0, 2)
        chosen = [[each["id"] for each in at] for at in page["alternatives"]]
        assert chosen == row["alternative_tokens"]
        assert page["prefill"] == row["prefill"] == "<think>"
        assert page["graded"] == "<think>" + row["completion"]
        assert [piece["id"] for piece in page["completion"]] == row["tokens"]
        spelled = [page["completion_text"][a:b] for a, b in zip(page["offsets"], page["offsets"][1:], strict=False)]
        assert "".join(spelled) == row["completion"]
        assert page["faults"] == []


def test_the_overview_has_what_the_summary_and_the_metrics_say(trained: Run) -> None:
    page = ask(trained.folder, path="run/0/overview")
    assert (page["kind"], page["state"], page["last_step"], page["faults"]) == ("rl", "finished", 2, [])
    after = trained.summary["after"]
    assert isinstance(after, dict)
    [accuracy] = [each for each in page["before_after"] if each["name"] == "accuracy_sampled"]
    assert accuracy["after"] == after["accuracy_sampled"]
    assert [accuracy["after_low"], accuracy["after_high"]] == after["accuracy_sampled_interval"]
    assert {"Reward", "Held-out accuracy", "Length", "KL", "Entropy"} <= {panel["panel"] for panel in page["curves"]}
    assert page["seconds_by_stage"]["steps"] == [1, 2]


def test_rollouts_are_one_table_and_one_frame(trained: Run) -> None:
    opened = posttrain.open_run(trained.folder)
    assert opened.summary == trained.summary
    table = opened.rollouts()
    assert table.num_rows == 16
    assert table["step"].to_pylist() == [1] * 8 + [2] * 8
    some = opened.rollouts(steps=[2], columns=["completion", "reward"])
    assert (some.num_rows, some.column_names) == (8, ["completion", "reward"])
    assert some["reward"].to_pylist() == [row["reward"] for row in rollout_rows(trained.folder, 2)]
    assert {*opened.rollouts("evaluations")["evaluation"].to_pylist()} == {"before", "brief", "after"}
    pytest.importorskip("pandas")
    frame = opened.to_pandas(columns=["step", "reward"])
    assert [*frame.columns] == ["step", "reward"]
    assert frame["step"].sum() == 24


def test_tables_name_what_is_missing_or_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = posttrain.open_run(write_run(tmp_path / "run"))
    with refused("no file has the column `rewards`", "score/maths"):
        run.rollouts(columns=["rewards"])
    with refused("no files", "step"):
        run.rollouts(steps=[99])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refused("pandas is not installed", "pip install pandas"):
        run.to_pandas()
    (run.folder / "rollouts/step-000002.parquet").write_bytes(b"PAR1")
    with refused("step-000002.parquet: damaged", "steps"):
        run.rollouts()
    assert run.rollouts(steps=[1, 3]).num_rows == 24
    with refused("config.yaml is missing"):
        posttrain.open_run(tmp_path)


def answered(address: str, path: str) -> Any:
    base, _, token = address.partition("#token=")
    request = Request(f"{base}api/{path}", headers={"X-Posttrain-Token": token})
    with urlopen(request, timeout=20) as answer:
        return json.load(answer)


@contextmanager
def viewer(*arguments: object, folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`posttrain view` in a folder, and the address that it prints."""
    command = [sys.executable, "-m", "posttrain", "view", *map(str, arguments), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.terminate()


def test_the_command_lists_runs_below_a_folder_until_it_is_interrupted(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/set/deep")
    write_run(tmp_path / "runs/first")
    with viewer("--no-live", folder=tmp_path) as (address, process):
        listed = answered(address, "runs")
        assert {run["name"] for run in listed["runs"]} == {"deep", "first"}
        assert (listed["below"], listed["live"]) == ("runs", False)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130


def test_two_named_runs_open_side_by_side_and_one_by_itself(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name)
    for named, page in ((("first", "second"), "&/compare?a=0&b=1"), (("second",), "&/run/0")):
        with viewer(*named, folder=tmp_path) as (address, _):
            assert address.endswith(page)


def test_a_viewer_beside_a_run_ends_with_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"  # not begun yet
    with view.viewer_beside(str(run)):
        address = capfd.readouterr().out.split()[-1]
        assert answered(address, "runs")["runs"][0]["state"] == "not begun"
        write_run(run)
        assert answered(address, "run/0/rows")["total"] == 36
    with pytest.raises(URLError):
        answered(address, "runs")
    assert capfd.readouterr().out.endswith(f"posttrain view {run}\n")


@pytest.mark.parametrize(("arguments", "says"), [(["none"], "does not exist"), ([], "does not contain a run")])
def test_a_folder_without_runs_is_an_error_with_a_remedy(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(says, "Name the folder of a run"):
        view.main([*arguments, "--no-open"])


def test_a_browser_opens_only_where_there_is_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert not view.has_display()
    monkeypatch.setenv("DISPLAY", ":0")
    assert view.has_display()
