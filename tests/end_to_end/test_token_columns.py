"""What the trainer computed for each token, in the run folder on request: they agree with the metrics."""

from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

import posttrain
from tests.support.runs import metrics_of, require_same, save_tiny_model, tiny_recipe

PASSES = {"epochs_per_step": 2, "minibatches_per_epoch": 2}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl": {"coefficient": 0.1}, "clip_low": 1e-3, "clip_high": 1e-3},
    "ppo": {},
}


def run(folder: Path, name: str, *, keep: bool) -> Path:
    """Two steps of two passes each."""
    recipe = tiny_recipe(
        folder,
        algorithm={"name": name, **ALGORITHMS[name]},
        rewards=[{"path": f"{folder}/dice.py:dice"}],
        update={"learning_rate": 1e-2, "tokens_per_microbatch": 128, "measure_entropy": True, **PASSES},
        run={"num_steps": 2, "folder": str(folder / "run"), "threads": 1, "keep_token_columns": keep},
    )
    return posttrain.train(posttrain.load_recipe(recipe)).folder


@pytest.mark.parametrize("name", ALGORITHMS)
def test_columns_of_every_update_agree_with_the_metrics_and_change_no_number(name: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    on, off = run(tmp_path / "on", name, keep=True), run(tmp_path / "off", name, keep=False)
    kept = sorted((on / "token_columns").iterdir())
    assert [path.name for path in kept] == ["step-000001.parquet", "step-000002.parquet"]
    assert not (off / "token_columns").exists()
    means = {"ratio": "ratio/mean", "entropy": "entropy"}
    own = {"grpo": {"kl": "kl", "clipped": "clip_ratio/region_mean"}, "ppo": {"value/loss": "value/loss"}}
    means |= own[name]  # PPO's policy does not move yet
    for path, line in zip(kept, metrics_of(on)[1:], strict=True):
        table = parquet.read_table(path).to_pydict()
        assert set(table["update"]) == set(range(1, int(line["num_updates"]) + 1))
        for column, metric in means.items():
            values = [value for row in table[column] for value in row]
            assert len(values) == line["tokens/trained"]
            assert sum(values) / len(values) == pytest.approx(line[metric], rel=1e-5, abs=1e-8)
        assert ("new_values" in table) == (name == "ppo")
        rollouts = parquet.read_table(on / "rollouts" / path.name).to_pylist()
        sampled = {(row["draw"], row["sample"]): row for row in rollouts}
        for draw, sample, behaviour in zip(
            *(table[each] for each in ("draw", "sample", "behaviour_logprobs")), strict=True
        ):
            assert behaviour == sampled[draw, sample]["logprobs"]
    for path in kept:
        path.unlink()
    kept[0].parent.rmdir()
    require_same(on, off)
