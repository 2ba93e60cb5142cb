"""Folders of runs that are not `rl`, quickly made, with what the viewer reads of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.viewed_folders import add_line, byte_tokenizer, write_rows

PICTURE = b"\x89PNG\r\n\x1a\n and so on"


def folder_of(run: Path, **recipe: Any) -> Path:
    run.mkdir(parents=True)
    (run / "format").write_text("2\n")
    (run / "config.yaml").write_text(json.dumps(recipe))
    (run / "metrics.jsonl").touch()
    return run


def reward_model(run: Path) -> Path:
    folder_of(run, model={"path": "m"}, task={"name": "dataset"}, reward_model={})
    for where, chosen, rejected in (("a:1", 2.0, 1.0), ("a:2", 0.5, 3.0), ("a:3", 1.0, 0.5)):
        texts = {"prompt": "<b>?", "chosen_text": "yes", "rejected_text": "no"}
        add_line(run, "held_out.jsonl", {"where": where, "chosen": chosen, "rejected": rejected, **texts})
    bins = [{"confidence": [0.5, 0.6], "num_pairs": 3, "mean_confidence": 0.55, "share_right": 2 / 3}]
    after = {"accuracy": 2 / 3, "calibration": bins, "calibration_error": 0.1, "calibration_error_by_chance": 0.2}
    (run / "summary.json").write_text(json.dumps({"after": after}))
    (run / "calibration.png").write_bytes(PICTURE)
    return run


def collection(run: Path) -> Path:
    folder_of(run, model={"path": "m"}, task={"name": "countdown"}, collect={}, judge={"name": "reward"})
    row = {
        "prompt": [{"role": "user", "content": "2?"}],
        "chosen": "2",
        "rejected": "3",
        "judge": "maths",
        "pair": "1:0-1",
    }
    add_line(run, "preferences.jsonl", {**row, "tie": False, "chosen_reward": 1.0, "rejected_reward": 0.0})
    add_line(run, "ties.jsonl", {**row, "tie": True, "chosen_reward": 1.0, "rejected_reward": 1.0})
    (run / "summary.json").write_text(json.dumps({"num_prompts": 2, "num_ties": 1}))
    return run


def supervised(run: Path) -> Path:
    folder_of(run, model={"path": "m"}, task={"name": "dataset"}, sft={})
    byte_tokenizer(run / "tokenizer")
    for step, loss in ((0, 2.0), (4, 0.5)):
        row = {
            "step": step,
            "example": 0,
            "tokens": [*b"ab!"],
            "learned": [False, True, True],
            "logprobs": [-loss, -1.0],
        }
        write_rows(run / f"demonstrations/step-{step:06d}.parquet", [row])
    return run


def inverse_rl(run: Path, *, shape: bool = True) -> Path:
    folder_of(run, world={"name": "icy_grid", "size": 2}, method={"name": "course"})
    arrays = {
        "reward": np.array([0.0, 1.0, -2.0, 0.5]),
        "policy": np.full((4, 4), 0.25),
        "visits": np.array([1.0, 0.5, 0.25, 1.0]),
        "demonstrated_visits": np.array([1.0, 0.0, 2.0, 1.0]),
        "states": np.arange(4),
    }
    arrays["policy"][0] = [0.0, 0.0, 1.0, 0.0]
    if shape:
        moves = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])
        arrays |= {"shape": np.array([2, 2]), "moves": moves, "upwards": np.array(True)}
        arrays |= {"terminal": np.array([False, False, False, True])}
    np.savez(run / "reward.npz", **arrays)
    add_line(run, "metrics.jsonl", {"iteration": 0, "gap": 3.0})
    add_line(run, "metrics.jsonl", {"iteration": 1, "gap": 1.0})
    (run / "summary.json").write_text(json.dumps({"gap": 1.0}))
    return run


def comparison(run: Path) -> Path:
    run.mkdir(parents=True)
    folder_of(run / "cells" / "grpo-seed-0", algorithm={"name": "grpo"})
    cell = {"variant": "grpo", "seed": 0, "before": {"accuracy_sampled": 0.2}, "after": {"accuracy_sampled": 0.5}}
    curve = [[0, 0.0, 0.2], [100, 2.0, 0.5]]
    variants = [{"variant": "grpo", "before": {"mean": 0.2}, "after": {"mean": 0.5, "low": 0.4, "high": 0.6}}]
    content = {"budget": "2 minutes", "variants": variants, "cells": [{**cell, "curve": curve, "steps": 3}]}
    (run / "comparison.json").write_text(json.dumps(content))
    return run


def phases(run: Path) -> Path:
    run.mkdir(parents=True)
    folder_of(run / "phases" / "1-rows", task={"name": "dataset"}, sft={})
    folder_of(run / "phases" / "2-policy", algorithm={"name": "grpo"})
    summary = {
        "before": {"loss": 2.0},
        "after": {"loss": 1.0, "loss_interval": [0.9, 1.1]},
        "steps": 5,
        "seconds": 60.0,
    }
    done = {"name": "rows", "command": "sft", "folder": "/elsewhere/phases/1-rows", "summary": summary}
    (run / "phases.json").write_text(json.dumps([done]))
    return run


KINDS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "reward-model": (reward_model, "pairs"),
    "collect": (collection, "pairs"),
    "sft": (supervised, "demonstrations"),
    "irl": (inverse_rl, "grid"),
    "compare": (comparison, "comparison"),
    "phases": (phases, "phases"),
}
