"""What of a command line is a recipe, and what is the value of a flag."""

import pytest

from posttrain.commands.arguments import split_arguments


def test_a_recipe_may_stand_behind_flags() -> None:
    given = split_arguments(["a.yaml", "--run.seed", "1", "b.yaml"])
    assert (given.positional, given.flags) == (["a.yaml", "b.yaml"], ["--run.seed", "1"])


@pytest.mark.parametrize("flag", ["--judge.principles", "--behaviours.file"])
def test_a_file_behind_a_flag_of_files_is_its_value(flag: str) -> None:
    for flags in ([flag, "mine.yaml"], [f"{flag}=mine.yaml"]):
        given = split_arguments(["a.yaml", *flags, "b.yaml"])
        assert (given.positional, given.flags) == (["a.yaml", "b.yaml"], flags)
