"""A run folder is data: opening one runs nothing that it names, unless its user has run the same here or says so."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import posttrain
from posttrain.binding import known_code
from posttrain.cli import COMMANDS, main
from tests.support.commands import printed, refusal
from tests.support.own_objects import OWN_CODE
from tests.support.refusals import refused
from tests.support.runs import save_tiny_model, tiny_recipe


def hostile(mark: Path) -> str:
    """Code of a user that leaves a mark when it is imported."""
    return f"import pathlib\n\npathlib.Path({str(mark)!r}).touch()\n\n{OWN_CODE}"


OPENS_RUNS = {
    **{name: ["--resume", "RUN"] for name in ("rl", "sft", "dpo", "reward-model", "collect")},
    "eval": ["RUN"],
    "trace": ["RUN", "0"],
    "plan": ["RUN/config.yaml"],
    "compare": ["RUN/config.yaml", "--dry-run"],
    "phases": ["phases.yaml", "--dry-run"],
    "config": ["RUN/config.yaml"],
    "behaviours": ["RUN"],
    "chat": ["RUN", "--prompt", "1"],
    "serve": ["RUN", "--port", "70000"],
    "doctor": ["--model", "RUN"],
    "replay": ["RUN"],
    "view": ["RUN", "--export", "run.html"],
    "launch": ["--resume", "RUN", "--dry-run"],
}
"""Every command that takes a run folder, or its recipe, with arguments that open it."""
OPENS_NONE = {"irl", "check-task", "new", "completion", "course"}
"""Those whose recipes name no code, and that take no recipe."""


def test_every_command_is_known_to_open_run_folders_or_not() -> None:
    assert OPENS_RUNS.keys() | OPENS_NONE == COMMANDS.keys()
    assert not OPENS_RUNS.keys() & OPENS_NONE


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a reward of its own, beside its model: what somebody sends."""
    folder = tmp_path_factory.mktemp("made")
    save_tiny_model(folder / "model")
    recipe = tiny_recipe(folder / "sent", run={"num_steps": 1}, evaluation={"every_steps": 0})
    assert main(["rl", str(recipe)]) == 0
    return folder / "sent"


@pytest.fixture
def received(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That run in the folder of somebody who has run nothing yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made / "run", tmp_path / "RUN")
    (tmp_path / "RUN" / "evil.py").write_text(hostile(tmp_path / "marker"))
    return tmp_path / "RUN"


def say(run: Path, **sections: Any) -> None:
    """Have this run's recipe say something else."""
    file = run / "config.yaml"
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**content, **sections}))


NAMED = {
    "a reward": {"rewards": [{"path": "RUN/evil.py:score"}]},
    "a reward whose name is none": {"rewards": [{"path": "RUN/evil.py:no name"}]},
    "a reward in a module": {"rewards": [{"path": "RUN.evil:score"}]},
    "a task": {"task": {"path": "RUN/evil.py:Mine"}},
    "an algorithm": {"algorithm": {"path": "RUN/evil.py:mine"}},
}


ASK = ("rl", "eval", "trace", "plan", "compare", "phases")
"""Commands that do what the recipe of such a run says; the others do so with runs of other kinds, or show."""


def require_nothing_run(before: set[str]) -> None:
    """Neither the file nor its package was imported."""
    assert not Path("marker").exists()
    assert not {name for name in set(sys.modules) - before if name.startswith("RUN")}


