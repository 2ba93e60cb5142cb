"""The guides to reward models and to generated problems say what is so: their recipes, commands and program."""

import runpy
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.commands import check_task, doctor
from posttrain.config import load_recipe
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.rewards.cheap_attacks import Answer
from posttrain.rewards.exact_match import OURS, Scorer
from posttrain.training.session import open_session
from tests.support.pages import blocks, commands, programs, write_files
from tests.support.refusals import refused
from tests.support.reward_models import reward_folder
from tests.support.runs import SHAPE

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
MODELS, GENERATED = ((GUIDES / name).read_text(encoding="utf-8") for name in ("reward_models.md", "generated.md"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of both pages, a tiny model and a tiny reward model by the names that they have there."""
    made = tmp_path_factory.mktemp("guides")
    write_files([*blocks(MODELS), *blocks(GENERATED)], made)
    tokenizer = new_tokenizer()
    new_model(replace(SHAPE, max_positions=1024), tokenizer, seed=0).save_pretrained(made / "MODEL")
    tokenizer.save_pretrained(made / "MODEL")
    reward_folder(made / "REWARD", labels=("terse", "helpful"))
    return made


def test_the_recipe_of_the_page_mixes_a_function_and_a_reward_model(folder, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    dry_run, check, look = (shlex.split(line)[1:] for line in commands(MODELS))
    assert dry_run == ["rl", "preferred.yaml", "--dry-run"]
    with open_session(load_recipe("preferred.yaml", run={"threads": 1})) as session:
        assert [(each.name, each.settings.weight) for each in session.rewards] == [
            ("exact_match", 1.0),
            ("REWARD", 0.2),
        ]
    assert doctor.main(look[1:]) == 0
    looked = capsys.readouterr().out
    assert "labels     0 (terse), 1 (helpful)" in looked
    assert "scored by  the head at each row's last token" in looked
    assert check == ["check-task", "REWARD", "--rows", "questions.jsonl", "--label", "helpful"]


def test_check_task_holds_tricks_against_the_row_s_own_answer(folder, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    tricks = (Answer("silence", ""), Answer("flattery", "What a clever question!"))
    monkeypatch.setattr(check_task, "generic", lambda prompt, common: tricks)
    code = check_task.main(["REWARD", "--rows", "questions.jsonl", "--label", "helpful"])
    *lines, verdict = capsys.readouterr().out.splitlines()[1:]
    scores = {line[30:].split("  <--")[0].split("ms")[-1].strip(): float(line.split()[1]) for line in lines[:3]}
    better = [name for name in ("silence", "flattery") if scores[name] >= scores["the row's own answer"]]
    flagged = [line for line in lines[:3] if line.endswith("<-- should not be")]
    assert len(flagged) == len(better)
    assert code == (1 if "not as they should be" in verdict else 0)
    with refused("rows that have an answer"):
        check_task.main(["REWARD/"])


def test_the_program_of_the_page_trains_and_scores(folder, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    (program,) = programs(blocks(MODELS))
    (folder / "page_program.py").write_text(program, encoding="utf-8")
    runpy.run_path(str(folder / "page_program.py"))
    assert (folder / "runs/preferred/summary.json").is_file()
    assert capsys.readouterr().out.splitlines()[-1].startswith("[")


def test_the_recipes_with_generated_rows_are_such(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with open_session(load_recipe("puzzles.yaml", run={"threads": 1})) as session:
        (prompt,) = session.task.prompts(1, range(1))
        assert [each.name for each in session.rewards] == ["generated"]
    assert prompt.text.startswith("Think, then give nothing but the final answer")
    mixed = load_recipe("all_kinds.yaml")
    names = [each.name or Path(each.path).stem for each in mixed.task.sources]  # type: ignore[union-attr]
    assert names == [reward.where["source"] for reward in mixed.rewards]


def test_the_table_of_scorers_names_each_of_them() -> None:
    table = GENERATED.partition("| `scorer` |")[2]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    told = {cells[1].strip(" `"): cells[2] for cells in rows}
    assert told.keys() == {str(each) for each in Scorer}
    for name in ("countdown", "puzzle24", "n_queens", "fraction_simplification"):
        assert f"`{name}`" in told[OURS[name]]
