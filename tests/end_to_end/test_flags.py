"""Flags take what a recipe would have in their place: truth values, lists, and several data sets."""

import pytest

from posttrain.cli import main
from posttrain.config.recipe_yaml import parse_yaml


def resolved(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, dict[str, object]]:
    """The sections that a recipe has with these flags."""
    assert main(["config", "countdown-tiny", *flags]) == 0
    content = parse_yaml(capsys.readouterr().out)
    assert isinstance(content, dict)
    return content


def test_a_truth_value_may_be_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, value in (
        (["--model.gradient-checkpointing", "true"], True),
        (["--model.gradient-checkpointing", "false"], False),
        (["--model.gradient-checkpointing"], True),
        (["--model.no-gradient-checkpointing"], False),
    ):
        assert resolved(capsys, *flags)["model"]["gradient_checkpointing"] is value


def test_a_list_is_words_or_what_a_recipe_has(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["*layers.0*", "*embed*"], ['["*layers.0*", "*embed*"]']):
        assert resolved(capsys, "--model.frozen", *flags)["model"]["frozen"] == ["*layers.0*", "*embed*"]


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("--world.rewards", "[[15, 1.0], [6, 0.65]]", [[15, 1.0], [6, 0.65]]),
        ("--world.rewards", "[[-1, 1]]", [[-1, 1.0]]),
        ("--world.starts", "[0, 4]", [0, 4]),
        ("--world.ends", "[-1, 3]", [-1, 3]),
    ],
)
def test_lists_of_inverse_rl_are_copied_from_a_recipe(
    flag: str, text: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ([flag, text], [f"{flag}={text}"]):
        assert main(["config", "irl-course-exact", *flags]) == 0, capsys.readouterr().err
        content = parse_yaml(capsys.readouterr().out)
        assert isinstance(content, dict)
        assert content["world"][flag.removeprefix("--world.")] == value


def test_several_data_sets_make_the_task_that_reads_them(capsys: pytest.CaptureFixture[str]) -> None:
    given = "[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]"
    task = resolved(capsys, "--task.sources", given)["task"]
    assert task["name"] == "dataset"
    assert isinstance(task["sources"], list)
    assert [(each["path"], each["weight"]) for each in task["sources"]] == [("a.jsonl", 2), ("b.jsonl", 1)]


def test_what_is_no_yaml_is_told_with_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--task.sources", "--model.frozen"):
        assert main(["config", "countdown-tiny", flag, "[{path: a.jsonl"]) == 2
        assert f"command line: {flag}: '[{{path: a.jsonl' is not YAML" in capsys.readouterr().err
