"""A run folder that was damaged, edited or littered between two lives: told with the way on, or borne."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import posttrain
from posttrain.cli import main
from posttrain.errors import UserError
from tests.support.accidents import flip_bit
from tests.support.commands import called, printed
from tests.support.refusals import mentions
from tests.support.runs import metrics_of, require_same, save_tiny_model, tiny_recipe


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints of steps 0, 2 and 4."""
    folder = tmp_path_factory.mktemp("faults")
    save_tiny_model(folder / "model")
    sections = {"algorithm": {"name": "grpo", "kl": {"coefficient": 0.1}}, "checkpoint": {"keep_last": 3}}
    assert main(["rl", str(tiny_recipe(folder / "four", **sections))]) == 0
    return folder / "four" / "run"


@pytest.fixture
def run(four: Path, tmp_path: Path) -> Path:
    """A copy of it, in a folder whose name has a space."""
    return Path(shutil.copytree(four, tmp_path / "a run", ignore=shutil.ignore_patterns(".posttrain.lock")))


def refused(*argv: object, code: int = 2) -> str:
    """What a command that ends at once says."""
    ended = called(*argv)
    assert (ended.code, ended.out) == (code, "")
    return ended.err


def contents(run: Path) -> dict[str, bytes]:
    files = (path for path in run.rglob("*") if path.is_file() and path.name != ".posttrain.lock")
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in files}


def test_the_command_that_a_damaged_checkpoint_names_leads_to_the_same_bits(run: Path, four: Path) -> None:
    flip_bit(run / "checkpoints" / "step-000004" / "policy.safetensors")
    before = contents(run)
    said = refused("rl", "--resume", str(run), code=1)
    assert "step-000004/policy.safetensors: damaged: its SHA-256" in said
    assert contents(run) == before
    (named,) = (line for line in said.splitlines() if "--from-step" in line)
    program, *arguments = shlex.split(named)
    assert (program, arguments) == ("posttrain", ["rl", "--resume", str(run), "--from-step", "2"])
    out = printed(*arguments)
    mentions(out, "Resumed after step 2.", "Removed: the checkpoints of steps 4, and everything else after step 2.")
    require_same(run, four)


def test_going_back_further_gives_the_same_bits_too(run: Path, four: Path) -> None:
    config = posttrain.load_recipe(run / "config.yaml", run={"folder": str(run)})
    posttrain.train(config, resume=True, from_step=0)
    require_same(run, four)


def test_a_step_to_go_on_from_is_one_with_a_checkpoint_of_a_run_that_is_resumed(run: Path, four: Path) -> None:
    before = contents(run)
    said = refused("rl", "--resume", str(run), "--from-step", "3")
    assert "no checkpoint of that step.  Choose one of 0, 2, 4." in said
    recipe = tiny_recipe(four.parents[1] / "new")
    assert "for a run that is resumed" in refused("rl", str(recipe), "--from-step", "2")
    assert contents(run) == before
    assert not (four.parents[1] / "new" / "run").exists()
    with pytest.raises(UserError, match="only a resumed run"):
        posttrain.train_sft(posttrain.SftConfig(), from_step=1)


EDITS = {
    "update.learning_rate": 0.5,
    "rollout.group_size": 2,
    "run.seed": 9,
    "algorithm.kl.coefficient": 0.7,
    "rewards[0].weight": 2.0,
}


@pytest.mark.parametrize("option", EDITS)
def test_an_option_that_was_edited_by_hand_is_refused_with_the_recipe_as_it_was(option: str, run: Path) -> None:
    file = run / "config.yaml"
    content = yaml.safe_load(file.read_text())
    section, _, name = option.partition(".")
    inner = content["rewards"][0] if section == "rewards[0]" else content[section]
    saved = json.loads(json.dumps(content))
    *above, last = name.split(".")
    for each in above:
        inner = inner[each]
    was, inner[last] = inner.get(last, 1.0), EDITS[option]
    file.write_text(yaml.safe_dump(content))
    before = contents(run)
    said = refused("rl", "--resume", str(run), "--run.num-steps", "5")
    assert said.startswith(
        f"posttrain: resume {run}: the config differs from the run's own in"
        f" {option} = {EDITS[option]}, which was {was}."
    )
    assert contents(run) == before
    program, source, target = shlex.split(said.partition("Restore it: ")[2].partition(", or start")[0])
    assert (program, target) == ("cp", str(file))
    assert yaml.safe_load(Path(source).read_text()) == saved


def test_how_long_a_run_goes_on_and_what_is_kept_may_be_edited(run: Path) -> None:
    file = run / "config.yaml"
    content = yaml.safe_load(file.read_text())
    content["run"] |= {"num_steps": 5, "time_limit_minutes": 100.0}
    content["checkpoint"] |= {"keep_last": 1, "keep_best": False}
    file.write_text(yaml.safe_dump(content))
    assert main(["rl", "--resume", str(run)]) == 0
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2, 3, 4, 5]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000005"]


