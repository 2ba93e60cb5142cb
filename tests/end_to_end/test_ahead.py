"""Steps that are collected ahead: the bound, whatever the timing; order, errors, signals, resume and replay."""

import random
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.errors import RunError, UserError
from posttrain.generation.engine import Sampling, SamplingTimeout
from posttrain.generation.http import probe
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation, Request, Sampled
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy
from posttrain.training.run_replay import replay
from posttrain.training.session import CallerObjects
from tests.support.accidents import Accident
from tests.support.dice import dice
from tests.support.http_engines import ready
from tests.support.own_objects import ROWS, config_for, policy_of
from tests.support.refusals import mentions, refused
from tests.support.runs import command, metrics_of, records, rollout_rows, start, start_program, tiny_recipe

STEPS = 6


class Elsewhere:
    """An engine with a copy of the weights, whose completions come back late: each after as many takes as dice say."""

    reproducible, logprob_gap, suppresses, patience_seconds = True, None, True, 60.0

    def __init__(self, policy: Policy, seed: int) -> None:
        self.inner, self.dice = InProcessEngine(policy), random.Random(seed)
        self.tokenizer, self.stop_ids, self.max_positions = policy.tokenizer, policy.stop_ids, policy.max_positions
        self.in_use = threading.Lock()
        """Held in each call: two at once would be an error."""

    @property
    def weights_version(self) -> int:
        return self.inner.weights_version

    def load(self, weights: ExportedWeights, version: int) -> None:
        with alone(self.in_use):
            self.inner.policy.model.load_state_dict(dict(weights.merged()), strict=False)
            self.inner.load(weights, version)

    def open(self, request: Request) -> Sampling:
        with alone(self.in_use):
            return Late(self.inner.open(request), self)


def alone(lock: threading.Lock) -> threading.Lock:
    assert not lock.locked(), "an engine is used by one thread at a time"
    return lock


class Late(Sampling):
    def __init__(self, inner: Sampling, engine: Elsewhere) -> None:
        self.inner, self.engine = inner, engine
        self.late: list[tuple[int, Sampled]] = []

    def put(self, continuations: Sequence[Continuation]) -> None:
        with alone(self.engine.in_use):
            self.inner.put(continuations)

    def take(self, seconds: float) -> list[Sampled]:
        until = time.monotonic() + seconds
        with alone(self.engine.in_use):
            while True:
                with suppress(SamplingTimeout, UserError):  # the latter where all is done, and late
                    self.late += [(self.engine.dice.choice((0, 3, 12, 40)), each) for each in self.inner.take(0)]
                done = [each for left, each in self.late if left == 0]
                self.late = [(left - 1, each) for left, each in self.late if left]
                if done:
                    return done
                if time.monotonic() > until:
                    raise SamplingTimeout("late", seconds, len(self.late))
                time.sleep(0.0005)

    def release(self, sampled: Iterable[Sampled]) -> None:
        self.inner.release(sampled)

    def close(self) -> None:
        self.inner.close()


def ahead_config(model: Path, folder: Path, staleness: int, **sections: Mapping[str, Any]) -> posttrain.Config:
    given: dict[str, Mapping[str, Any]] = {
        "rollout": {"max_completion_tokens": 12, "max_staleness": staleness},
        "checkpoint": {"every_steps": 1, "keep_last": 9},
        "run": {"num_steps": STEPS, "curves": False},
        "update": {"learning_rate": 3e-3},
    }
    for name, options in sections.items():
        given[name] = {**given.get(name, {}), **options}
    return config_for(model, folder, **given)


def versions_after(run: Path) -> list[int]:
    """The version of the weights after each step, 0 the first."""
    counts = [int(line.get("num_updates", 0)) for line in metrics_of(run)]
    return [sum(counts[: step + 1]) for step in range(len(counts))]


