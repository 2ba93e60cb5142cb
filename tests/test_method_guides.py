"""The guides to methods, data and rewards say what is so: their rows, commands, programs, recipes and tables."""

import json
import re
import runpy
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure

from posttrain.cli import main
from posttrain.commands import check_task, doctor
from posttrain.commands.arguments import split_arguments
from posttrain.commands.collect import PROGRAM
from posttrain.commands.collection.pairs import verdict_by_reward
from posttrain.commands.flags import flag_types, given_flags
from posttrain.config import CollectConfig, DpoConfig, load_recipe
from posttrain.config.reading import checked_sections, resolved_config
from posttrain.config.recipes import RecipeLayer, merge, read_recipe
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.rewards.cheap_attacks import Answer
from posttrain.rewards.exact_match import OURS, Scorer
from posttrain.rewards.model import reward_models_in
from posttrain.rewards.reward_registry import load_reward
from posttrain.training.reward_model.calibration import CALIBRATION, WITH_INTERVAL
from posttrain.training.session import open_session
from tests.support.comparisons import written_pair
from tests.support.conversations import save_chat_model
from tests.support.pages import blocks, commands, documented, posttrain, programs, python, write_files
from tests.support.pictures import save_blank
from tests.support.refusals import refused
from tests.support.reward_models import reward_folder
from tests.support.runs import SHAPE, save_tiny_model

FOLDER = Path(__file__).parents[1] / "docs" / "guides"
PAGE = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
ONE_THREAD = ["--run.threads", "1"]


def yaml_block(page: str) -> dict[str, object]:
    (text,) = (text for language, _, text in blocks(PAGE[page]) if language == "yaml")
    return yaml.safe_load(text)


def metrics_are_documented(run: Path, steps: list[int]) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == steps
    assert all(documented(name) for line in lines for name in line)


# Page, model, its run, what the first of its two commands shows, the steps of the second, how its program ends.
SUPERVISED = [
    ("dpo", save_tiny_model, "pairs", "\nrejected ⟪42<|end|>⟫\n", [0, 1], "'trained': 4, 'held_out': 0"),
    (
        "sft",
        save_chat_model,
        "own-sft",
        next(text for language, _, text in blocks(PAGE["sft"]) if language == "text"),
        [0, 1, 2],
        "runs/own-sft/model {'trained': 4, 'held_out': 0, 'skipped': [], 'cut': [], 'empty_answers': [], 'bad': []}",
    ),
]


@pytest.mark.parametrize(("page", "save_model", "run", "shown", "steps", "ends"), SUPERVISED)
def test_the_commands_and_the_program_of_a_guide_to_rows_look_and_train(
    page: str, save_model: Callable[[Path], object], run: str, shown: str, steps: list[int], ends: str, tmp_path: Path
) -> None:
    write_files(blocks(PAGE[page]), tmp_path)
    save_model(tmp_path / "MODEL")
    look, train = (posttrain([*shlex.split(line)[1:], *ONE_THREAD], tmp_path) for line in commands(PAGE[page]))
    assert (look.code, train.code) == (0, 0), look.err + train.err
    assert shown in look.out
    metrics_are_documented(tmp_path / "runs" / run, steps)
    assert (tmp_path / "runs" / run / "model/model.safetensors").is_file()
    shutil.rmtree(tmp_path / "runs")  # the program may write the same
    (program,) = programs(blocks(PAGE[page]))
    ended = python(program, tmp_path)
    assert ended.code == 0, ended.err
    assert ends in ended.out.splitlines()[-1]


def test_the_recipe_of_rounds_is_one() -> None:
    config = load_recipe(**yaml_block("dpo"))
    assert (type(config), config.num_steps) == (DpoConfig, 32)


