"""Hostile answers to generated problems, and the library's scorers, which are asked inside the sandbox alone."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.rewards.exact_match import OURS
from posttrain.rewards.generated_reward import GeneratedReward, dataset_key
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.resources import Resources
from posttrain.tasks.row_files.generator_rows import rows_or_error
from tests.support.refusals import refused

COLUMNS = ("generator", "scorer", "answer", "entry")
GENERATORS = ("complex_arithmetic", "decimal_arithmetic", "jugs", "knights_knaves", "simple_integration", "sudoku")
"""Some with a scorer of their own: of a number, of moves, of names, of a formula, of a grid."""
REWARD = GeneratedReward(cpu_seconds=0.5)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, object]]:
    asked = {"options": {}, "seed": 3, "size": 1}
    names = (*GENERATORS, "puzzle24", "countdown")
    return {name: next(iter(rows_or_error({**asked, "generator": name}))) for name in names}


@pytest.fixture(scope="module")
def resources() -> Iterator[Resources]:
    with Resources() as opened:
        opened.memory(REWARD, set[str]).update(dataset_key(name, {}) for name in GENERATORS)
        yield opened


def verdicts(row: dict[str, object], texts: list[str], resources: Resources) -> list[Graded]:
    columns = {name: [row[name]] * len(texts) for name in COLUMNS}
    said = REWARD.scores(resources, completions=texts, finish_reasons=["stop"] * len(texts), **columns)
    assert all(isinstance(each, Graded) for each in said)
    return said  # type: ignore[return-value]


@pytest.mark.parametrize("name", GENERATORS)
def test_the_row_s_own_answer_is_paid(name: str, rows: dict[str, dict[str, object]], resources: Resources) -> None:
    assert verdicts(rows[name], [f"<answer>{rows[name]['answer']}</answer>"], resources)[0].score == 1.0


@pytest.mark.parametrize("name", [*GENERATORS, "puzzle24", "countdown"])
def test_no_trick_is_paid_and_none_runs(name, rows, resources, tmp_path) -> None:
    mark = tmp_path / "mark"
    texts = [
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"open({str(mark)!r}, 'w')",
        "().__class__.__base__.__subclasses__()",
        *("nan", "nan + nani", "inf", "9**9**9**9", "6*4*1*1", "[]", "{}", "null", "\x00\ud800"),
        *("[" * 5000, "0" * 9000, "x" * 100_000),
    ]
    said = verdicts(rows[name], [f"<answer>{each}</answer>" for each in texts], resources)
    assert [(text[:40], each) for text, each in zip(texts, said, strict=True) if each.score != 0.0] == []
    assert not mark.exists()


def test_a_formula_that_never_ends_is_killed(rows: dict[str, dict[str, object]], resources: Resources) -> None:
    row = rows["simple_integration"]
    texts = ["<answer>9**9**9**9**x</answer>", f"<answer>{row['answer']}</answer>"]
    tower, own = verdicts(row, texts, resources)
    assert tower.score == 0.0
    assert own.score == 1.0  # whoever shares the process is asked in another


def test_a_row_whose_answer_is_not_paid_is_named(rows: dict[str, dict[str, object]], resources: Resources) -> None:
    REWARD.check_rows([("sudoku:1", rows["sudoku"]), ("file:7", {"answer": "4"})], resources)
    with refused("sudoku:2: ", "'1 2 3'"):
        REWARD.check_rows([("sudoku:2", {**rows["sudoku"], "answer": "1 2 3"})], resources)


EVALUATING = {"eval", "exec", "parse_expr", "sympify", "literal_eval", "compile", "__import__", "loads"}
HARMLESS = {
    "basic_arithmetic",  # of the problem that it makes
    "bf",  # its own programs in Brainf**k, which it has a compiler for
    "bitwise_arithmetic",  # of the problem, as basic_arithmetic
    "codeio",  # of programs that come with it, when it makes a problem
    "propositional_logic",  # a parser of its own that has sympy's name
}
"""Generators that evaluate, and never an answer."""


def evaluates(node: ast.AST) -> bool:
    """Whether a call is one that reads text as Python, or as whatever else can run."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name in EVALUATING
        case ast.Call(func=ast.Attribute(attr=name, value=value)):
            module = value.id if isinstance(value, ast.Name) else ""
            return name in EVALUATING and (module, name) not in {("json", "loads"), ("re", "compile")}
    return False


def test_every_generator_that_evaluates_text_is_known() -> None:
    """Read from the installed library, so that another version with another such scorer fails here."""
    spec = importlib.util.find_spec("reasoning_gym")
    found = set()
    for file in Path(spec.origin).parent.rglob("*.py"):
        if "contrib" in file.parts or "gsm_symbolic" in file.parts:  # games' own code, and problems as they are made
            continue
        source = file.read_text(encoding="utf-8")
        if any(f"{name}(" in source for name in EVALUATING) and any(map(evaluates, ast.walk(ast.parse(source)))):
            found.add(file.stem)
    assert found - HARMLESS <= OURS.keys(), found - HARMLESS - OURS.keys()
    assert found >= {"puzzle24", "countdown", "n_queens", "simple_integration"}  # else nothing was found for no reason
