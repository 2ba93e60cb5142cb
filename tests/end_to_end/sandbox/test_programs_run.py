"""A run on programs through the real command, and the settings of the sandbox."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import main
from posttrain.options.sandbox import SandboxOptions
from posttrain.rewards.code.code_reward import CodeReward
from posttrain.rewards.grading.grade import grade, reward_function
from posttrain.rewards.grading.resources import Resources
from posttrain.runs.run_folder import RunFolder
from posttrain.sandbox import process_pool as pools
from posttrain.sandbox.execution import Process, ServerOptions
from posttrain.sandbox.probes import SandboxUnavailable
from posttrain.sandbox.process_pool import ForkServerClient, ProcessPool
from posttrain.sandbox.sandboxes import Sandboxes
from tests.support.commands import refusal
from tests.support.refusals import refused, warned
from tests.support.reward_rows import group
from tests.support.runs import records

QUICK = ["--run.num-steps", "1", "--rollout.max-completion-tokens", "8", "--rollout.prompts-per-step", "2"]


def answered(program: str) -> str:
    """The beginning of an answer that gives this program, whatever the model writes after it."""
    return f"<think></think>\n```python\n{program}\n```\n"


def journals(folder: Path, *flags: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """What a step of the bundled recipe writes down: the scores of its groups, and the metrics of all its lines."""
    assert main(["rl", "recipes/programs-tiny.yaml", "--run.folder", str(folder), *QUICK, *flags]) == 0
    scores, metrics = (records(folder / f"{name}.jsonl") for name in ("scores", "metrics"))
    return scores, {name: value for line in metrics for name, value in line.items()}


def shares(metrics: dict[str, float]) -> dict[str, float]:
    return {name.split("/")[-1]: share for name, share in metrics.items() if name.startswith("outcomes/code/")}


def test_the_recipe_runs_and_logs_how_programs_fared(tmp_path: Path) -> None:
    prefill = ["--task.prefill", answered("raise KeyError"), "--task.held-out-size", "2"]
    scores, metrics = journals(tmp_path / "run", *prefill)
    assert "kind: sealed" in (tmp_path / "run" / "config.yaml").read_text()
    # Every program compiles and passes no test, for which the recipe pays 0.05.
    assert [groups["scores"]["code"] for groups in scores] == [[0.05] * 4] * 2
    assert [groups["outcomes"]["code"] for groups in scores] == [["raised"] * 4] * 2
    assert metrics["rewards/code/mean"] == pytest.approx(0.05)
    assert shares(metrics) == {"raised": 1.0}


def test_the_journal_tells_which_problem_a_program_solved_and_the_metrics_how_often(tmp_path: Path) -> None:
    cases = [{"args": [1, 2], "expected": 3}, {"args": [30, 4], "expected": 34}]
    problems = {
        "add": {"kind": "calls", "entry": "add", "cases": cases},
        "half": {"kind": "calls", "entry": "add", "cases": [cases[0], {"args": [30, 4], "expected": 0}]},
        "subtract": {"kind": "calls", "entry": "subtract", "cases": cases},
    }
    rows = [json.dumps({"id": name, "prompt": name, "tests": tests}) for name, tests in problems.items()]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "apart.jsonl").write_text(rows[0].replace('"prompt": "add"', '"prompt": "add up"'))
    files = ["--task.path", str(tmp_path / "rows.jsonl"), "--task.held-out-path", str(tmp_path / "apart.jsonl")]
    prefill = ["--task.prefill", answered("def add(a, b): return a + b")]
    scores, metrics = journals(tmp_path / "run", *files, *prefill, "--rollout.prompts-per-step", "3")
    found = {
        groups["prompt_id"].split(":")[-1]: {*zip(groups["scores"]["code"], groups["outcomes"]["code"], strict=True)}
        for groups in scores
    }
    # Both cases pass; one of two; and of a function that is not there none, which compiles.
    assert found == {"1": {(1.0, "passed")}, "2": {(0.5, "wrong")}, "3": {(0.05, "raised")}}
    assert metrics["rewards/code/mean"] == pytest.approx((1 + 0.5 + 0.05) / 3)
    assert shares(metrics) == {outcome: pytest.approx(1 / 3) for outcome in ("passed", "wrong", "raised")}
    assert metrics["eval/accuracy_greedy"] == 1.0  # the problem that is held out is solved whatever the model adds


def test_the_journal_tells_every_test_of_every_program(tmp_path: Path) -> None:
    columns = {
        "tests": {"kind": "asserts", "entry": "f", "tests": ["assert f(1) == 1", "assert f(300000) > 5", "f(3)"]}
    }
    programs = ["def f(n): return sum(range(n))", "def f(n): return n if n < 3 else 1 / 0", "def f(n"]
    rows = [group([f"```python\n{source}\n```" for source in programs], columns=columns)]
    with RunFolder.create(tmp_path / "run", "") as folder:
        for score in ("fraction", "binary"):
            reward = reward_function(CodeReward(score=score), text_only=True)
            grade(rows, [reward], journal=lambda groups, grades: folder.journal_scores(1, groups, grades))
    lines = (tmp_path / "run" / "scores.jsonl").read_text().splitlines()
    fraction, binary = (json.loads(line)["details"]["CodeReward"] for line in lines)
    told = [[test["outcome"] for test in each["tests"]] for each in fraction]
    assert told == [["wrong", "passed", "passed"], ["passed", "raised", "raised"], ["syntax_error"] * 3]
    told = [[test["outcome"] for test in each["tests"]] for each in binary]
    assert told == [["wrong", "not_run", "not_run"], ["passed", "raised", "not_run"], ["syntax_error"] * 3]
    first = fraction[0]
    assert 0.001 < first["tests"][1]["cpu_seconds"] < 0.5  # the sum of 300,000 numbers, in the program's own process
    assert first["tests"][2]["cpu_seconds"] < first["tests"][1]["cpu_seconds"]
    assert first["memory_bytes"] > 1 << 20


def test_running_without_a_sandbox_takes_two_words_and_warns_every_time() -> None:
    with refused("programs_may_do_anything: true as well"):
        SandboxOptions(kind="none")
    with refused("is only for kind = none"):
        SandboxOptions(programs_may_do_anything=True)
    nothing = SandboxOptions(kind="none", programs_may_do_anything=True)
    for _ in range(2):
        with warned("with your files and your network"):
            open_to_all = Sandboxes(nothing)
    reads = Process(kind="program", source="print(open('/proc/self/stat').read() > '')")
    with open_to_all, Sandboxes() as sealed:
        (execution,) = open_to_all.importing().run([reads])
        assert execution.stdout == b"True\n"  # so it is: nothing keeps a program from reading files
        (execution,) = sealed.importing().run([reads])
        assert b"PermissionError" in execution.stderr


def test_what_a_program_leaves_behind_without_a_sandbox_holds_nobody_up() -> None:
    options = ServerOptions(modules=("os", "time"), sealed=False)
    leaves = "import os, time\nprint('parent', flush=True)\nif os.fork() == 0:\n    time.sleep(4)\n"
    with ProcessPool(options) as pool:
        (execution,) = pool.run([Process(kind="program", source=leaves)])
    assert execution.stdout == b"parent\n"
    assert execution.wall_seconds < 3


def test_a_sandbox_that_is_not_safe_stops_a_run_that_counts_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "ForkServerClient", lambda options: ForkServerClient(replace(options, sealed=False)))
    tests = {"tests": {"kind": "stdio", "cases": [{"input": "", "output": "1"}]}}
    rows = [group(["```python\nprint(1)\n```"] * 4, columns=tests)]
    with Resources() as resources, refused("Remedy", error=SandboxUnavailable):
        grade(rows, [reward_function(CodeReward(), text_only=True)], on_error="none", resources=resources)


def test_the_recipe_says_so_too() -> None:
    assert "programs_may_do_anything" in refusal("config", "recipes/programs-tiny.yaml", "--sandbox.kind", "none")
