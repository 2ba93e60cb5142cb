"""What holds for every test here: what failed is tried again at once, and no worker or cache outlives its test."""

from collections.abc import Iterator

import pytest

from posttrain.rewards.grading.resources import default_resources


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("posttrain.rewards.grading.grade.RETRY_WAITS_SECONDS", (0.0, 0.0))
    default_resources().close()
    yield
    default_resources().close()
