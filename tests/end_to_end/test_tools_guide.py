"""The guide of tools and environments: its files run as they are shown, by the real command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.models.loading.new_model import new_model
from tests.support.commands import called, printed
from tests.support.conversations import SHAPE
from tests.support.pages import blocks, write_files
from tests.support.refusals import mentions
from tests.support.runs import records, rollout_rows
from tests.support.turn_templates import CALLING, REWRITING, turn_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "tools.md").read_text(encoding="utf-8")
REWARD = "def brief(completions, **columns):\n    return [-float(len(str(each))) for each in completions]\n"


def save_model(folder: Path, template: str) -> None:
    tokenizer = turn_tokenizer(template)
    new_model(replace(SHAPE, max_positions=1024), tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files, a tiny chat model that stops after a few tokens, and a recipe of one step under them."""
    write_files(blocks(PAGE), tmp_path)
    save_model(tmp_path / "MODEL", CALLING["qwen"])
    (tmp_path / "brief.py").write_text(REWARD)
    rows = [{"prompt": [{"role": "user", "content": f"Say {number}."}]} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe: dict[str, Any] = {
        "model": {"path": "MODEL"},
        "task": {"name": "dataset", "path": "rows.jsonl", "held_out_share": 0},
        "rewards": "brief.py:brief",
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 12},
        "evaluation": {"every_steps": 0},
        "checkpoint": {"every_steps": 0},
        "run": {"folder": "run", "num_steps": 1, "threads": 1},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_prompt_describes_the_tools_of_the_page(folder: Path) -> None:
    plan = printed("rl", "base.yaml", "tools.yaml", "--dry-run", "--model.path", "MODEL")
    mentions(plan, "tools calculator, population", "its English name", "at most 4 turns")


def test_the_environment_of_the_page_adds_to_the_prompt_and_is_a_column_of_rewards(folder: Path) -> None:
    # An untrained model stops nowhere in twelve tokens; so every character of ASCII ends a turn here.
    ends = "class Guess:\n    stop_texts = tuple(map(chr, range(32, 127)))\n"
    (folder / "guess.py").write_text((folder / "guess.py").read_text().replace("class Guess:\n", ends))
    printed("rl", "base.yaml", "guess.yaml")
    rows = rollout_rows(folder / "run", 1)
    assert all("Guess a number from 1 to 20." in row["prompt"] for row in rows)
    assert any("Wrong." in row["completion"] for row in rows)
    (step,) = (line for line in records(folder / "run" / "metrics.jsonl") if "reward" in line)
    assert "rewards/environment/mean" in step


def test_the_tools_of_the_page_answer_in_text(folder: Path) -> None:
    plan = printed("rl", "base.yaml", "in_text.yaml", "--dry-run", "--task.prompt-format", "plain")
    mentions(plan, "tools calculator", "at most 100 turns")


def test_a_template_that_rewrites_turns_is_refused_as_shown_and_appends_if_told_to(folder: Path) -> None:
    save_model(folder / "MODEL", REWRITING["thinking"])
    ended = called("rl", "base.yaml", "guess.yaml", "--dry-run")
    (shown,) = (text for language, _, text in blocks(PAGE) if language == "text" and "one by one" in text)
    assert ended.code == 2
    assert " ".join(shown.split()) in " ".join(ended.err.split())
    plan = printed("rl", "base.yaml", "guess.yaml", "--rollout.multi-turn", "append", "--dry-run")
    mentions(plan, "turns are appended")
