"""Collecting ahead without a whole run: when rewards are called, which losses allow it, and a replay of it."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.algorithms.table import build_algorithm
from posttrain.errors import RunError
from posttrain.generation.http import probe
from posttrain.models.loading.saving import ExportedWeights
from posttrain.options.rollout import RolloutOptions
from posttrain.runs.alarms import GAP, GAP_LIMIT
from posttrain.runs.progress import Clock
from posttrain.training.ahead import CollectedApart, CollectorAhead
from posttrain.training.collector import Collector, discard_scores
from posttrain.training.metrics import FIRST_ALONE as GAP_MEAN
from posttrain.training.run_replay import replay
from posttrain.training.session import CallerObjects
from posttrain.training.staleness import reads_behaviour
from tests.end_to_end.test_ahead import Elsewhere, ahead_config
from tests.support.dice import dice
from tests.support.http_engines import servers
from tests.support.own_objects import ROWS, policy_of
from tests.support.refusals import refused
from tests.support.runs import metrics_of
from tests.support.stages import stages_with
from tests.support.tiny import tiny_policy


def test_a_reward_that_waits_for_its_step_is_called_as_soon_as_the_step_is_asked_for() -> None:
    made = stages_with().collector
    settings = replace(made.settings, rollout=RolloutOptions(max_staleness=1), num_steps=6)
    ahead = CollectorAhead(Collector(made.task, Elsewhere(tiny_policy(), 0), made.rewards, settings))
    called = threading.Event()

    def call() -> None:
        with ahead.one_at_a_time(4):
            called.set()

    threading.Thread(target=call, daemon=True).start()
    assert not called.wait(0.1)
    with CollectedApart() as apart:
        raise RunError("enough")
    ahead._done[4] = apart
    with refused("enough", error=RunError):
        ahead.collect(4, discard_scores, Clock())
    assert called.wait(5)


@pytest.mark.parametrize(
    ("algorithm", "reads"),
    [
        ({"name": "grpo"}, True),
        ({"name": "grpo", "correction": {"level": None, "mask_low": 0.5, "mask_high": 2}}, True),
        ({"name": "grpo", "correction": {"level": "token", "mask_level": "token", "mask_low": 0.5}}, True),
        ({"name": "grpo", "ratio_to": "reference", "correction": {"level": None, "mask_high": 2}}, True),
        ({"name": "grpo", "ratio_to": "reference"}, False),
        ({"name": "distill", "teacher": {"model": "some/model"}}, False),
    ],
)
def test_the_loss_is_tried_for_what_it_reads(algorithm: Mapping[str, Any], reads: bool) -> None:
    assert reads_behaviour(build_algorithm(algorithm)) is reads


def test_a_replay_needs_neither_the_servers_nor_the_environment_of_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "NUM_SEQUENCES", 2)
    (tmp_path / "again.py").write_text(
        "import posttrain\n\nclass Again:\n    stop_texts = ('a', 'e', 'o', 't')\n\n"
        "    def reset(self, row, seed):\n        return 'Go on. '\n\n"
        "    def reply(self, said):\n        return posttrain.Reply(' more ', reward=1.0)\n"
    )
    monkeypatch.chdir(tmp_path)
    with servers(policy_of(model)) as (server,):
        config = ahead_config(
            model,
            tmp_path / "run",
            1,
            engine={"name": "http", "urls": [server.url]},
            environment={"path": "again.py:Again"},
            rollout={"max_turns": 3},
            run={"num_steps": 2},
        )
        posttrain.train(config, policy=policy_of(model), rewards=[dice], rows=ROWS)
    (tmp_path / "again.py").unlink()
    caller = CallerObjects(policy=policy_of(model), rewards=[dice], rows=ROWS)
    assert replay(config, caller).equal


class KeepsItsWeights(Elsewhere):
    """An engine that states the new version and samples from the first weights."""

    def load(self, weights: ExportedWeights, version: int) -> None:
        self.inner.load(weights, version)


def test_sampler_and_trainer_are_compared_at_every_step_even_where_all_its_tokens_are_old(
    model: Path, tmp_path: Path
) -> None:
    config = ahead_config(model, tmp_path / "sound", 2)
    posttrain.train(config, policy=policy_of(model), rewards=[dice], rows=ROWS)
    lines = metrics_of(tmp_path / "sound")[1:]
    assert any(line.get("staleness/mean", 0) >= 1 for line in lines), "all tokens of a step are old"
    assert all(0 < line[GAP] < line[GAP_LIMIT] for line in lines)
    assert all(line[GAP_MEAN] <= line[GAP] for line in lines)
    config, policy = ahead_config(model, tmp_path / "unsound", 2), policy_of(model)
    engine = KeepsItsWeights(policy_of(model), 0)
    with refused("sampler and trainer", "for 3 steps", error=RunError):
        posttrain.train(config, policy=policy, engine=engine, rewards=[dice], rows=ROWS)
