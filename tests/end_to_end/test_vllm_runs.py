"""Runs over vLLM, where `make test-vllm` has started one: its log-probs are the trainer's after every update."""

import os
from pathlib import Path

import pytest

import posttrain
from posttrain.errors import RunError, UserError
from posttrain.runs.alarms import GAP
from tests.support.rl_server import ADDRESS, MODEL, NATS, any_server, own_server
from tests.support.runs import metrics_of, rollout_rows, tiny_recipe

pytestmark = pytest.mark.skipif(ADDRESS not in os.environ, reason="needs vLLM's server: make test-vllm")


def config(folder: Path, **sections: object) -> posttrain.Config:
    given = {"model": {"path": os.environ[MODEL]}, "engine": {"name": "http", "urls": [os.environ[ADDRESS]]}}
    return posttrain.load_recipe(tiny_recipe(folder, **{**given, **sections}))


def largest_gap(folder: Path) -> float:
    """Between sampler and trainer, over all steps that had an update: vLLM's random numbers may leave all rewards of a
    step equal."""
    return max(step[GAP] for step in metrics_of(folder / "run")[1:] if step["num_updates"])


def test_a_run_over_vllm_has_the_trainers_log_probs_at_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    posttrain.train(config(tmp_path / "case", rollout={"max_completion_tokens": 40}))
    steps = metrics_of(tmp_path / "case" / "run")[1:]
    assert len(steps) == 4
    assert largest_gap(tmp_path / "case") < NATS
    (version,) = {row["weights_version"] for row in rollout_rows(tmp_path / "case" / "run", 4)}
    assert version == sum(step["num_updates"] for step in steps[:3])
    told = capsys.readouterr().out
    assert "(vLLM, float32)" in told
    assert "weights as files in" in told


def test_an_adapter_is_added_to_its_base_for_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = {"path": os.environ[MODEL], "adapter": {"rank": 2}}
    posttrain.train(config(tmp_path / "case", model=adapter, rollout={"max_completion_tokens": 40}))
    assert largest_gap(tmp_path / "case") < NATS
    assert "adapter and base added up in float32" in capsys.readouterr().out


def test_vllm_and_a_server_of_ours_sample_for_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with own_server(Path(os.environ[MODEL]), tmp_path / "ours") as made:
        urls = [os.environ[ADDRESS], made.url]
        engine = {"name": "http", "urls": urls}
        posttrain.train(config(tmp_path / "case", engine=engine, rollout={"max_completion_tokens": 40}))
        assert int(made.info().weight_version) > 0
    assert largest_gap(tmp_path / "case") < NATS
    told = capsys.readouterr()
    assert "weights as files in" in told.out
    assert "or by PUT" in told.out
    assert "left out" not in told.err


def test_a_server_of_another_run_is_refused(tmp_path: Path) -> None:
    with any_server(tmp_path) as server:
        assert server.take("ann: /runs/1", 60)[0] == 200
        try:
            with pytest.raises(RunError, match="this server samples for ann: /runs/1"):
                posttrain.train(config(tmp_path / "case"))
        finally:
            server.take("ann: /runs/1", 0)


def test_a_cut_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    cut = config(tmp_path / "case", rollout={"top_k": 5, "allow_cut_sampling": True})
    with pytest.raises(UserError, match="before the cut"):
        posttrain.train(cut)
