"""A run that is killed, wherever it is, and resumed leaves the bits of one that never stopped; earlier runs resume.

A run folder that was damaged, edited or littered between two lives is told with the way on, or borne.
"""

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import posttrain
from posttrain.cli import main
from posttrain.errors import UserError
from tests.support.accidents import Accident, flip_bit
from tests.support.commands import called, printed
from tests.support.refusals import mentions
from tests.support.runs import Ended, command, files_of, metrics_of, records, require_same, save_tiny_model, tiny_recipe

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


def test_it_is_resumed_to_the_numbers_of_a_run_that_never_stopped(earlier: Path) -> None:
    before = metrics_of(earlier / "run")
    ended = command("rl", "--resume", "run", "--run.num-steps", 6, "--trust-code", folder=earlier)
    assert ended.code == 0, ended.err
    after = metrics_of(earlier / "run")
    assert after[:5] == before  # step 0 and the four that were taken
    for mine, kept in zip(after[5:], records(earlier / "steps-5-and-6.jsonl"), strict=True):
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


def test_the_command_that_a_damaged_checkpoint_names_leads_to_the_same_bits(run: Path, four: Path) -> None:
    flip_bit(run / "checkpoints" / "step-000004" / "policy.safetensors")
    before = files_of(run)
    said = refused("rl", "--resume", str(run), code=1)
    assert "step-000004/policy.safetensors: damaged: its SHA-256" in said
    assert files_of(run) == before
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
    before = files_of(run)
    said = refused("rl", "--resume", str(run), "--from-step", "3")
    assert "no checkpoint of that step.  Choose one of 0, 2, 4." in said
    recipe = tiny_recipe(four.parents[1] / "new")
    assert "only for resuming a run" in refused("rl", str(recipe), "--from-step", "2")
    assert files_of(run) == before
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
    before = files_of(run)
    said = refused("rl", "--resume", str(run), "--run.num-steps", "5")
    assert said.startswith(
        f"posttrain: resume {run}: the config differs from the run's own in {option} = {EDITS[option]} (was {was})."
    )
    assert files_of(run) == before
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


@pytest.mark.parametrize("gone", ["the folder", "its content", "the last one's content"])
def test_a_finished_run_without_its_checkpoints_is_not_begun_anew(gone: str, run: Path) -> None:
    folder, last = run / "checkpoints", run / "checkpoints" / "step-000004"
    lost = last if "last" in gone else folder
    shutil.rmtree(lost)
    if "content" in gone:
        lost.mkdir()
    before = files_of(run)
    said = refused("rl", "--resume", str(run), code=1)
    assert f"{lost}: has no checkpoint, but metrics.jsonl has steps up to 4." in said
    restore = "Restore its files" if lost == last else "Restore the checkpoints, or start again with run.overwrite"
    assert restore in said
    assert files_of(run) == before
    if lost == last:
        (folder / "step-000009").mkdir()
        assert main(["rl", "--resume", str(run), "--from-step", "2"]) == 0


@pytest.mark.parametrize("text", ["{", "[]", "7", '{"objects": {}}', '{"objects": {"task": 1}, "files": {}}', "\x80"])
def test_damaged_inputs_are_named_with_the_way_on(text: str, run: Path) -> None:
    (run / "inputs.json").write_bytes(text.encode("latin-1"))
    before = files_of(run)
    said = refused("rl", "--resume", str(run), code=1)
    mentions(
        said, f"{run}/inputs.json: damaged: the inputs of the run cannot be read", "Restore the file, or delete it"
    )
    assert files_of(run) == before


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
        assert f"{file}: finished steps {steps} are missing; the run continues without them." in out
    assert [line["step"] for line in metrics_of(run)] == [0, 4, 5]
    os.truncate(run / "metrics.jsonl", 0)  # nor does a journal that is gone break the pictures of a finished run
    assert "metrics.jsonl: finished steps 0-5 are missing" in printed("rl", "--resume", run)


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
    said = printed(*more, spent / 2)
    assert "min reach run.time_limit_minutes = " in said
    assert "lacks" not in said, "it is whole"
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2, 3, 4]
    assert main([*more, str(spent + 10)]) == 0
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2, 3, 4, 5, 6]
