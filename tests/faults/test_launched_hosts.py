"""`posttrain launch` and the commands of its page, typed on hosts: the runs that they make, and what is left behind."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.commands import printed
from tests.support.hosts import Host, hosts, needs_hosts
from tests.support.openenv_server import echo_server
from tests.support.pages import blocks
from tests.support.runs import command, metrics_of, require_same, save_tiny_model, tiny_recipe

pytestmark = [needs_hosts, pytest.mark.scale]
ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
ENVIRONMENT = f"{sys.executable} {ROOT}/tests/support/openenv_server.py {{host}} {{port}}"
VARIABLES = {"POSTTRAIN_SERVE_TOKEN": "a-secret-of-these-tests", "OMP_NUM_THREADS": "1"}
SECONDS = 280


@pytest.fixture
def four() -> Iterator[list[Host]]:
    with hosts("node-0", "node-1", "node-2", "node-3") as made:
        yield made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    save_tiny_model(folder / "model")
    return folder


def typed(host: Host, text: str, folder: Path, name: str, **variables: str) -> subprocess.Popen[bytes]:
    return host.type(text, folder, log=folder / f"{name}.log", environment={**VARIABLES, **variables})


def ended(process: subprocess.Popen[bytes], log: Path) -> str:
    """What a process printed that ended well."""
    code = process.wait(SECONDS)
    said = log.read_text()
    assert code == 0, said
    return said


def wait_until_healthy(host: Host, address: str, server: subprocess.Popen[bytes], folder: Path) -> None:
    waits = typed(host, f"until curl -sf {address} > /dev/null; do sleep 0.3; done", folder, "waits")
    while waits.poll() is None:
        assert server.poll() is None, "it ended before it was ready"
        time.sleep(0.1)


def small_recipe(folder: Path) -> None:
    """The recipe of the page, of two quick steps."""
    (page,) = (text for _, name, text in blocks((GUIDES / "launch.md").read_text()) if name == "placed.yaml")
    recipe = yaml.safe_load(page)
    recipe["run"] |= {"num_steps": 2, "curves": False, "threads": 1}
    recipe["task"] |= {"held_out_size": 4}
    recipe["rollout"] = {"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 6}
    recipe["evaluation"] = {"samples": 1}
    folder.mkdir(exist_ok=True)
    (folder / "placed.yaml").write_text(yaml.safe_dump(recipe))


def page_commands(page: str) -> tuple[list[str], list[str]]:
    """The dry run of launch.md, as it is typed and what it prints."""
    (shown,) = (text for _, _, text in blocks(page) if "--placement.engines.hosts" in text)
    first, *lines = shown.splitlines()
    return shlex.split(first.removeprefix("$ posttrain ")), lines


def test_the_commands_that_the_page_shows_train_over_servers_of_other_hosts(place, four, monkeypatch):
    folder = place / "page"
    small_recipe(folder)
    monkeypatch.chdir(folder)
    asked, lines = page_commands((GUIDES / "launch.md").read_text())
    assert printed(*asked).splitlines() == lines
    *servers, trainer = lines
    for number, text in enumerate(servers, start=1):
        assert f"--host node-{number} " in text
        server = typed(four[number], text, folder, f"server-{number}")
        wait_until_healthy(four[0], f"http://node-{number}:8100/health", server, folder)
    said = ended(typed(four[0], trainer, folder, "trainer"), folder / "trainer.log")
    assert "by PUT" in said
    assert "left out" not in said
    assert [line["step"] for line in metrics_of(folder / "runs" / "placed")] == [0, 1, 2]


def test_the_server_of_an_environment_is_on_a_host_of_its_own(place, four):
    options = {"options": {"action": "message"}}
    talks = {"environment": options, "rollout": {"max_turns": 3, "max_completion_tokens": 6}}
    with echo_server() as server:
        whole = tiny_recipe(place / "whole", **{**talks, "environment": {"url": server.url, **options}})
        assert (done := command("rl", whole, folder=place / "whole")).code == 0, done.err
    folder = place / "environment"
    recipe = tiny_recipe(folder, **talks)
    flags = ("--placement.environment.command", ENVIRONMENT, "--placement.environment.host", "node-3")
    environment, trainer = printed("launch", recipe, *flags, "--dry-run").splitlines()
    server = typed(four[3], environment, folder, "environment")
    wait_until_healthy(four[0], "http://node-3:8300/health", server, folder)
    ended(typed(four[0], trainer, folder, "trainer"), folder / "trainer.log")
    require_same(folder / "run", place / "whole" / "run")


def test_ranks_of_two_hosts_are_started_by_the_commands_of_the_page(place, four):
    folder = place / "torchrun"
    small_recipe(folder)
    (shown,) = (text for _, _, text in blocks((GUIDES / "sharding.md").read_text()) if "--nnodes" in text)
    shown = shown.replace("countdown-tiny", "placed.yaml")
    started = [typed(host, shown, folder, host.name) for host in four[:2]]
    logs = [folder / f"{host.name}.log" for host in four[:2]]
    said = [ended(process, log) for process, log in zip(started, logs, strict=True)]
    assert "step 2" in said[0]
    run = folder / re.findall(r"--run.folder (\S+)", shown)[0]
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2]
    assert len([*(run / "checkpoints" / "step-000002").glob("shard-*")]) == 2


SRUN = """#!/bin/bash
# Runs a command on the host that --nodelist names, as srun does.
for word; do
    case $word in
        --nodelist=*) host=${word#*=}; shift;;
        --*) shift;;
        *) break;;
    esac
