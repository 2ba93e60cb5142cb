"""The page on collecting preferences says what is so."""

import json
import re
import shlex
from pathlib import Path

import pytest

from posttrain.commands.arguments import split_arguments
from posttrain.commands.collect import PROGRAM
from posttrain.commands.collection.pairs import verdict_by_reward
from posttrain.commands.flags import flag_types, given_flags
from posttrain.config import CollectConfig
from posttrain.config.reading import checked_sections
from posttrain.config.recipes import RecipeLayer, merge, read_recipe
from tests.support.comparisons import written_pair
from tests.support.pages import blocks, commands, programs, python

PAGE = Path(__file__).parents[1].joinpath("docs", "guides", "preferences.md").read_text(encoding="utf-8")


def test_the_python_block_collects(tmp_path: Path) -> None:
    (program,) = programs(blocks(PAGE))
    done = python(program, tmp_path)
    assert done.code == 0, done.err
    rows = (tmp_path / "runs" / "shorter" / "preferences.jsonl").read_text().splitlines()
    assert done.out.splitlines()[-1].endswith(f"preferences.jsonl {len(rows)}")
    assert rows
    assert all(len(row["chosen"]) < len(row["rejected"]) for row in map(json.loads, rows))


def test_the_columns_are_those_of_a_row() -> None:
    verdict = verdict_by_reward(written_pair(rewards=(1.0, 0.0)), 0.0, "solved")
    assert verdict is not None
    table = PAGE.partition("| column | |")[2].partition("\n\n")[0]
    named = [
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")
    ]
    assert named == list(verdict.as_row())


@pytest.mark.parametrize("typed", [typed for typed in commands(PAGE) if typed.startswith("posttrain collect")])
def test_each_flag_that_is_typed_exists(typed: str) -> None:
    words = shlex.split(typed)[2:]
    name = words[words.index("--judge.name") + 1] if "--judge.name" in words else "reward"
    layers = [read_recipe("collect-countdown"), RecipeLayer(where="page", sections={"judge": {"name": name}})]
    known = flag_types(checked_sections(CollectConfig, merge(layers)), PROGRAM)
    assert [flag for flag in given_flags(split_arguments(words, PROGRAM).flags) if flag.path not in known] == []