@pytest.mark.parametrize("text", ["", "# all of it is a remark\n"])
def test_an_empty_recipe_is_told_with_the_copy_to_put_there(text: str, run: Path) -> None:
    (run / "config.yaml").write_text(text)
    said = refused("rl", "--resume", str(run), code=1)
    mentions(said, f"{run}/config.yaml: empty.  Restore it: cp ", "step-000004/config.yaml' ")
    shutil.rmtree(run / "checkpoints")
    assert f"Restore {run}/config.yaml." in refused("rl", "--resume", str(run), code=1)


@pytest.mark.parametrize("whole", [True, False])
def test_a_finished_run_without_its_checkpoints_is_not_begun_anew(whole: bool, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    if not whole:
        (run / "checkpoints").mkdir()
    before = contents(run)
    said = refused("rl", "--resume", str(run), code=1)
    assert f"{run}/checkpoints: holds no checkpoint, and metrics.jsonl has steps up to 4." in said
    assert "Restore the checkpoints, or start the run anew with run.overwrite = true (--run.overwrite)" in said
    assert contents(run) == before


def test_a_checkpoint_that_was_emptied_is_not_given_up_unasked(run: Path) -> None:
    last = run / "checkpoints" / "step-000004"
    shutil.rmtree(last)
    last.mkdir()
    before = contents(run)
    said = refused("rl", "--resume", str(run), code=1)
    assert f"{last}: holds no checkpoint, and metrics.jsonl has steps up to 4.  Restore its files" in said
    assert contents(run) == before
    (run / "checkpoints" / "step-000009").mkdir()
    assert main(["rl", "--resume", str(run), "--from-step", "2"]) == 0


@pytest.mark.parametrize("text", ["{", "[]", "7", '{"objects": {}}', '{"objects": {"task": 1}, "files": {}}', "\x80"])
def test_damaged_inputs_are_named_with_the_way_on(text: str, run: Path) -> None:
    (run / "inputs.json").write_bytes(text.encode("latin-1"))
    before = contents(run)
    said = refused("rl", "--resume", str(run), code=1)
    mentions(
        said, f"{run}/inputs.json: damaged: the inputs of the run cannot be read", "Restore the file, or delete it"
    )
    assert contents(run) == before


def shorter_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))


MODEL_CHANGES: dict[str, Callable[[Path], None]] = {
    "its config": shorter_config,
    "the last byte of its weights": lambda model: flip_bit(model / "model.safetensors"),
    "a file less": lambda model: (model / "tokenizer_config.json").unlink(),
}


@pytest.mark.parametrize("change", MODEL_CHANGES)
def test_another_model_in_the_folder_that_the_recipe_names_is_refused(change: str, four: Path, run: Path) -> None:
    model = four.parents[1] / "model"
    (model / "notes.txt").write_text("mine")
    kept = Path(shutil.copytree(model, run.parent / "kept"))
    try:
        MODEL_CHANGES[change](model)
        said = refused("rl", "--resume", str(run))
        assert said.startswith(f"posttrain: resume {run}: model.path = {model} has changed since the run began.")
    finally:
        shutil.rmtree(model)
        shutil.copytree(kept, model)
    assert main(["rl", "--resume", str(run)]) == 0  # notes are no part of a model


def test_what_is_missing_of_finished_steps_is_told_and_the_run_goes_on(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0] + lines[4])
    (run / "rollouts" / "step-000002.parquet").unlink()
    (run / "scores.jsonl").write_text("")
    out = printed("rl", "--resume", run, "--run.num-steps", "5")
    for file, steps in (("metrics.jsonl", "1-3"), ("scores.jsonl", "1-4"), ("rollouts", "2")):
        assert f"{file} lacks steps {steps}, which were finished: the run continues without them." in out
    assert [line["step"] for line in metrics_of(run)] == [0, 4, 5]
    os.truncate(run / "metrics.jsonl", 0)  # nor does a journal that is gone break the pictures of a finished run
    assert "metrics.jsonl lacks steps 0-5, which" in printed("rl", "--resume", run)


def test_a_whole_run_is_told_to_lack_nothing(run: Path) -> None:
    assert "lacks" not in printed("rl", "--resume", run)


def test_an_older_damaged_checkpoint_is_told(run: Path, four: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(run / "checkpoints" / "step-000002" / "manifest.json", 30)
    for stray in ("checkpoints/step-000003-backup", "checkpoints/notes.txt", "rollouts/.DS_Store", ".DS_Store"):
        (run / stray).write_text("mine")
    assert main(["rl", "--resume", str(run), "--run.num-steps", "6"]) == 0
    said = f"{run}/checkpoints/step-000002/manifest.json: damaged: not readable as a manifest"
    assert capsys.readouterr().out.count(said) == 1
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2, 3, 4, 5, 6]


def test_the_time_limit_is_for_all_lives_of_a_run_together(run: Path) -> None:
    state = json.loads((run / "checkpoints" / "step-000004" / "state.json").read_text())["run"]
    spent = sum(state["seconds"].values()) / 60
    more = ["rl", "--resume", str(run), "--run.num-steps", "6", "--run.time-limit-minutes"]
    assert "min reach run.time_limit_minutes = " in printed(*more, spent / 2)
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2, 3, 4]
    assert main([*more, str(spent + 10)]) == 0
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2, 3, 4, 5, 6]
