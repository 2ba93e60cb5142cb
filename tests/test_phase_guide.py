"""The guides to phases and to comparisons say what is so: their recipe is one, their commands are understood."""

import shlex
from pathlib import Path

import pytest

from posttrain.cli import main
from tests.support.pages import blocks, commands, write_files

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
PHASES = (GUIDES / "phases.md").read_text(encoding="utf-8")
COMPARE = (GUIDES / "compare.md").read_text(encoding="utf-8")


def dry(typed: str) -> list[str]:
    arguments = shlex.split(typed.removeprefix("posttrain "))
    return arguments if "--dry-run" in arguments else [*arguments, "--dry-run"]


@pytest.mark.parametrize("typed", commands(PHASES) + commands(COMPARE))
def test_a_command_of_the_guide_is_understood(typed, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(blocks(PHASES), tmp_path)
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    assert main(dry(typed)) == 0
    said = capsys.readouterr().out
    if "phases.yaml" in typed:
        assert "takes over phase:reasoning, phase:rows, run:reasoning" in said
    else:
        runs, budget = (30, "150,000 tokens") if "compare/ppo" in typed else (9, "3.0 minutes")
        assert f"{runs} runs, each with a budget of {budget}, in runs/compare" in said
