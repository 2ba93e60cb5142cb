"""The problems that come with the package: each is solved by its solution, and by nothing less."""

import json
from importlib.resources import files
from typing import Any

import pytest

from posttrain.rewards.code.code_reward import CodeOutcome, CodeReward

ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (files("posttrain") / "assets" / "programs.jsonl").read_text("utf-8").splitlines()
]
FAST = CodeReward(cpu_seconds=0.15)


def outcomes(sources: list[str]) -> list[str]:
    found = FAST(
        completions=[f"```python\n{source}\n```" for source in sources],
        finish_reasons=["stop"] * len(sources),
        tests=[row["tests"] for row in ROWS],
    )
    return [str(getattr(one, "outcome", one)) for one in found]


def test_there_are_enough_of_every_kind_with_names_of_their_own() -> None:
    assert len(ROWS) >= 30
    assert len({row["id"] for row in ROWS}) == len({row["prompt"] for row in ROWS}) == len(ROWS)
    kinds = [row["tests"]["kind"] for row in ROWS]
    assert all(kinds.count(kind) >= 8 for kind in ("stdio", "calls", "asserts"))


def test_each_is_solved_by_its_solution() -> None:
    assert outcomes([row["solution"] for row in ROWS]) == [CodeOutcome.PASSED] * len(ROWS)


def constant(row: dict[str, Any]) -> str:
    """The right answer to a row's first test, whatever is asked."""
    tests = row["tests"]
    if tests["kind"] == "stdio":
        return f"print({tests['cases'][0]['output']!r}, end='')"
    if tests["kind"] == "calls":
        return f"def {tests['entry']}(*args):\n    return {tests['cases'][0]['expected']!r}"
    names = [tests["entry"]] if isinstance(tests["entry"], str) else tests["entry"]
    return "\n".join(f"def {name}(*args):\n    return None" for name in names)


@pytest.mark.parametrize("cheat", ["empty", "constant", "endless"])
def test_none_is_solved_by_a_cheap_guess(cheat: str) -> None:
    sources = {"empty": "pass", "endless": "while True: pass"}
    programs = [sources.get(cheat) or constant(row) for row in ROWS]
    assert CodeOutcome.PASSED not in outcomes(programs)
