"""Runs through the real loops in float64 whose numbers are kept: a change of numerics must be declared.

support/golden_runs.py says what takes part.  A change that is meant to leave numbers as they are must pass, though the
calls that make the runs may change with the code.  One that is not writes them anew with

    .venv/bin/python -m tests.engine.test_golden

and goes into CHANGELOG.md under *Numerics*.  First weights and draws come from numpy's counter-based generator, and
another order of the float64 sums moves the last step's numbers by 1e-15, so they hold on any machine.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import golden_runs as golden

GOLDEN = Path(__file__).parents[1] / "data" / "golden.json"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return golden.all_runs(tmp_path_factory.mktemp("golden"))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every number, word and null with the path that leads to it; an empty list or mapping as itself."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    inner = [leaf for key, item in items for leaf in leaves(item, f"{path}/{key}")]
    yield from inner or [(path, value)]


@pytest.mark.parametrize("name", [*golden.RUNS, "supervised"])
def test_a_run_gives_the_numbers_that_were_kept(name: str, runs: Mapping[str, Any]) -> None:
    expected = dict(leaves(json.loads(GOLDEN.read_text(encoding="utf-8"))[name]))
    actual = dict(leaves(json.loads(json.dumps(runs[name]))))
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        if isinstance(value, float):
            # A ratio within rounding of a clip bound may be beyond it on one processor and not on another.
            rounded = 0.005 if "/clip_ratio/" in path else 1e-11
            assert actual[path] == pytest.approx(value, rel=1e-9, abs=rounded), path
        else:
            assert actual[path] == value, path


def test_the_runs_do_what_they_are_there_to_guard(runs: Mapping[str, Any]) -> None:
    loss, reward = runs["kl_in_the_loss"], runs["kl_in_the_reward"]
    before, *steps, after = loss["metrics"]
    assert {line.get("num_updates") for line in steps} == {4.0}
    assert any(line["frac_unscored"] > 0 for line in steps)
    assert any(line["num_replaced_groups"] > 0 for line in reward["metrics"][1:-1])
    assert all("eval/reward" in line for line in (before, *steps[1::2], after))
    advantages = [value for step in reward["rollouts"] for value in step["advantage"]]
    assert None in advantages, "no group was set aside"
    assert any(line["loss"] for line in steps)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps(golden.all_runs(Path(folder)), indent=1) + "\n", encoding="utf-8")
