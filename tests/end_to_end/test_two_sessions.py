"""Two runs in one process, one after the other and side by side in threads: each has what its own settings say."""

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet

import posttrain
from posttrain.errors import RunError
from posttrain.options.reward import RewardOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.rewards.code.code_reward import CodeReward
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.grade import grade, reward_function
from posttrain.rewards.grading.resources import Resources, default_resources
from posttrain.rewards.judge_reward import JudgeReward
from posttrain.training.session import CallerObjects, open_session
from tests.support.faulty_endpoint import Endpoint, endpoint, says
from tests.support.own_objects import config_for
from tests.support.refusals import refused
from tests.support.reward_rows import group
from tests.support.worker_rows import function_of

READS = "```python\nopen('/etc/passwd')\nprint(1)\n```\n"
"""Passes its test only where a program may read files: without a sandbox."""
PRINTS_ONE = {"kind": "stdio", "cases": [{"input": "", "output": "1"}]}
ROWS = [{"prompt": f"Read {n}. ", "tests": PRINTS_ONE} for n in range(3)]
OPEN: dict[str, Any] = {"kind": "none", "programs_may_do_anything": True}
SEALED: dict[str, Any] = {"kind": "sealed", "at_once": 1}


@pytest.fixture(autouse=True)
def without_the_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="sandbox.kind = none")
        yield


def config(model: Path, folder: Path, sandbox: Mapping[str, object], **sections: Mapping[str, Any]) -> posttrain.Config:
    """A run whose completions all begin with the same program, tried against its test."""
    given: dict[str, Mapping[str, Any]] = {
        "task": {"prefill": READS},
        "rollout": {"max_completion_tokens": 2},
        "sandbox": sandbox,
    }
    made = config_for(model, folder, **{**given, **sections})
    return replace(made, rewards=[RewardOptions(name="code")])


def scores(run: posttrain.Run) -> set[float]:
    files = sorted((run.folder / "rollouts").glob("*.parquet"))
    return {row["score/code"] for file in files for row in parquet.read_table(file).to_pylist()}


def servers() -> set[str]:
    """The fork-servers that are children of this process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread or a process that has ended meanwhile
            for pid in (task / "children").read_text().split():
                if b"sandbox/inside" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(pid)
    return found


@dataclass
class Meets:
    """A reward that pays 0, writes down which fork-server its session has, and waits for the other run."""

    wait: Callable[[int], object]
    seen: list[int] = field(default_factory=list)

    def __call__(self, **columns: object) -> list[float]:
        raise AssertionError("called without the session's resources")

    def with_resources(self, resources: Resources) -> Callable[..., list[float]]:
        return partial(self.scores, resources)

    def scores(self, resources: Resources, *, completions: Sequence[str], **columns: object) -> list[float]:
        sealed = resources.sandboxes.options.kind == "sealed"
        found = CodeReward().with_resources(resources)(completions=[READS], finish_reasons=["stop"], tests=[PRINTS_ONE])
        assert [one.score for one in found if isinstance(one, Graded)] == [0.0 if sealed else 1.0]
        self.seen.append(next(iter(resources.sandboxes._pools.values())).opened().process.pid)
        self.wait(len(self.seen))
        return [0.0 for _ in completions]


def test_runs_side_by_side_have_sandboxes_of_their_own_to_the_end(model: Path, tmp_path: Path) -> None:
    both_run, first_is_over = threading.Barrier(2, timeout=60), threading.Event()
    short = Meets(lambda calls: calls == 1 and both_run.wait())

    def until_the_other_is_over(calls: int) -> None:
        if calls == 1:
            both_run.wait()
        else:
            assert first_is_over.wait(60)

    long = Meets(until_the_other_is_over)

    def run(name: str, sandbox: Mapping[str, object], reward: Meets, steps: int) -> posttrain.Run:
        options = {"num_steps": steps, "folder": str(tmp_path / name), "threads": 0}
        made = config(model, tmp_path / name, sandbox, run=options)
        try:
            return posttrain.train(made, rows=ROWS, rewards=[posttrain.reward_function(reward, weight=0.0)])
        finally:
            if reward is short:
                first_is_over.set()

    before = servers()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(run, "open", OPEN, short, 1)
        second = threads.submit(run, "sealed", SEALED, long, 3)
        assert scores(first.result(120)) == {1.0}
        assert scores(second.result(120)) == {0.0}
    assert len(set(short.seen)) == len(set(long.seen)) == 1, "a run keeps the server that it has"
    assert set(short.seen) != set(long.seen)
    assert servers() == before


def test_a_reward_that_is_called_outside_any_session_is_out_of_reach_of_sessions(model: Path, tmp_path: Path) -> None:
    def outside() -> tuple[float | None, int]:
        (found,) = CodeReward()(completions=[READS], finish_reasons=["stop"], tests=[PRINTS_ONE])
        assert isinstance(found, Graded)
        return found.score, next(iter(default_resources().sandboxes._pools.values())).opened().process.pid

    first = outside()
    assert first[0] == 0.0
    with open_session(config(model, tmp_path / "run", OPEN), CallerObjects(rows=ROWS)) as session:
        rows = [group([READS], columns={"tests": PRINTS_ONE})]
        assert grade(rows, session.rewards, resources=session.resources).rewards.item() == 1.0
        assert outside() == first
    assert outside() == first


def test_what_is_open_is_closed_when_nobody_holds_it_and_when_the_process_ends(tmp_path: Path) -> None:
    before = servers()
    resources = Resources(SandboxOptions(at_once=1))
    resources.sandboxes.importing().opened()
    assert len(servers() - before) == 1
    del resources
    gc.collect()
    assert servers() == before
    program = f"""
