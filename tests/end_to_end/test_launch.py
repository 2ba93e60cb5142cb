"""`posttrain launch` starts what `placement` names, names what fails first, and leaves nothing behind."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.commands.launch import launch_of, require_this_machine, typed_words
from posttrain.commands.launching.processes import (
    PlacedProcess,
    require_free_addresses,
    show_until_end,
    started,
    wait_until_ready,
)
from posttrain.commands.launching.ray_processes import started_by_ray
from posttrain.config import load_recipe
from posttrain.errors import RunError, UserError

SERVER = """
import http.server, os, sys, time
time.sleep(float(sys.argv[2]))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_): pass
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


@pytest.fixture
def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def server(folder: Path, port: int, *, name: str = "engine-0", delay: float = 0.0) -> PlacedProcess:
    file = folder / "server.py"
    file.write_text(SERVER)
    command = (sys.executable, str(file), str(port), str(delay))
    return PlacedProcess(name=name, command=command, health=f"http://127.0.0.1:{port}/health")


def program(text: str, name: str = "trainer") -> PlacedProcess:
    return PlacedProcess(name=name, command=(sys.executable, "-c", text))


def is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{number}/stat").read_text().split()[2] != "Z"


def test_the_trainer_starts_once_servers_are_ready_and_all_end_with_it(tmp_path, free_port, capfd):
    with started([server(tmp_path, free_port, delay=0.3)], tmp_path / "logs", stop_seconds=5) as servers:
        wait_until_ready(servers, 20)
        with started([program("print('step 1')")], tmp_path / "logs", stop_seconds=5) as (trainer,):
            assert show_until_end(trainer, servers) == 0
        number = servers[0].handle.pid
        assert is_running(number)
    assert not is_running(number)
    assert "step 1" in capfd.readouterr().out
    assert (tmp_path / "logs" / "engine-0.log").read_text() == "listening\n"


def test_a_server_that_ends_before_it_is_ready_is_named_with_its_last_words(tmp_path, free_port):
    broken = PlacedProcess(
        name="engine-1",
        command=(sys.executable, "-c", "import sys; sys.exit('no such model')"),
        health=f"http://127.0.0.1:{free_port}/health",
    )
    with (
        started([server(tmp_path, free_port + 1, delay=30), broken], tmp_path, stop_seconds=5) as servers,
        pytest.raises(RunError) as error,
    ):
        wait_until_ready(servers, 20)
    assert "engine-1: ended with exit code 1" in str(error.value)
    assert "no such model" in str(error.value)


def test_a_server_that_never_answers_is_named_with_its_address(tmp_path, free_port):
    silent = PlacedProcess(
        name="environment",
        command=(sys.executable, "-c", "import time; time.sleep(60)"),
        health=f"http://127.0.0.1:{free_port}/health",
    )
    with started([silent], tmp_path, stop_seconds=5) as running, pytest.raises(RunError) as error:
        wait_until_ready(running, 0.3)
    assert f"environment: did not answer http://127.0.0.1:{free_port}/health within 0.3 seconds" in str(error.value)


def test_the_server_that_ended_before_the_trainer_failed_is_named_first(tmp_path):
    dying = program("import sys; sys.exit('out of memory')", name="engine-0")
    failing = program("import time, sys; time.sleep(1); sys.exit('no server is left')")
    with (
        started([dying], tmp_path, stop_seconds=5) as servers,
        started([failing], tmp_path, stop_seconds=5) as (trainer,),
        pytest.raises(RunError) as error,
    ):
        show_until_end(trainer, servers)
    assert str(error.value).startswith("engine-0: ended with exit code 1, before the trainer failed")
    assert "out of memory" in str(error.value)


