"""Flags take what a recipe would have in their place, and code that a flag names is imported only where it is read."""

from itertools import product
from pathlib import Path

import pytest

from posttrain.cli import COMMANDS
from posttrain.commands.arguments import split_arguments
from posttrain.config.recipe_yaml import parse_yaml
from tests.support.commands import printed, refusal


def resolved(*flags: str) -> dict[str, dict[str, object]]:
    """The sections that a recipe has with these flags."""
    content = parse_yaml(printed("config", "countdown-tiny", *flags))
    assert isinstance(content, dict)
    return content


def test_a_truth_value_may_be_written_out() -> None:
    for flags, value in (
        (["--model.gradient-checkpointing", "true"], True),
        (["--model.gradient-checkpointing", "false"], False),
        (["--model.gradient-checkpointing"], True),
        (["--model.no-gradient-checkpointing"], False),
    ):
        assert resolved(*flags)["model"]["gradient_checkpointing"] is value


def test_a_list_is_words_or_what_a_recipe_has() -> None:
    for flags in (["*layers.0*", "*embed*"], ['["*layers.0*", "*embed*"]']):
        assert resolved("--model.frozen", *flags)["model"]["frozen"] == ["*layers.0*", "*embed*"]


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("--world.rewards", "[[15, 1.0], [6, 0.65]]", [[15, 1.0], [6, 0.65]]),
        ("--world.rewards", "[[-1, 1]]", [[-1, 1.0]]),
        ("--world.starts", "[0, 4]", [0, 4]),
        ("--world.ends", "[-1, 3]", [-1, 3]),
    ],
)
def test_lists_of_inverse_rl_are_copied_from_a_recipe(flag: str, text: str, value: object) -> None:
    for flags in ([flag, text], [f"{flag}={text}"]):
        content = parse_yaml(printed("config", "irl-course-exact", *flags))
        assert isinstance(content, dict)
        assert content["world"][flag.removeprefix("--world.")] == value


def test_several_data_sets_make_the_task_that_reads_them() -> None:
    given = "[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]"
    task = resolved("--task.sources", given)["task"]
    assert task["name"] == "dataset"
    assert isinstance(task["sources"], list)
    assert [(each["path"], each["weight"]) for each in task["sources"]] == [("a.jsonl", 2), ("b.jsonl", 1)]


def test_what_is_no_yaml_is_told_with_its_flag() -> None:
    for flag in ("--task.sources", "--model.frozen"):
        said = refusal("config", "countdown-tiny", flag, "[{path: a.jsonl")
        assert f"command line: {flag}: '[{{path: a.jsonl' is not YAML" in said


OF_TASKS = ("rl", "dpo", "collect", "compare", "eval", "trace", "plan", "config")
OF_ALGORITHMS = ("rl", "compare", "trace", "plan", "config")
TAKEN = {*product(OF_TASKS, ["task.path"]), *product(OF_ALGORITHMS, ["algorithm.path"])}
FLAGS = ("task.path", "algorithm.path", "judge.path", "world.path", "features.path", "demonstrations.path")
NAMED = {
    **{name: ["bundled"] for name in ("eval", "chat", "serve", "behaviours", "check-task")},
    "trace": ["bundled", "0"],
    "compare": ["countdown-tiny"],
    "dpo": ["--dpo.rounds", "2"],
    "phases": ["phases.yaml"],
}
"""Commands that are about something named by position."""


@pytest.mark.parametrize(("command", "flag"), product(COMMANDS, FLAGS))
def test_a_path_is_imported_only_by_commands_that_read_it(
    command: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("import pathlib\n\npathlib.Path('imported').touch()\n")
    Path("phases.yaml").write_text("phases: [{name: a}]")
    error = refusal(command, *NAMED.get(command, []), f"--{flag}", "mine.py:Name")
    assert error.startswith("posttrain: ")
    assert error.count("\n") == 1 or command == "check-task"  # which prints its usage
    assert Path("imported").exists() == ((command, flag) in TAKEN), error
    assert (f"mine.py has no {'class' if 'task' in flag else 'function'} `Name`" in error) == Path("imported").exists()
    assert flag in error or (command, flag) in TAKEN, error


@pytest.mark.parametrize("command", ["chat", "serve", "behaviours", "doctor"])
@pytest.mark.parametrize("flag", ["task.name", "algorithm.name"])
def test_a_name_is_refused_by_commands_that_do_not_read_it(command: str, flag: str) -> None:
    error = refusal(command, *NAMED.get(command, []), f"--{flag}", "countdown")
    section = flag.partition(".")[0]
    assert f"--{flag}: no such flag.  `posttrain {command}` does not read the section {section}." in error


def test_help_offers_a_path_only_where_it_is_read() -> None:
    assert ".path" not in printed("behaviours", "--help")


def test_a_recipe_may_stand_behind_flags() -> None:
    given = split_arguments(["a.yaml", "--run.seed", "1", "b.yaml"])
    assert (given.positional, given.flags) == (["a.yaml", "b.yaml"], ["--run.seed", "1"])


@pytest.mark.parametrize("flag", ["--judge.principles", "--behaviours.file"])
def test_a_file_behind_a_flag_of_files_is_its_value(flag: str) -> None:
    for flags in ([flag, "mine.yaml"], [f"{flag}=mine.yaml"]):
        given = split_arguments(["a.yaml", *flags, "b.yaml"])
        assert (given.positional, given.flags) == (["a.yaml", "b.yaml"], flags)