def test_the_page_on_adapters_has_a_recipe_a_program_and_bundled_recipes(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = load_recipe(**yaml_block("lora"))
    assert (config.model.adapter.rank, config.model.adapter.targets) == (16, ("all-linear",))
    assert resolved_config(config).update.learning_rate == 1e-5
    (program,) = programs(blocks(PAGE["lora"]))
    done = python(program, tmp_path)
    assert done.code == 0, done.err
    assert done.out.strip() == "8960 parameters are trained"  # 4 layers × 4 × ((160 + 160) + (160 + 80))
    (typed,) = (line for line in commands(PAGE["lora"]) if " rl " in line)
    config = load_recipe(*(word for word in typed.split() if word.startswith("countdown-")))
    assert config.model.adapter is not None
    assert (config.algorithm["kl"]["coefficient"], config.update.learning_rate) == (0.03, 1e-3)


SAID = [
    (typed, said)
    for language, _, text in blocks(PAGE["prompts"])
    if language == "console"
    for typed, said in re.findall(r"^\$ posttrain (.*)\n((?:(?!\$ ).*\n)*)", text, flags=re.MULTILINE)
]


@pytest.mark.parametrize("number", range(3))
def test_a_command_of_the_page_on_prompts_prints_what_stands_under_it(number: int, tmp_path: Path) -> None:
    assert len(SAID) == 3
    typed, said = SAID[number]
    write_files(blocks(PAGE["prompts"]), tmp_path)
    done = posttrain(shlex.split(typed), tmp_path)
    is_mistake = said.startswith("posttrain: ")
    assert done.code == (2 if is_mistake else 0), done.err
    assert (done.err if is_mistake else done.out) == said
    assert {file.name for file in tmp_path.iterdir()} == {"questions.jsonl", "turns.jinja"}


@pytest.mark.parametrize("typed", commands(PAGE["phases"]) + commands(PAGE["compare"]))
def test_a_command_of_the_guides_to_phases_and_comparisons_is_understood(typed, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(blocks(PAGE["phases"]), tmp_path)
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    words = [word for word in shlex.split(typed.removeprefix("posttrain ")) if word != "--dry-run"]
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    if "phases.yaml" in typed:
        assert "takes over phase:reasoning, phase:rows, run:reasoning" in said
    else:
        runs, budget = (30, "150,000 tokens") if "compare/ppo" in typed else (9, "3.0 minutes")
        assert f"{runs} runs, each with a budget of {budget}, in runs/compare" in said


def test_the_program_of_the_page_on_preferences_collects(tmp_path: Path) -> None:
    (program,) = programs(blocks(PAGE["preferences"]))
    done = python(program, tmp_path)
    assert done.code == 0, done.err
    rows = (tmp_path / "runs" / "shorter" / "preferences.jsonl").read_text().splitlines()
    assert done.out.splitlines()[-1].endswith(f"preferences.jsonl {len(rows)}")
    assert rows
    assert all(len(row["chosen"]) < len(row["rejected"]) for row in map(json.loads, rows))


def test_the_columns_of_preferences_are_those_of_a_row() -> None:
    verdict = verdict_by_reward(written_pair(rewards=(1.0, 0.0)), 0.0, "solved")
    table = PAGE["preferences"].partition("| column | meaning |")[2].partition("\n\n")[0]
    rows = [row for row in table.splitlines() if row]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])] == list(verdict.as_row())


@pytest.mark.parametrize("typed", [line for line in commands(PAGE["preferences"]) if "posttrain collect" in line])
def test_each_flag_that_is_typed_exists(typed: str) -> None:
    words = shlex.split(typed)[2:]
    name = words[words.index("--judge.name") + 1] if "--judge.name" in words else "reward"
    layers = [read_recipe("collect-countdown"), RecipeLayer(where="page", sections={"judge": {"name": name}})]
    known = flag_types(checked_sections(CollectConfig, merge(layers)), PROGRAM)
    assert [flag for flag in given_flags(split_arguments(words, PROGRAM).flags) if flag.path not in known] == []


