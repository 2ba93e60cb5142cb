"""A run folder of an earlier layout of the code is read, measured and continued: data/earlier_run, of four steps.

It was made by `posttrain rl` with the recipe in run/config.yaml; steps-5-and-6.jsonl is what the same program logged
when the same recipe ran for six steps without a stop.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.runs import command, metrics_of

EARLIER = Path(__file__).parents[1] / "data" / "earlier_run"
KEPT = ("reward", "loss", "grad_norm", "tokens/trained", "num_tokens", "entropy_estimate", "eval/accuracy_sampled")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EARLIER, tmp_path / "earlier"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_it_is_resumed_to_the_numbers_of_a_run_that_never_stopped(earlier: Path) -> None:
    before = metrics_of(earlier / "run")
    ended = command("rl", "--resume", "run", "--run.num-steps", 6, "--trust-code", folder=earlier)
    assert ended.code == 0, ended.err
    after = metrics_of(earlier / "run")
    assert after[:5] == before  # step 0 and the four that were taken
    for mine, kept in zip(after[5:], lines(earlier / "steps-5-and-6.jsonl"), strict=True):
        for name in (name for name in KEPT if name in kept):
            # float32 on another processor rounds otherwise; another draw or order of updates would be far off
            assert mine[name] == pytest.approx(kept[name], rel=1e-3), (mine["step"], name)


def test_its_model_is_measured(earlier: Path) -> None:
    flags = ("--task.held-out-size", 4, "--rollout.max-completion-tokens", 6, "--output", "measured.json")
    ended = command("eval", "run/model", *flags, folder=earlier)
    assert ended.code == 0, ended.err
    kept = json.loads((earlier / "run" / "summary.json").read_text())["after"]
    measured = json.loads((earlier / "measured.json").read_text())
    assert measured["num_problems"] == kept["num_problems"] == 4
    assert kept.keys() <= measured.keys()


def test_its_files_are_read(earlier: Path) -> None:
    table = pq.read_table(earlier / "run" / "rollouts" / "step-000004.parquet").to_pydict()
    assert len(table["tokens"]) == 16
    assert [line["step"] for line in lines(earlier / "run" / "metrics.jsonl")] == [0, 1, 2, 3, 4]