done
child= ; trap 'kill $child' TERM
nsenter --target=$(cat "$HOSTS/$host") --net --uts --mount -- bash -c 'cd "$0" && exec "$@"' "$PWD" "$@" & child=$!
wait $child; code=$?; wait $child; exit $code
"""
SCONTROL = "#!/bin/bash\ntr , '\\n' <<< \"$3\"\n"


def test_the_script_for_slurm_runs_with_a_stand_in_for_srun(place, four, tmp_path):
    folder = place / "slurm"
    small_recipe(folder)
    (script,) = (text for _, name, text in blocks((GUIDES / "launch.md").read_text()) if name == "placed.sh")
    (folder / "placed.sh").write_text(script)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for host in four:
        (tmp_path / host.name).write_text(str(host.holder))
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOSTS": str(tmp_path), "SLURM_JOB_NODELIST": "node-2,node-1"}
    job = typed(four[2], "bash placed.sh", folder, "job", **path)
    said = ended(job, folder / "job.log")
    assert "http://node-1:8100" in said
    assert [line["step"] for line in metrics_of(folder / "runs" / "placed")] == [0, 1, 2]
    require_empty(four)


def require_empty(made: list[Host], *, seconds: float = 10) -> None:
    """Nothing runs on a host after that time: what gets a signal may take it."""
    until = time.monotonic() + seconds
    while any(host.processes() for host in made) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [host.processes() for host in made if host.processes()]


PATIENT = """
import time
from pathlib import Path

calls = []

def patient(completions, **columns):
    calls.append("call")
    if len(calls) == 3:
        Path(__file__).with_name("in_step_3").touch()
        time.sleep({seconds})
    return [float(len(text)) for text in completions]
"""


def launched(host: Host, folder: Path, *, seconds: float = 0.0) -> subprocess.Popen[bytes]:
    """Everything that a recipe can place, on one host."""
    placement = {
        "trainer": {"ranks": 2},
        "engines": {"count": 1},
        "evaluation": {"engine": True},
        "environment": {"command": ENVIRONMENT},
        "stop_seconds": 60,
    }
    rewards = [{"path": f"{folder}/patient.py:patient"}]
    recipe = tiny_recipe(folder, placement=placement, rewards=rewards, rollout={"max_turns": 2})
    (folder / "patient.py").write_text(PATIENT.format(seconds=seconds))
    return typed(host, f"exec posttrain launch {recipe}", folder, "launch")


def test_launch_starts_all_that_a_recipe_places_and_leaves_nothing_behind(place, four):
    folder = place / "all"
    said = ended(launched(four[0], folder), folder / "launch.log")
    logs = folder / "run-logs"
    names = {"engine-0.log", "engine-evaluation.log", "environment.log", "trainer.log"}
    assert {each.name for each in logs.iterdir()} == names
    assert "step 4" in said
    assert (logs / "trainer.log").read_text() in said
    require_empty(four)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_launch_that_is_ended_in_a_step_leaves_nothing_behind(place, four, number):
    folder = place / number.name
    process = launched(four[0], folder, seconds=3)
    until = time.monotonic() + SECONDS
    while not (folder / "in_step_3").exists():
        assert process.poll() is None, (folder / "launch.log").read_text()
        assert time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(number)
    process.wait(60)
    require_empty(four, seconds=60)
    if number == signal.SIGINT:  # servers wait for the trainer; where launch is killed, all get their signal at once
        assert process.returncode == 130
        assert "stopped after step 3; everything is saved" in (folder / "run-logs" / "trainer.log").read_text()
        assert "posttrain launch --resume" in (folder / "launch.log").read_text()