def test_a_process_that_ignores_the_signal_is_killed_and_so_are_its_children(tmp_path):
    stubborn = program(
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    with started([stubborn], tmp_path, stop_seconds=0.3) as (process,):
        while not process.log.read_text().strip():
            time.sleep(0.05)
        child = int(process.log.read_text())
    assert not is_running(process.handle.pid)
    until = time.monotonic() + 5
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(child)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a process that is killed")
def test_children_end_when_the_launcher_is_killed(tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from posttrain.commands.launching.processes import PlacedProcess, started\n"
        "sleeper = PlacedProcess(name='sleeper', command=(sys.executable, '-c', 'import time; time.sleep(60)'))\n"
        "with started([sleeper], Path(sys.argv[1]), stop_seconds=5) as (running,):\n"
        "    print(running.handle.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    launcher = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    until = time.monotonic() + 10
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(child)


def test_actors_of_ray_hold_the_same_processes(tmp_path, free_port, capfd):
    pytest.importorskip("ray", reason="Ray (pip install 'posttrain[ray]') is not part of the test environment")
    with started_by_ray([server(tmp_path, free_port)], tmp_path / "logs", stop_seconds=5) as servers:
        wait_until_ready(servers, 30)
        failing = program("import sys; print('step 1'); sys.exit(3)")
        absent = PlacedProcess(name="environment", command=("no-such-program",))
        with (
            pytest.raises(UserError, match="environment: no-such-program: No such file or directory"),
            started_by_ray([absent], tmp_path / "logs", stop_seconds=5),
        ):
            pass
        with (
            started_by_ray([failing], tmp_path / "logs", stop_seconds=5) as (trainer,),
            pytest.raises(RunError, match="trainer: ended with exit code 3"),
        ):
            show_until_end(trainer, servers)
    assert "step 1" in capfd.readouterr().out


def test_dry_run_prints_commands_that_can_be_typed(capsys):
    flags = ["--placement.engines.count", "2", "--placement.trainer.ranks", "2", "--model.dtype", "float32"]
    assert main(["launch", "countdown-tiny", *flags, "--dry-run"]) == 0
    first, second, trainer = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert first == shlex.split(
        "posttrain serve bundled --rl --host 127.0.0.1 --port 8100 --model.dtype float32 --seconds 600"
    )
    assert second == shlex.split(
        "posttrain serve bundled --rl --host 127.0.0.1 --port 8101 --model.dtype float32 --seconds 600"
    )
    assert trainer[:3] == ["posttrain", "rl", "countdown-tiny"]
    urls = trainer.index("--engine.urls")
    assert trainer[urls + 1 : urls + 3] == ["http://127.0.0.1:8100", "http://127.0.0.1:8101"]
    assert trainer[-2:] == ["--ranks", "2"]


def test_without_servers_the_trainer_samples_by_itself():
    launch = launch_of(load_recipe("countdown-tiny"), ["countdown-tiny"])
    assert launch.servers == ()
    assert launch.trainer.typed == "posttrain rl countdown-tiny"


def test_a_command_of_ones_own_gets_model_host_and_port(tmp_path):
    placement = {"engines": {"count": 1, "command": "serve-it {model} --at {host}:{port}", "port": 9000}}
    config = load_recipe("countdown-tiny", placement=placement)
    (engine,) = launch_of(config, []).servers
    assert engine.command == ("serve-it", "bundled", "--at", "127.0.0.1:9000")
    assert engine.health == "http://127.0.0.1:9000/health"


def test_servers_are_dealt_out_to_machines_and_found_there_by_the_trainer():
    engines = {"count": 3, "hosts": ["node-1", "fd00::2"], "port": 9000}
    environment = {"command": "play --at {host}:{port}", "host": "node-3"}
    config = load_recipe("countdown-tiny", placement={"engines": engines, "environment": environment})
    launch = launch_of(config, [])
    assert [each.health.removesuffix("/health") for each in launch.servers] == [
        "http://node-1:9000",
        "http://[fd00::2]:9000",
        "http://node-1:9001",
        "http://node-3:8300",
    ]
    assert launch.servers[-1].command == ("play", "--at", "node-3:8300")
    assert "--environment.url ws://node-3:8300/ws" in launch.trainer.typed


def test_servers_of_other_machines_are_not_started_here(tmp_path, capsys):
    flags = ["--placement.engines.count", "3", "--placement.engines.hosts", "127.0.0.1", "192.0.2.1", "no-host.invalid"]
    assert main(["launch", "countdown-tiny", *flags, "--run.folder", str(tmp_path / "run")]) == 2
    refusal = "hosts = 192.0.2.1 no-host.invalid: launch only starts processes on this machine.  Add --dry-run"
    assert refusal in capsys.readouterr().err
    require_this_machine(load_recipe("countdown-tiny").placement)
    for engines in ({"count": 1, "hosts": ["localhost"]}, {"count": 1, "hosts": ["192.0.2.1"], "command": "ssh it"}):
        require_this_machine(load_recipe("countdown-tiny", placement={"engines": engines}).placement)


def test_a_server_that_answers_already_is_not_taken_for_ours(tmp_path, free_port):
    mine = server(tmp_path, free_port)
    with started([mine], tmp_path / "logs", stop_seconds=5) as others:
        wait_until_ready(others, 20)
        with pytest.raises(UserError, match=f"something already answers at http://127.0.0.1:{free_port}/health"):
            require_free_addresses([mine])


def test_health_is_asked_without_a_proxy(tmp_path, free_port, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with started([server(tmp_path, free_port)], tmp_path / "logs", stop_seconds=5) as servers:
        wait_until_ready(servers, 20)


def test_braces_of_json_stay_in_a_command():
    command = "serve {model} --config '{\"port\": 1}' --port {port}"
    assert typed_words(command, {"model": "a b", "port": "9"}) == [
        "serve",
        "a b",
        "--config",
        '{"port": 1}',
        "--port",
        "9",
    ]


@pytest.mark.parametrize(
    "placement",
    [
        {"evaluation": {"engine": True}},
        {"engines": {"kind": "vllm"}},
        {"engines": {"count": 2, "python": "python3"}},
        {"engines": {"count": 2, "port": 65535}},
        {"environment": {"port": 9000}},
        {"environment": {"host": "node-1"}},
        {"engines": {"hosts": ["node-1"]}},
        {"engines": {"count": 1, "hosts": []}},
    ],
)
def test_options_that_would_do_nothing_are_refused(placement):
    with pytest.raises(UserError):
        load_recipe("countdown-tiny", placement=placement)