def token_versions(row: Mapping[str, Any]) -> list[int]:
    spans = row.get("weights_versions") or [(0, row["weights_version"])]
    starts = [first for first, _ in spans[1:]] + [len(row["tokens"])]
    return [version for (first, version), end in zip(spans, starts, strict=True) for _ in range(first, end)]


def require_bound(run: Path, staleness: int) -> list[int]:
    """How many steps old the weights of each token are; none is older than the bound, and none is of the future."""
    after, ages = versions_after(run), list[int]()
    for step in range(1, STEPS + 1):
        oldest = after[max(0, step - 1 - staleness)]
        for row in rollout_rows(run, step):
            versions = token_versions(row)
            assert all(oldest <= version <= after[step - 1] for version in versions), (step, versions, after)
            ages += [step - 1 - max(at for at in range(step) if after[at] == version) for version in versions]
    return ages


def drawn(run: Path) -> list[tuple[int, int, int, str]]:
    return [
        (step, row["draw"], row["sample"], row["prompt_id"])
        for step in range(1, STEPS + 1)
        for row in rollout_rows(run, step)
    ]


def trained(model: Path, folder: Path, staleness: int, seed: int, **sections: Mapping[str, Any]) -> posttrain.Config:
    config = ahead_config(model, folder, staleness, **sections)
    engine = Elsewhere(policy_of(model), seed)
    posttrain.train(config, policy=policy_of(model), engine=engine, rewards=[dice], rows=ROWS)
    return config


