"""Which sandboxes there are here, and having programs run in one of them for a while."""

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import pytest

from posttrain.options.sandbox import SandboxOptions
from posttrain.rewards.code.code_reward import CodeReward
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.resources import Resources, default_resources
from posttrain.sandbox.backends import UNSHARED


def bubblewrap_works() -> bool:
    """Whether it can make namespaces at all here; that ours then holds is for the tests to show."""
    command = ["bwrap", "--ro-bind", "/", "/", *UNSHARED, "--proc", "/proc", "--", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_bubblewrap = pytest.mark.skipif(not bubblewrap_works(), reason="bubblewrap is not installed, or not allowed here")


CHOSEN: ContextVar[Resources | None] = ContextVar("chosen", default=None)


@contextmanager
def chosen(options: SandboxOptions) -> Iterator[None]:
    """Have `scored` run programs in such a sandbox."""
    with Resources(options) as resources:
        before = CHOSEN.set(resources)
        try:
            yield
        finally:
            CHOSEN.reset(before)


def scored(reward: CodeReward, sources: list[str], tests: object) -> list[Graded | ScoringFailure]:
    """What programs are worth where they are run that are looked at now: sealed, unless something else is chosen."""
    found = reward.with_resources(CHOSEN.get() or default_resources())(
        completions=[f"```python\n{source}\n```" for source in sources],
        finish_reasons=["stop"] * len(sources),
        tests=[tests] * len(sources),
    )
    assert isinstance(found, list)
    return found


def outcomes(found: Iterable[Graded | ScoringFailure]) -> list[tuple[float | None, str]]:
    """Scores and outcomes, and whatever failed as just that."""
    return [(one.score, str(one.outcome)) if isinstance(one, Graded) else (None, "failure") for one in found]


def graded(reward: CodeReward, sources: list[str], tests: object) -> list[tuple[float | None, str]]:
    return outcomes(scored(reward, sources, tests))
