"""Which sandboxes there are here, and having programs run in one of them for a while."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from posttrain.options.sandbox import SandboxOptions
from posttrain.sandbox import sandboxes as shared
from posttrain.sandbox.backends import UNSHARED


def bubblewrap_works() -> bool:
    """Whether it can make namespaces at all here; that ours then holds is for the tests to show."""
    command = ["bwrap", "--ro-bind", "/", "/", *UNSHARED, "--proc", "/proc", "--", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_bubblewrap = pytest.mark.skipif(not bubblewrap_works(), reason="bubblewrap is not installed, or not allowed here")


@contextmanager
def chosen(options: SandboxOptions) -> Iterator[None]:
    shared.choose(options)
    try:
        yield
    finally:
        shared.choose(SandboxOptions())