@pytest.mark.parametrize(
    ("command", "named"), [*(("rl", named) for named in NAMED), *((each, "a reward") for each in ASK if each != "rl")]
)
def test_commands_ask_before_they_import_what_a_strangers_run_names(
    command: str, named: str, received: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say(received, **NAMED[named])
    Path("phases.yaml").write_text(yaml.safe_dump({"phases": [{"name": "one", "recipe": "RUN/config.yaml"}]}))
    before = set(sys.modules)
    assert main([command, *OPENS_RUNS[command]]) == 2
    require_nothing_run(before)
    said = capsys.readouterr().err
    (section,) = NAMED[named].values()
    path = section[0]["path"] if isinstance(section, list) else section["path"]
    assert path in said
    assert known_code(path).digest in said
    assert "add --trust-code" in said


@pytest.mark.parametrize("command", sorted(OPENS_RUNS.keys() - {*ASK}))
def test_no_other_command_imports_what_a_strangers_run_names(command: str, received: Path) -> None:
    say(received, rewards=[each["rewards"][0] for each in NAMED.values() if "rewards" in each])
    say(received, **NAMED["a task"], **NAMED["an algorithm"])
    before = set(sys.modules)
    main([command, *OPENS_RUNS[command]])
    require_nothing_run(before)


ACTS = {
    "grading.cache_file": {"grading": {"cache_file": "victim.txt"}},
    "model.trust_remote_code": {"model": {"path": "bundled", "trust_remote_code": True}},
    "sandbox.kind": {"sandbox": {"kind": "container", "command": "./evil.sh"}},
    "rewards[0].options.endpoint": {
        "rewards": [{"name": "judge", "options": {"endpoint": "https://evil.example/v1", "key_env": "HOME"}}]
    },
}


@pytest.mark.parametrize("option", ACTS)
@pytest.mark.parametrize("command", ["rl", "eval", "trace"])
def test_what_a_strangers_recipe_would_do_on_this_machine_is_asked(command: str, option: str, received: Path) -> None:
    say(received, **{"rewards": [], **ACTS[option]})
    assert f"{option} = " in refusal(command, *OPENS_RUNS[command])


def test_a_link_to_a_runs_recipe_is_a_runs_recipe(received: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(received, **NAMED["a reward"])
    Path("other").mkdir()
    Path("other/mine.yaml").symlink_to(received / "config.yaml")
    before = set(sys.modules)
    assert main(["rl", "other/mine.yaml", "--dry-run"]) == 2
    require_nothing_run(before)
    assert "this run's recipe" in capsys.readouterr().err


def test_a_flag_may_ask_for_what_the_run_says_of_its_model(received: Path) -> None:
    say(received, rewards=[], **ACTS["model.trust_remote_code"])
    flags = ["--model.trust-remote-code", "--task.held-out-size", "1", "--evaluation.samples", "1"]
    assert main(["eval", "RUN", *flags, "--rollout.max-completion-tokens", "2"]) == 0


def test_config_shows_an_algorithm_of_the_run_as_it_is_written(received: Path) -> None:
    say(received, algorithm={"path": "RUN/evil.py:mine", "width": 3})
    shown = yaml.safe_load(printed("config", "RUN/config.yaml"))
    assert shown["algorithm"] == {"path": "RUN/evil.py:mine", "width": 3}
    assert shown["task"] == yaml.safe_load(Path("RUN/config.yaml").read_text())["task"]


def test_behaviours_says_nothing_of_code(received: Path) -> None:
    say(received, algorithm={"path": "RUN/evil.py:mine"})
    assert "completions of 1 steps" in printed("behaviours", "RUN")


def test_code_is_trusted_once_by_its_content_wherever_it_lies(received: Path) -> None:
    say(received, **NAMED["a reward"])
    small = ["--task.held-out-size", "1", "--evaluation.samples", "1", "--rollout.max-completion-tokens", "2"]
    assert main(["eval", "RUN", *small, "--trust-code"]) == 0
    assert Path("marker").exists()
    assert main(["eval", "RUN", *small]) == 0
    received.rename("MOVED")
    moved = Path("MOVED")
    say(moved, rewards=[{"path": "MOVED/evil.py:score"}])
    assert main(["eval", "MOVED", *small]) == 0
    say(moved, rewards=[{"path": "MOVED/evil.py:mine"}])  # another name in it, which nobody gave
    assert main(["eval", "MOVED", *small]) == 2
    (moved / "evil.py").write_text((moved / "evil.py").read_text() + "# changed\n")
    say(moved, rewards=[{"path": "MOVED/evil.py:score"}])
    assert main(["eval", "MOVED", *small]) == 2


def test_a_run_that_was_trusted_and_went_on_is_asked_about_when_its_code_changes(received: Path, made: Path) -> None:
    on = ["rl", "--resume", "RUN", "--run.num-steps"]
    assert main([*on, "2"]) == 2
    assert main([*on, "2", "--trust-code"]) == 0
    file = made / "dice.py"
    was = file.read_text()
    file.write_text(f"{was}# changed\n")
    assert "add --trust-code" in refusal(*on, "3")
    file.write_text(was)
    assert main([*on, "3"]) == 0


def test_a_changed_neighbour_that_code_imports_is_asked_about(received: Path) -> None:
    (received / "beside.py").write_text("WEIGHT = 1.0\n")
    (received / "rule.py").write_text("import beside\n\n\ndef score(completions, **columns):\n    return [1.0] * 9\n")
    path = "RUN/rule.py:score"
    before = known_code(path)
    (received / "beside.py").write_text("WEIGHT = 2.0\n")
    assert known_code(path).key != before.key


def test_in_python_the_recipe_of_a_run_is_read_where_it_is_trusted(received: Path) -> None:
    say(received, **NAMED["an algorithm"])
    with refused("load_recipe(..., trust_code=True)"):
        posttrain.load_recipe("RUN/config.yaml")
    assert not Path("marker").exists()
    assert posttrain.load_recipe("RUN/config.yaml", trust_code=True).algorithm["path"] == "RUN/evil.py:mine"


def test_ones_own_run_is_resumed_without_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    (tmp_path / "mine.py").write_text(hostile(tmp_path / "marker"))
    rewards = [{"path": "mine.py:score"}]
    recipe = tiny_recipe(tmp_path / "own", run={"num_steps": 1, "folder": "run"}, rewards=rewards)
    assert main(["rl", str(recipe), "--algorithm.path", "mine.py:mine"]) == 0
    assert main(["rl", "--resume", "run", "--run.num-steps", "2"]) == 0
    Path("run").rename("elsewhere")
    assert main(["rl", "--resume", "elsewhere", "--run.num-steps", "3"]) == 0
    assert json.loads(Path("elsewhere/summary.json").read_text())["steps"] == 3
    Path("mine.py").write_text(Path("mine.py").read_text() + "# changed\n")
    said = refusal("rl", "--resume", "elsewhere", "--run.num-steps", "4")
    assert "algorithm.path = mine.py:mine has changed since the run began" in said
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    said = refusal("rl", "--resume", "elsewhere", "--run.num-steps", "4")
    assert said.count("mine.py:") == 2, "both are named at once"


def test_a_home_that_cannot_be_written_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(hostile(tmp_path / "marker"))
    assert posttrain.load_recipe("countdown-tiny", algorithm={"path": "mine.py:mine"}).algorithm["path"]


def linked(received: Path, names: list[str]) -> dict[str, Path]:
    """Links in the run in place of these files, each to a file of the user's with what is there."""
    victims = {name: received.parent / f"victim-{number}" for number, name in enumerate(names)}
    for name, victim in victims.items():
        place = received / name
        place.parent.mkdir(exist_ok=True)
        victim.write_bytes(place.read_bytes() if place.is_file() else b"precious")
        place.unlink(missing_ok=True)
        place.symlink_to(victim)
    return victims


def test_a_picture_of_behaviours_is_written_over_no_link(received: Path) -> None:
    (victim,) = linked(received, ["behaviours.png"]).values()
    assert main(["behaviours", "RUN"]) == 0
    assert victim.read_bytes() == b"precious"
    assert (received / "behaviours.png").is_file()
    assert not (received / "behaviours.png").is_symlink()


def test_a_run_that_goes_on_writes_through_no_link(received: Path) -> None:
    names = ["curves.png", "summary.json", ".tmp-summary.json", "config.yaml", "inputs.json", "model/model.safetensors"]
    victims = linked(received, [*names, "rollouts/step-000002.parquet"])
    before = {name: victim.read_bytes() for name, victim in victims.items()}
    assert main(["rl", "--resume", "RUN", "--run.num-steps", "2", "--trust-code"]) == 0
    assert {name: victim.read_bytes() for name, victim in victims.items()} == before
    assert not (received / "model" / "model.safetensors").is_symlink()


@pytest.mark.parametrize("name", ["metrics.jsonl", "scores.jsonl", ".posttrain.lock"])
def test_a_journal_or_lock_that_is_a_link_is_refused(name: str, received: Path) -> None:
    (victim,) = linked(received, [name]).values()
    before = victim.read_bytes()
    said = refusal("rl", "--resume", "RUN", "--run.num-steps", "2", "--trust-code", code=1)
    assert f"{name} is a link; put the file itself there" in said
    assert victim.read_bytes() == before
