"""The probe that looks for our environment where programs run finds it there, whoever else probes at the same time."""

import os
import threading
from pathlib import Path

import pytest

from posttrain.sandbox import replay_sandbox
from posttrain.sandbox.backends import CommandBackend, Container
from posttrain.sandbox.execution import Process
from posttrain.sandbox.probes import Finding, MachineBait, SandboxUnavailable, of_environment, probes
from posttrain.sandbox.remote import Remote
from posttrain.sandbox.replay_sandbox import ReplaySandbox
from tests.support.refusals import refused

# Called as a container's command is, `... --entrypoint python3 IMAGE ARGUMENTS`: runs the arguments on this machine.
NO_CONTAINER = """#!/bin/sh
while [ "$1" != "--entrypoint" ]; do [ $# = 0 ] && exit 0; shift; done
shift 3
exec {keeps} python3 "$@"
"""
NAME = "see an environment that is not its own"


def place(tmp_path: Path, *, leaks: bool) -> CommandBackend:
    """What is taken for a container, and gives programs our environment or none."""
    script = tmp_path / "docker"
    script.write_text(NO_CONTAINER.format(keeps="" if leaks else f'env -i "PATH={os.environ["PATH"]}"'))
    script.chmod(0o755)
    return Container(str(script), "image")


def found(backend: CommandBackend, bait: MachineBait) -> Finding:
    probe = of_environment(bait)
    sandbox = ReplaySandbox(backend, at_once=1, probed=True, canary=bait.canary)
    (execution,) = sandbox.run([Process(kind="program", source=probe.source, limits=probe.limits)])
    return Finding(probe, execution)


@pytest.mark.parametrize("leaks", [True, False])
def test_a_place_that_hands_our_environment_on_is_found_out(leaks: bool, tmp_path: Path) -> None:
    before = dict(os.environ)
    with MachineBait() as bait:
        assert dict(os.environ) == before
        finding = found(place(tmp_path, leaks=leaks), bait)
    assert finding.passed != leaks, finding.line()


def test_each_of_several_that_probe_at_once_finds_its_own_canary(tmp_path: Path) -> None:
    backend, findings = place(tmp_path, leaks=True), []
    with MachineBait() as first:
        with MachineBait() as second:
            threads = [
                threading.Thread(target=lambda bait=bait: findings.append(found(backend, bait)))
                for bait in (first, second)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        findings.append(found(backend, first))  # when the other has gone
    assert [finding.passed for finding in findings] == [False] * 3


def test_it_is_tried_where_programs_are_started_here_and_nowhere_else(tmp_path: Path) -> None:
    with MachineBait() as bait:
        names = [
            [probe.name for probe in probes(bait, backend)]
            for backend in (place(tmp_path, leaks=False), Remote("http://127.0.0.1:1"))
        ]
    assert [each.count(NAME) for each in names] == [1, 0]


def test_probing_a_place_has_the_canary_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # This probe alone: the others would do to this machine what they try, for nothing here keeps programs in.
    monkeypatch.setattr(replay_sandbox, "probes", lambda bait, backend: [of_environment(bait)])
    with refused(f"NOT SAFE  {NAME}", error=SandboxUnavailable):
        ReplaySandbox(place(tmp_path, leaks=True), at_once=2).probe()
