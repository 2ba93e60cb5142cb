"""The guides say what is so: a file of one's own runs in a recipe and from Python, and quoted code is the source."""

import ast
import csv
import importlib
import json
import re
import shlex
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch

from posttrain.algorithms.credit import Evidence
from posttrain.binding import module_from
from posttrain.config import load_recipe
from posttrain.generation.engine import MEMBERS, require_engine, sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.loading.saving import ExportedWeights
from tests.support.commands import printed, refusal
from tests.support.pages import attribute, before_patch, blocks, commands, posttrain, programs, python, write_files
from tests.support.refusals import mentions, refused
from tests.support.runs import command, save_tiny_model
from tests.support.tiny import request, some_prompts, tiny_policy

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs" / "guides"
PAGE = (GUIDES / "your_own.md").read_text(encoding="utf-8")
BLOCKS = blocks(PAGE)
PARTS = [text for _, name, text in BLOCKS if name == "mine.py"]
(RECIPE,) = (text for language, _, text in BLOCKS if language == "diff")
COMMANDS, (MISTAKE,) = [
    [text for language, _, text in BLOCKS if language == "console" and bool(text.count("\nposttrain:")) == says]
    for says in (False, True)
]
WALK = (GUIDES / "one_step.md").read_text(encoding="utf-8")
QUOTED = [(name, text) for _, name, text in blocks(WALK) if name]
TYPED = [line.removeprefix("$ posttrain ") for text in COMMANDS for line in text.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the checkout with the files that the page gives, and a tiny model by the name it has there."""
    folder = tmp_path_factory.mktemp("own")
    write_files(BLOCKS, folder)
    (folder / "before.yaml").write_text(before_patch(RECIPE))
    save_tiny_model(folder / "MODEL")
    return folder


def test_every_part_of_the_file_is_below_thirty_lines() -> None:
    assert len(PARTS) == 5
    assert max(len(part.splitlines()) for part in PARTS) < 30


@pytest.mark.parametrize("typed", [typed for typed in TYPED if typed.startswith("rl") and "--help" not in typed])
def test_a_command_trains_with_what_the_file_defines(typed: str, folder: Path) -> None:
    small = ["--model.path", "MODEL", "--run.overwrite", "--run.threads", "1"]
    ended = command(*shlex.split(typed), *small, folder=folder)
    assert ended.code == 0, ended.err
    assert "task       largest, 16 held-out problems" in ended.out
    assert "rewards    near × 1" in ended.out
    if "--dry-run" not in typed:
        words = shlex.split(typed)
        run = Path(words[words.index("--run.folder") + 1] if "--run.folder" in words else "runs/mine")
        steps = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
        assert [step["step"] for step in steps] == [0, 1, 2, 3, 3]  # the last is what was measured after training
        assert ("loss/entropy_bonus" in steps[-2]) == ("ranked" in typed or "algorithm.path" not in typed)


def test_the_doctor_says_of_a_model_what_the_page_says_that_it_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (typed,) = (typed for typed in TYPED if typed.startswith("doctor"))
    names = [line.split()[0] for line in printed(*shlex.split(typed)).splitlines()]
    assert names == ["model", "weights", "context", "stop", "template", "tokenizer", "sampling"]


def test_the_help_shows_the_options_of_ones_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (typed,) = (typed for typed in TYPED if "--help" in typed)
    mentions(printed(*shlex.split(typed)), "--algorithm.entropy-bonus", "--algorithm.clip", "--task.num-digits")


def test_the_recipe_before_and_after_are_recipes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before, after = load_recipe("before.yaml"), load_recipe("mine.yaml")
    assert before.algorithm["name"] == "grpo"
    assert after.algorithm == {"path": "mine.py:ranked", "clip": 0.3, "entropy_bonus": 0.01}
    assert after.task == {"path": "mine.py:Largest", "num_digits": 3}
    assert [reward.path for reward in after.rewards] == ["mine.py:near"]


def test_a_mistake_is_told_as_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    typed, says = MISTAKE.splitlines()
    assert refusal(*shlex.split(typed)[2:]).strip() == says


def test_the_same_from_python_with_a_watcher(folder: Path) -> None:
    (program,) = programs(BLOCKS)
    done = python(program, folder)
    assert done.code == 0, done.err
    assert (folder / "runs/objects/model/model.safetensors").is_file()
    rows = list(csv.DictReader((folder / "rewards.csv").open()))
    metrics = [json.loads(line) for line in (folder / "runs/objects/metrics.jsonl").read_text().splitlines()]
    _, *steps, _ = metrics  # those between the evaluations before and after
    assert [(row["step"], row["reward"]) for row in rows] == [
        (str(line["step"]), f"{line['reward']:.4f}") for line in steps
    ]


def test_the_advantages_are_those_that_its_docstrings_say(folder: Path) -> None:
    mine = module_from(folder / "mine.py", "test")
    nan = float("nan")
    # 1 beats 0 and 0.5; 0.5 beats 0 and is beaten once; what is not scored neither beats nor is beaten: of 3 siblings.
    rewards = torch.tensor([[0.0, 1.0, 0.5, nan]], dtype=torch.float64)
    assert mine.wins(rewards)[0].tolist() == pytest.approx([-2 / 3, 2 / 3, 0, 0])
    assert mine.wins(torch.full((2, 5), 0.9, dtype=torch.float64)).tolist() == [[0] * 5] * 2
    evidence = Evidence(
        rewards=torch.tensor([[0.0, 1.0]], dtype=torch.float64),
        scores=torch.zeros(1, 1, 2, dtype=torch.float64),
        weights=torch.ones(1, dtype=torch.float64),
        lengths=torch.tensor([[1, 3]]),
        max_completion_tokens=3,
    )
    credited = mine.fading(half_life=1).credit(evidence).advantages
    assert credited.tolist() == [-1, 1, 0.5, 0.25]  # half as much with every token
    entropies = torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64)  # the median is 1.5
    seen = replace(evidence, known={"entropies": entropies})
    assert mine.forking(share=0.5).credit(seen).advantages.tolist() == [0, 1, 1, 0]


def test_the_table_of_an_engine_has_its_members() -> None:
    cells = re.findall(r"^\| (`.*?) \|", PAGE.partition("**An engine**")[2], flags=re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    assert named >= {*MEMBERS}


def test_the_engine_of_the_page_samples_what_ours_does_and_counts(folder: Path) -> None:
    (text,) = (text for _, name, text in BLOCKS if name == "engine.py")
    assert len(text.splitlines()) <= 25
    policy = tiny_policy()
    ours = InProcessEngine(policy)
    engine = require_engine(module_from(folder / "engine.py", "test").CountingEngine(ours))
    engine.load(ExportedWeights(policy), 3)
    counts: list[int] = []
    prompts = some_prompts([2, 5])
    groups = sample_groups(engine, prompts, request(), advance=counts.append)
    assert groups == sample_groups(ours, prompts, request())
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert engine.num_tokens == sum(len(rollout.tokens) for rollout in rollouts) > 0
    assert sum(counts) == len(rollouts)
    assert {rollout.weights_version for rollout in rollouts} == {engine.weights_version} == {3}
    assert engine.max_positions == ours.max_positions


def test_an_option_of_the_file_has_its_type_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with refused("task.num_digits = 'x'"):
        load_recipe("mine.yaml", task={"num_digits": "x"})


@pytest.mark.parametrize(("file", "text"), QUOTED, ids=[name for name, _ in QUOTED])
def test_quoted_code_is_the_text_of_the_source(file: str, text: str) -> None:
    assert f"\n{text}" in (ROOT / file).read_text(encoding="utf-8")


def test_the_walk_begins_with_the_whole_loop() -> None:
    file, text = QUOTED[0]
    source = (ROOT / file).read_text(encoding="utf-8")
    (loop,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == "take_steps")
    assert text.rstrip() == ast.get_source_segment(source, loop)
    assert len(text.splitlines()) <= 20  # a screen, read in one go


def test_every_call_of_the_loop_is_explained() -> None:
    loop = ast.parse(QUOTED[0][1])
    called = {node.func for node in ast.walk(loop) if isinstance(node, ast.Call)}
    names = {call.attr if isinstance(call, ast.Attribute) else call.id for call in called} - {"get"}
    told = WALK.partition("## Line by line")[2].partition("## What each stage")[0]
    headings = " ".join(re.findall(r"\*\*(.*?)\*\*", told))
    assert {name for name in names if not re.search(rf"\b{name}\b", headings)} == set()


def test_a_record_has_the_fields_that_the_walk_names() -> None:
    section = WALK.partition("## What each stage")[2].partition("## Where each")[0]
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| [`")]
    assert len(rows) == 11
    for records, _, has in rows:
        links = re.findall(r"\[`(\w+)`\]\(\.\./\.\./src/([\w/]+)\.py\)", records)
        classes = [attribute(f"{file.replace('/', '.')}.{name}") for name, file in links]
        known = {each.name for record in classes if is_dataclass(record) for each in fields(record)}
        known |= {name for record in classes for name in getattr(record, "_fields", ())}
        known |= {name for record in classes for name in dir(record) if isinstance(getattr(record, name), property)}
        assert set(re.findall(r"`(\w+)`", has)) <= known, records


API = ROOT / "docs" / "python.md"


def test_the_page_of_the_api_has_every_public_name() -> None:
    assert set(importlib.import_module("posttrain").__all__) <= set(re.findall(r"\w+", API.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", [API, *sorted(GUIDES.glob("*.md"))], ids=lambda page: page.stem)
def test_everything_that_a_guide_refers_to_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name, file in re.findall(r"\[`((?!posttrain\.)[\w.]+)`\]\([./]+src/([\w/]+)\.py\)", text):
        assert attribute(f"{file.replace('/', '.')}.{name}") is not None
    made_when_built = {"reference/options.md", "../reference/trl_fields.md"}
    for link in set(re.findall(r"\]\((?!https?:)([^)#:]+)[^)]*\)", text)) - made_when_built:
        assert (page.parent / link).is_file(), link


def test_the_step_by_hand_prints_what_stands_under_it(tmp_path: Path) -> None:
    (program,) = programs(blocks(WALK))
    (printed,) = (text for language, _, text in blocks(WALK) if language == "text")
    done = python(program, tmp_path)
    assert done.code == 0, done.err
    assert done.out == printed
    assert list(tmp_path.iterdir()) == []


DATA = (GUIDES / "datasets.md").read_text(encoding="utf-8")


def test_the_page_on_data_runs_and_says_what_its_plan_says(tmp_path: Path) -> None:
    write_files(blocks(DATA), tmp_path)
    save_tiny_model(tmp_path / "MODEL")
    (said,) = (text for language, name, text in blocks(DATA) if language == "text" and not name)
    for typed in commands(DATA):
        ended = posttrain(shlex.split(typed)[1:], tmp_path)
        assert ended.code == 0, ended.err
        plan = "\n".join(line.rstrip() for line in ended.out.splitlines())
        mixed = "mixture.yaml" in typed
        assert ("sums 25.0% of the draws, questions 75.0% of the draws" in plan) == mixed
        assert mixed or said in plan
    last = json.loads((tmp_path / "runs/data/metrics.jsonl").read_text().splitlines()[-2])
    assert {"sources/sums/num_groups", "sources/questions/num_groups"} & last.keys()
