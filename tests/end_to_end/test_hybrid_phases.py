"""The bundled recipe of five phases, cut down: wired as it is, stopped inside its last phase and resumed to the bit."""

import json
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import yaml
from safetensors.torch import load_file

from posttrain.cli import main
from posttrain.commands import phase_runs
from posttrain.config.recipes import find_recipe
from tests.support.runs import save_tiny_model

ROOT = Path(__file__).parents[2]
STEPS = 3
SMALLER: dict[str, dict[str, Any]] = {
    "demonstrations": {"model": {"path": "model"}, "task": {"held_out_size": 4}, "sft": {"num_epochs": 1}},
    "reasoning": {
        "task": {"held_out_size": 2},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 6},
        "evaluation": {"samples": 1},
        "run": {"num_steps": 2},
    },
    "pairs": {"sampling": {"max_completion_tokens": 6}, "collect": {"num_prompts": 6, "cut_off": "keep"}},
    "judge": {"task": {"held_out_share": 0.0}, "reward_model": {"num_epochs": 1, "pairs_per_batch": 4}},
    "diverse": {
        "task": {"held_out_size": 4},
        "rollout": {"prompts_per_step": 6, "group_size": 2, "max_completion_tokens": 6},
        "evaluation": {"samples": 1},
        "checkpoint": {"every_steps": 1, "keep_last": STEPS + 1},
        "run": {"num_steps": STEPS},
    },
}
"""Sizes alone: what each phase takes from which is the recipe's."""
STOPPING = """
import os, signal

def true_reward(prompts, completions, trainer_state, **columns):
    if trainer_state.global_step == 1 and os.path.exists("stop"):
        os.remove("stop")
        signal.raise_signal(signal.SIGINT)
    return [len(set(text)) / 10 for text in completions]
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The recipe with a tiny model, few rows, and a reward of its name that can stop the run as Ctrl-C does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import hybrid_rows

    save_tiny_model(tmp_path / "model")
    hybrid_rows.write(Path("runs/hybrid-rows"), num_demonstrations=16, num_puzzles=40)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "sums_task.py").write_text(STOPPING)
    content = yaml.safe_load(find_recipe("hybrid-tiny").read_text())
    for phase in content["phases"]:
        for section, options in SMALLER[phase["name"]].items():
            phase["sections"].setdefault(section, {}).update(options)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(content))
    yield tmp_path
    for name in ("hybrid_rows", "sums_task"):
        sys.modules.pop(name, None)


def run_here(command: Sequence[str], *, name: str, log: Path) -> None:
    """The command of a phase in this process."""
    code = main([str(each) for each in command])
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    assert code == 0


def test_the_bundled_hybrid_recipe_goes_on_to_the_same_bits_where_it_was_stopped_inside_its_last_phase(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase_runs, "run_posttrain", run_here)
    command = ["phases", "small.yaml", "--folder", "out"]
    assert main(command) == 0
    last = place / "out" / "phases" / "5-diverse"
    whole = load_file(last / "model" / "model.safetensors")

    # Rows of either kind were scored by the reward that is for them, and by no other.
    table = pyarrow.parquet.read_table(last / "rollouts").to_pylist()
    sources = [json.loads(row["columns"])["source"] for row in table]
    assert set(sources) == {"puzzles", "sums"}
    for row, source in zip(table, sources, strict=True):
        assert (row["score/countdown"] is None) == (source == "sums")
        assert (row["score/judge"] is None) == (source == "puzzles")

    # The optimiser is that of `reasoning`, the reference still the first model.
    ended = load_file(max((place / "out/phases/2-reasoning/checkpoints").glob("step-*")) / "optimizer.safetensors")
    began = load_file(last / "checkpoints" / "step-000000" / "optimizer.safetensors")
    assert ended
    assert all(torch.equal(began[name], tensor) for name, tensor in ended.items())

    shutil.rmtree(last)
    (place / "stop").touch()
    assert main(command) == 130
    assert not (place / "stop").exists()
    assert not (last / "summary.json").exists()
    assert main(command) == 0
    again = load_file(last / "model" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