@pytest.fixture(scope="module")
def in_order(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without steps ahead."""
    run = tmp_path_factory.mktemp("in order") / "run"
    trained(model, run, 0, seed=0)
    assert set(require_bound(run, 0)) == {0}
    return run


@pytest.mark.parametrize("staleness", [1, 2])
def test_no_token_is_older_than_the_bound_whatever_the_timing_is(
    model: Path, tmp_path: Path, in_order: Path, staleness: int
) -> None:
    ages: set[int] = set()
    for seed in range(2):
        run = tmp_path / f"{seed}"
        config = trained(model, run, staleness, seed)
        ages |= set(require_bound(run, staleness))
        assert drawn(run) == drawn(in_order)
        stale = [line["staleness/max"] for line in metrics_of(run) if "staleness/max" in line]
        assert stale
        assert max(stale) <= staleness
        caller = CallerObjects(policy=policy_of(model), rewards=[dice], rows=ROWS)
        assert replay(config, caller).equal
    assert ages == set(range(staleness + 1)), "the bound is reached, and not by all tokens"
    assert not [each.name for each in threading.enumerate() if each.name in ("sampler", "collector")]


@pytest.mark.parametrize("sections", [{}, {"algorithm": {"name": "dapo", "overlong": None}}], ids=["grpo", "refills"])
def test_with_weights_that_stay_the_completions_are_those_of_steps_in_order(
    model: Path, tmp_path: Path, sections: Mapping[str, Any]
) -> None:
    """In process, with more completions than rows, and an evaluation between the tokens of later steps."""
    runs = []
    for staleness in (0, 2):
        still = {"update": {"learning_rate": 1e-30}, "evaluation": {"every_steps": 2, "samples": 1}, **sections}
        config = ahead_config(model, tmp_path / f"{staleness}", staleness, rollout={"max_rows": 7}, **still)
        posttrain.train(config, policy=policy_of(model), rewards=[dice], rows=ROWS, held_out_rows=ROWS[:2])
        runs.append(tmp_path / f"{staleness}")
    for step in range(1, STEPS + 1):
        rows = [[(row["tokens"], row["score/dice"]) for row in rollout_rows(run, step)] for run in runs]
        assert rows[0] == rows[1]
    assert records(runs[0] / "scores.jsonl") == records(runs[1] / "scores.jsonl")
    measured = [
        [{name: line[name] for name in line if name.startswith("eval/")} for line in metrics_of(run)] for run in runs
    ]
    assert measured[0] == measured[1]
    assert sum(map(bool, measured[0])) == 1 + STEPS // 2
    assert max(require_bound(runs[1], 2)) > 0


class Again:
    """Writes something behind a turn, twice."""

    stop_texts = ("a", "e", "i", "o", "t", "n")

    def reset(self, row: Mapping[str, object], seed: int) -> str:
        self.count = seed % 2
        return "Go on. "

    def reply(self, said: str) -> posttrain.Reply | None:
        self.count += 1
        return posttrain.Reply(" more ", reward=float(len(said) % 3)) if self.count < 3 else None


def test_conversations_share_the_sampling_and_are_replayed(model: Path, tmp_path: Path) -> None:
    """Replies overlap with the updates; given tokens of replies have no version, and every sampled one has."""
    config = ahead_config(model, tmp_path, 2, rollout={"max_rows": 9, "max_turns": 4}, run={"num_steps": 4})
    posttrain.train(config, policy=policy_of(model), rewards=[dice], rows=ROWS, environment=Again)
    after, num_turns = versions_after(tmp_path), 0
    for step in range(1, 5):
        for row in rollout_rows(tmp_path, step):
            spans = row.get("weights_versions") or [(0, row["weights_version"])]
            assert all(after[max(0, step - 3)] <= version <= after[step - 1] for _, version in spans)
            num_turns += len(row["turns"]) if isinstance(row.get("turns"), list) else row["sampled"].count(False) > 0
    assert num_turns > 10
    caller = CallerObjects(policy=policy_of(model), rewards=[dice], rows=ROWS, environment=Again)
    assert replay(config, caller).equal


def test_servers_sample_ahead_and_new_weights_reach_them_in_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "NUM_SEQUENCES", 2)
    policy = policy_of(model)
    config = ahead_config(model, tmp_path, 2, evaluation={"every_steps": 2, "samples": 1})
    with ready(policy, 2) as (engine, _):
        posttrain.train(config, policy=policy, engine=engine, rewards=[dice], rows=ROWS, held_out_rows=ROWS[:2])
    assert set(require_bound(tmp_path, 2)) > {0}
    caller = CallerObjects(policy=policy_of(model), rewards=[dice], rows=ROWS, held_out_rows=ROWS[:2])
    assert replay(config, caller).equal


def test_steps_in_order_load_nothing_of_this(tmp_path: Path) -> None:
    ours = "[each for each in sys.modules if each.endswith(('.ahead', '.shared_sampling'))]"
    ran = start_program(f"import posttrain.training.rl, sys; print({ours})", folder=tmp_path, logs=tmp_path).ended()
    assert ran.out.strip() == "[]"


def fails_in(step: int, error: Exception, completions: list[str], trainer_state: Any, **columns: object) -> list[float]:
    if trainer_state.global_step == step - 1:
        raise error
    return dice(completions)


@pytest.mark.parametrize("step", [2, 4])
def test_an_error_in_a_thread_stops_the_run_with_its_own_message(model: Path, tmp_path: Path, step: int) -> None:
    reward = partial(fails_in, step, ZeroDivisionError("no such luck"))
    reward.__name__ = "unlucky"  # type: ignore[attr-defined]
    config = ahead_config(model, tmp_path, 2)
    with pytest.raises(RunError) as error:
        posttrain.train(config, policy=policy_of(model), rewards=[reward], rows=ROWS)
    mentions(str(error.value), f"step {step}: ", "no such luck", f"The last good checkpoint is {tmp_path}")
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(step))


class Breaks(Elsewhere):
    """An engine that dies in the middle of the third step."""

    def load(self, weights: ExportedWeights, version: int) -> None:
        super().load(weights, version)
        if version == 2:
            self.dice = None  # type: ignore[assignment]


def test_an_engine_that_dies_ends_the_run(model: Path, tmp_path: Path) -> None:
    config, engine = ahead_config(model, tmp_path, 1), Breaks(policy_of(model), 0)
    with pytest.raises(AttributeError, match="choice"):
        posttrain.train(config, policy=policy_of(model), engine=engine, rewards=[dice], rows=ROWS)


def test_an_algorithm_without_a_ratio_to_what_sampled_is_refused(model: Path, tmp_path: Path) -> None:
    against_reference = {"algorithm": {"name": "grpo", "ratio_to": "reference"}}
    config = ahead_config(model, tmp_path, 1, **against_reference)
    with refused("rollout.max_staleness = 1", "grpo", "algorithm.correction"):
        posttrain.train(config, policy=policy_of(model), rewards=[dice], rows=ROWS)
    assert not (tmp_path / "metrics.jsonl").exists()


AHEAD: dict[str, Mapping[str, Any]] = {
    "rollout": {"max_staleness": 2, "max_completion_tokens": 12},
    "checkpoint": {"every_steps": 3, "keep_last": 9},
    "run": {"num_steps": STEPS},
    "update": {"learning_rate": 3e-3},
}


def test_a_killed_run_samples_no_finished_step_again_and_is_replayed_to_the_bit(folder: Path) -> None:
    place = folder / "killed"
    accident = Accident(moment="os.rename rollouts/.tmp-step-000006.parquet 1")  # the last checkpoint is of step 3
    assert command("rl", tiny_recipe(place, **AHEAD), folder=place, accident=accident).code == -signal.SIGKILL
    run = place / "run"
    finished = [rollout_rows(run, step) for step in (4, 5)]
    lines = records(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    resumed = command("rl", "--resume", run, folder=place)
    assert resumed.code == 0, resumed.err
    mentions(resumed.out, "Resumed after step 3.", "Steps 4-5 were trained on again from their rollout files")
    assert [rollout_rows(run, step) for step in (4, 5)] == finished
    assert records(run / "metrics.jsonl")[: len(lines)] == lines
    scored = [(line["step"], line["draw"]) for line in records(run / "scores.jsonl")]
    assert sorted(scored) == [(step, draw) for step in range(1, STEPS + 1) for draw in range(4)]
    replayed = command("replay", run, folder=place)
    assert replayed.code == 0, replayed.out
    assert replayed.out.splitlines() == [f"step {step}: equal in every bit" for step in (0, 3, 6)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_and_the_rest_is_resumed(folder: Path, number: int) -> None:
    place = folder / f"signal {number}"
    accident = Accident(moment="os.rename rollouts/.tmp-step-000003.parquet 1", signal=number)
    stopped = command("rl", tiny_recipe(place, **AHEAD), folder=place, accident=accident)
    assert stopped.code == 130, stopped.err
    mentions(stopped.out, "stopped after step 3; everything is saved")
    assert [line["step"] for line in records(place / "run" / "scores.jsonl")][-1] == 3
    assert command("rl", "--resume", place / "run", folder=place).code == 0
    assert command("replay", place / "run", folder=place).code == 0
    assert len(metrics_of(place / "run")) == STEPS + 1


SLOW = """
import time
from pathlib import Path
from dice import dice

HERE = Path(__file__).parent

def slow(completions, trainer_state, **columns):
    if trainer_state.global_step == 3:
        (HERE / "grading").touch()
        time.sleep(600)
    return dice(completions)
"""


def test_a_second_signal_does_not_wait_for_a_reward(folder: Path) -> None:
    place = folder / "twice"
    recipe = tiny_recipe(place, **AHEAD, rewards=[{"path": f"{place}/slow.py:slow"}])
    (place / "slow.py").write_text(SLOW)
    running = start("rl", recipe, folder=place)
    running.wait_until(lambda: (place / "grading").exists() and len(metrics_of(place / "run")) == 4)
    running.signal(signal.SIGINT)
    time.sleep(0.2)
    running.signal(signal.SIGINT)
    assert running.ended(timeout=30).code == 130