from posttrain.rewards.grading.resources import Resources, default_resources
from posttrain.rewards.grading.worker import WorkerPool
from posttrain.sandbox.process_pool import ProcessPool
from tests.support.worker_rows import function_of
from pathlib import Path
for kind in (ProcessPool, WorkerPool):
    kind.close = lambda self, close=kind.close: (close(self), print(type(self).__name__, flush=True))
kept = [Resources(), default_resources()]
for resources in kept:
    resources.sandboxes.importing().opened()
kept[0].pool_for(function_of(Path({str(tmp_path)!r}), "def mine(response):\\n    return 1.0\\n", workers=1))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["ProcessPool", "ProcessPool", "WorkerPool"]


def test_a_session_closes_its_workers_and_another_has_workers_of_its_own(tmp_path: Path) -> None:
    function = function_of(tmp_path, "import os\n\ndef mine(response):\n    return float(os.getpid())\n", workers=1)
    with Resources() as first, Resources() as second:
        of_each = [int(grade([group(["a"])], [function], resources=each).scores.item()) for each in (first, second)]
        assert len(set(of_each)) == 2
        first.close()
        assert not is_running(of_each[0])
        assert int(grade([group(["b"])], [function], resources=second).scores.item()) == of_each[1]
    assert not is_running(of_each[1])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def judging(model: Path, folder: Path, at: Endpoint, budget: int) -> posttrain.Config:
    judge = {"endpoint": at.url, "model": "j", "canary_every": 0, "at_once": 1, "token_budget": budget}
    made = config_for(
        model,
        folder,
        task={"held_out_share": 0.5, "prefill": "It is 7, as 3 + 4 = 7. "},
        evaluation={"samples": 1},
        grading={"cache_entries": 0},
    )
    return replace(made, rewards=[RewardOptions(name="judge", options=judge)])


PROMPTS = [{"prompt": f"What is {n}? "} for n in range(20)]


def num_asked(at: Endpoint) -> int:
    asked, at.asked[:] = len(at.asked), []
    return asked


def test_a_judge_budget_is_for_one_session_and_the_next_has_a_whole_one(model: Path, tmp_path: Path) -> None:
    with endpoint(says('{"score": 7}', tokens=60)) as at:
        posttrain.evaluate(model, judging(model, tmp_path, at, 10**9), rows=PROMPTS)
        asked = num_asked(at)
        assert asked >= 4
        enough = judging(model, tmp_path, at, 60 * (asked - 1) + 1)  # for the last call, and for none after it
        for _ in range(2):
            posttrain.evaluate(model, enough, rows=PROMPTS)
            assert num_asked(at) == asked
        with refused(f"{60 * (asked - 1):,} tokens", error=RunError):
            posttrain.evaluate(model, judging(model, tmp_path, at, 60 * (asked - 1)), rows=PROMPTS)


def test_two_rewards_of_one_session_have_a_budget_each() -> None:
    with endpoint(says('{"score": 7}', tokens=60)) as at, Resources() as resources:
        options = {"endpoint": at.url, "model": "j", "canary_every": 0, "token_budget": 50}
        rows = [group(["It is 7."])]
        for rubric in ("Is it right?", "Is it short?"):
            judge = JudgeReward(**options, rubric=rubric)
            assert grade(rows, [reward_function(judge, name="j")], resources=resources).rewards.item() == 0.7


def test_a_session_of_another_number_of_threads_waits_for_the_first(model: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()

    def session(threads: int) -> Any:
        return open_session(
            config_for(model, tmp_path, run={"threads": threads}), CallerObjects(rows=ROWS, rewards=[len_of])
        )

    with session(2) as first:
        assert torch.get_num_threads() == 2
        with refused("run.threads = 3", "uses 2") as refusal:
            session(3)
        assert refusal.value.exit_code == 2
        with session(2), session(0):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
        first.__exit__()
        assert torch.get_num_threads() == before
        with session(3):
            assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before


def test_a_session_that_cannot_be_opened_holds_no_threads_back(model: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    with refused("rewards", "none are given"):
        open_session(config_for(model, tmp_path, run={"threads": before + 1}), CallerObjects(rows=ROWS))
    assert torch.get_num_threads() == before


def len_of(completions: Sequence[str]) -> list[float]:
    return [float(len(text)) for text in completions]
