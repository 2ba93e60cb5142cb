"""What decides a score beside the arguments: where programs run, and what they can import there."""

from dataclasses import replace

import pytest

from posttrain.options.reward import RewardOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.rewards.grading import score_cache as cache
from posttrain.rewards.reward_registry import load_reward

PLACES = {
    "sealed": SandboxOptions(),
    "bubblewrap": SandboxOptions(kind="bubblewrap"),
    "container": SandboxOptions(kind="container"),
    "image": SandboxOptions(kind="container", image="python:3.13-slim"),
    "command": SandboxOptions(kind="container", command="podman"),
    "url": SandboxOptions(kind="remote", url="http://127.0.0.1:1"),
    "other url": SandboxOptions(kind="remote", url="http://127.0.0.1:2"),
}


def test_a_score_from_another_sandbox_is_not_taken() -> None:
    function = load_reward(RewardOptions(name="code"))
    seen = {}
    for name, options in PLACES.items():
        seen[name] = tuple(cache.identity(function, options))
        assert tuple(cache.identity(function, replace(options, at_once=3))) == seen[name]
    assert len(set(seen.values())) == len(PLACES)


def test_a_score_with_another_version_of_a_module_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    function = load_reward(RewardOptions(name="code", options={"modules": ["numpy.linalg", "json"]}))
    before = cache.identity(function, SandboxOptions())
    assert sum(each.startswith("numpy==") for each in before) == 1
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0")
    cache.installed_versions.cache_clear()
    assert cache.identity(function, SandboxOptions()) != before
    cache.installed_versions.cache_clear()
