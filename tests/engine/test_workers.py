"""Several cores decode rows of their own, and nobody can tell from what comes out (float64, where sums agree)."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from posttrain.generation import engine
from posttrain.generation.engine import Engine
from tests.tiny import request, some_prompts, through_its_own_forward, tiny_policy

LENGTHS = (3, 7, 1, 12)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is worth a core."""
    monkeypatch.setattr(engine, "ROWS_PER_WORKER", 1)


@contextmanager
def computing_on(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("family", "path"), [("qwen3", "decoder"), ("gpt2", "own_forward")])
@pytest.mark.parametrize("threads", [2, 3, 9])
def test_a_completion_does_not_depend_on_how_many_cores_decode(family: str, path: str, threads: int) -> None:
    # 4 prompts × 3, so nine threads are more than there are prompts.
    policy, prompts = tiny_policy(family), some_prompts(LENGTHS)
    expected = Engine(policy).rollout(prompts, request())
    counts: list[int] = []
    with computing_on(threads):
        assert engine.workers_for(policy, 12, len(prompts)) == min(threads, 4)
        subject = Engine(through_its_own_forward(policy) if path == "own_forward" else policy, max_rows=5)
        actual = subject.rollout(prompts, request(), advance=counts.append)
        assert torch.get_num_threads() == threads
    assert counts == [1] * 12
    for mine, other in zip(actual, expected, strict=True):
        assert mine.draw == other.draw
        for a, b in zip(mine.rollouts, other.rollouts, strict=True):
            assert (a.sample, a.tokens) == (b.sample, b.tokens)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-12)


@pytest.mark.usefixtures("eager")
def test_an_error_in_one_core_ends_the_rollout() -> None:
    def interrupting(count: int) -> None:
        raise InterruptedError

    with computing_on(2):
        with pytest.raises(InterruptedError):
            Engine(tiny_policy()).rollout(some_prompts(LENGTHS), request(), advance=interrupting)
        assert torch.get_num_threads() == 2