def test_what_the_guide_to_training_reward_models_shows_does_what_it_says(tmp_path, monkeypatch, capsys) -> None:
    page = PAGE["reward_model_training"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", save_blank)
    write_files(blocks(page), tmp_path)
    save_chat_model(tmp_path / "MODEL")
    look, train = (
        shlex.split(line)[1:] for line in commands(page) if line.startswith("posttrain reward-model --model")
    )
    assert main([*look, *ONE_THREAD]) == 0
    assert "margins of 1 pairs times 1" in capsys.readouterr().out
    assert main([*train, *ONE_THREAD]) == 0
    metrics_are_documented(Path("runs/rm"), [0, 1])  # four pairs, one epoch
    (program,) = programs(blocks(page))
    Path("program.py").write_text(program)
    runpy.run_path("program.py")
    assert capsys.readouterr().out.splitlines()[-1] == "2 4"
    (item,) = load_recipe(**yaml.safe_load(Path("several.yaml").read_text())).rewards
    assert len(reward_models_in(load_reward(item).call)) == 2


def test_every_measure_of_held_out_pairs_is_on_the_page_of_metrics() -> None:
    names = [f"{name}{end}" for name in WITH_INTERVAL for end in ("", "_low", "_high")]
    names = [f"eval/{name}" for name in (*names, *CALIBRATION, "mean_reward", "reward_std")]
    assert all(documented(name) for name in [*names, "accuracy", "margin"])


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of two pages on rewards, a tiny model and a tiny reward model under their names there."""
    made = tmp_path_factory.mktemp("guides")
    write_files([*blocks(PAGE["reward_models"]), *blocks(PAGE["generated"])], made)
    tokenizer = new_tokenizer()
    new_model(replace(SHAPE, max_positions=1024), tokenizer, seed=0).save_pretrained(made / "MODEL")
    tokenizer.save_pretrained(made / "MODEL")
    reward_folder(made / "REWARD", labels=("terse", "helpful"))
    return made


def test_the_recipe_of_the_page_mixes_a_function_and_a_reward_model(rewarded, monkeypatch, capsys) -> None:
    monkeypatch.chdir(rewarded)
    dry_run, check, look = (shlex.split(line)[1:] for line in commands(PAGE["reward_models"]))
    assert dry_run == ["rl", "preferred.yaml", "--dry-run"]
    assert check == ["check-task", "REWARD", "--rows", "questions.jsonl", "--label", "helpful"]
    with open_session(load_recipe("preferred.yaml", run={"threads": 1})) as session:
        named = [(each.name, each.settings.weight) for each in session.rewards]
    assert named == [("exact_match", 1.0), ("REWARD", 0.2)]
    assert doctor.main(look[1:]) == 0
    looked = capsys.readouterr().out
    assert "labels     0 (terse), 1 (helpful)" in looked
    assert "scored by  the head at each row's last token" in looked


def test_check_task_holds_tricks_against_the_row_s_own_answer(rewarded, monkeypatch, capsys) -> None:
    monkeypatch.chdir(rewarded)
    tricks = (Answer("silence", ""), Answer("flattery", "What a clever question!"))
    monkeypatch.setattr(check_task, "generic", lambda prompt, common: tricks)
    code = check_task.main(["REWARD", "--rows", "questions.jsonl", "--label", "helpful"])
    *lines, verdict = capsys.readouterr().out.splitlines()[1:]
    scores = {line[30:].split("  <--")[0].split("ms")[-1].strip(): float(line.split()[1]) for line in lines[:3]}
    better = [name for name in ("silence", "flattery") if scores[name] >= scores["the row's own answer"]]
    assert len([line for line in lines[:3] if line.endswith("<-- should not be")]) == len(better)
    assert code == (1 if "not as they should be" in verdict else 0)
    with refused("rows with an answer"):
        check_task.main(["REWARD/"])


def test_the_program_of_the_page_trains_and_scores(rewarded, monkeypatch, capsys) -> None:
    monkeypatch.chdir(rewarded)
    (program,) = programs(blocks(PAGE["reward_models"]))
    (rewarded / "page_program.py").write_text(program, encoding="utf-8")
    runpy.run_path(str(rewarded / "page_program.py"))
    assert (rewarded / "runs/preferred/summary.json").is_file()
    assert capsys.readouterr().out.splitlines()[-1].startswith("[")


def test_the_recipes_with_generated_rows_are_such(rewarded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(rewarded)
    with open_session(load_recipe("puzzles.yaml", run={"threads": 1})) as session:
        (prompt,) = session.task.prompts(1, range(1))
        assert [each.name for each in session.rewards] == ["generated"]
    assert prompt.text.startswith("Think, then give nothing but the final answer")
    mixed = load_recipe("all_kinds.yaml")
    names = [each.name or Path(each.path).stem for each in mixed.task.sources]
    assert names == [reward.where["source"] for reward in mixed.rewards]


def test_the_table_of_scorers_names_each_of_them() -> None:
    lines = PAGE["generated"].partition("| `scorer` |")[2].splitlines()
    told = {
        name.strip(" `"): cell for _, name, cell, *_ in (line.split("|") for line in lines if line.startswith("| `"))
    }
    assert told.keys() == {str(each) for each in Scorer}
    for name in ("countdown", "puzzle24", "n_queens", "fraction_simplification"):
        assert f"`{name}`" in told[OURS[name]]
