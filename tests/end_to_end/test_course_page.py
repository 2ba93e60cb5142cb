"""docs/course.md: its rewards score, its programs run, and its table names what is there."""

import re
from pathlib import Path

import pytest
import torch

from posttrain.binding import module_from
from posttrain.course import __all__ as functions
from posttrain.models.loading.new_model import new_tokenizer
from tests.support.pages import attribute, blocks, programs
from tests.support.reward_rows import group, scores
from tests.support.runs import save_tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "course.md").read_text(encoding="utf-8")
NOTEBOOK, READING, LOOP = programs(blocks(PAGE))


def run(program: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(program, "docs/course.md", "exec"), names)  # noqa: S102  # a page of ours
    return names


def test_the_rewards_of_the_page_score_as_they_stand(tmp_path: Path) -> None:
    ((_, name, text),) = [block for block in blocks(PAGE) if block[1]]
    (tmp_path / name).write_text(text)
    rewards = module_from(tmp_path / name, where="rewards")
    rows = [group(["<answer>7.</answer>", "7"], columns={"nums": [3, 4], "target": 7, "answer": "7"})]
    found = {name: scores(rows, getattr(rewards, name))[0] for name in re.findall(r"^def (\w+)", text, re.MULTILINE)}
    assert found == {
        "format_reward_func": [1, 0],
        "target_reward_func": [0.5, 0.5],
        "period_count": [1, 0],
        "brief": [1, 1],
        "exact": [0, 1],
    }


def test_the_notebook_s_program_takes_two_steps_and_leaves_a_run_that_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(NOTEBOOK)
    shown = capsys.readouterr().out
    assert re.findall(r"^(\d) 0\.\d+ \d+\.\d+$", shown, re.MULTILINE) == ["1", "2"]
    assert "closed: stopped after step 2; everything is saved." in shown
    assert (tmp_path / "runs" / "notebook" / "checkpoints" / "step-000002").is_dir()
    run(READING)
    shown = capsys.readouterr().out
    assert re.findall(r"\((\d), 0\.\d+\)", shown.splitlines()[0]) == ["1", "2"]
    assert re.findall(r"^step-00000(\d)\.parquet (?:0|1)\.0 ", shown, re.MULTILINE) == ["1", "2"]


def test_the_loop_over_one_prompt_at_a_time_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_model(tmp_path / "model")
    tokenizer = new_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    train_on = run(LOOP)["train_on"]
    assert callable(train_on)
    model = train_on(folder, [("1+1?", "2")], lambda text, answer: float(len(text) % 2), num_steps=2)
    assert len(re.findall(r"^step \d: loss -?\d", capsys.readouterr().out, re.MULTILINE)) == 2
    fresh = type(model).from_pretrained(folder)
    moved = [(a - b).abs().max() for a, b in zip(model.parameters(), fresh.parameters(), strict=True)]
    assert torch.stack(moved).max() > 0


def test_the_table_names_every_function_of_the_package_and_nothing_that_is_not_there() -> None:
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./src/([\w/]+)\.py\)", PAGE)
    assert all(attribute(f"{file.replace('/', '.')}.{name}") is not None for name, file in links)
    assert set(functions) <= {name for name, _ in links}
