"""`posttrain doctor` through the real command."""

from dataclasses import replace

import pytest

from posttrain.cli import main
from posttrain.sandbox import process_pool as pools
from posttrain.sandbox.fork_server import ForkServerClient, ServerLost
from posttrain.sandbox.probes import PROBES


def test_it_shows_the_machine_and_every_probe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for name in ("python", "torch", "memory", "Landlock", "safe: every probe passed"):
        assert name in said
    assert all(f"refused   {probe.name}" in said for probe in PROBES)


def test_a_sandbox_that_is_not_safe_or_does_not_start_is_told_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "ForkServerClient", lambda options: ForkServerClient(replace(options, sealed=False)))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "NOT SAFE  read a file" in said
    assert "NOT SAFE: no program will be run here" in said

    def broken(_: object) -> ForkServerClient:
        raise ServerLost("it was not to be")

    monkeypatch.setattr(pools, "ForkServerClient", broken)
    assert main(["doctor"]) == 1
    assert "does not start: it was not to be" in capsys.readouterr().out


def test_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "please"]) == 2
    assert "please: no such recipe" in capsys.readouterr().err
