"""Weights that are loaded while completions are under way."""

import copy
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from posttrain.generation.engine import SamplingTimeout
from posttrain.generation.request import Continuation, Request, Sampled, StreamKey
from posttrain.models.forward import Completions, PlainForward
from posttrain.models.policy import Policy
from posttrain.options.rollout import SamplingParams
from posttrain.records import Finish
from tests.engine.test_continuation import NATIVE, PATHS, Counted, behind, engine_of, everything, of_prompts
from tests.support.tiny import tiny_policy

REQUEST = Request(sampling=SamplingParams(), key=StreamKey(4, "test", 2))


def moved(policy: Policy, seed: int) -> None:
    """An update that changes log-probs by tenths of a nat."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def recomputed(policy: Policy, done: list[Sampled]) -> list[float]:
    """log-probs of all their tokens under these weights, by one forward pass over whole rows."""
    plain = PlainForward(policy.model, policy.compute_dtype)
    read = Completions([each.continuation.prefix for each in done], [each.tokens for each in done], range(len(done)))
    with torch.no_grad():
        return replace(policy, forward=plain, forward_reason="").completion_logprobs(read).tolist()


def gaps(done: list[Sampled], says: list[list[float]]) -> list[float]:
    """Distance of each token's log μ from what the version that its span names says, in nats."""
    versions = [version for each in done for version, count in each.versions for _ in range(count)]
    sampled = [value for each in done for value in each.logprobs]
    return [abs(sampled[at] - says[version][at]) for at, version in enumerate(versions)]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_each_token_has_the_log_prob_of_the_weights_that_its_span_names(path: str, keep: bool) -> None:
    """Two updates amid 64 completions, of which some decode, some wait, some are prefilled and some are done."""
    engine = engine_of(path, max_rows=40, policy=tiny_policy("qwen3", torch.float32))
    policy, done = engine.policy, list[Sampled]()
    weights = [copy.deepcopy(policy)]
    with engine.open(replace(REQUEST, keep=keep)) as sampling:
        sampling.put(of_prompts((3, 7, 1, 12, 2, 9, 4, 5), size=8, limit=24))
        for version in (1, 2):
            for _ in range(6):
                with suppress(SamplingTimeout):
                    done += sampling.take(0)
            moved(policy, version)
            weights.append(copy.deepcopy(policy))
            engine.load(None, version)
        done = everything(sampling, 64 - len(done)) + done
    assert {len(each.versions) for each in done} == {1, 2, 3}
    assert {version for each in done for version, _ in each.versions} == {0, 1, 2}
    says = [recomputed(each, done) for each in weights]
    assert max(gaps(done, says)) < 1e-4
    assert max(gaps(done, [*says[1:], says[0]])) > 0.1, (
        "the updates move log-probs, so that another version would be seen"
    )


@pytest.mark.parametrize("path", PATHS)
def test_what_is_kept_of_older_weights_is_not_read_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One completion was taken and its cache kept, one is done and not taken, one is continued and has not begun."""
    engine = engine_of(path, policy=tiny_policy("qwen3", torch.float32))
    policy = engine.policy
    counted = Counted(engine, monkeypatch)
    with engine.open(replace(REQUEST, keep=True)) as sampling:
        sampling.put(of_prompts((20,), size=2, limit=3))
        first = everything(sampling, 2)
        sampling.put([behind(first[1], (5,), 3)])
        moved(policy, 1)
        engine.load(None, 1)
        before = len(counted.prefilled)
        sampling.put([behind(first[0], (6,), 3)])
        done = everything(sampling, 2)
    assert sum(map(len, counted.prefilled[before:])) == 2
    assert max(gaps(done, [recomputed(policy, done)] * 2)) < 1e-4


@pytest.mark.parametrize("path", ["decoder", *NATIVE])
def test_a_row_in_the_middle_of_given_tokens_goes_on_with_the_rest_of_them(path: str) -> None:
    policy = tiny_policy("qwen3", torch.float32)
    engine = engine_of(path, policy=policy)
    with engine.open(replace(REQUEST, keep=True)) as sampling:
        sampling.put(of_prompts((20,), size=1, limit=3))
        (first,) = everything(sampling, 1)
        sampling.put([behind(first, (5, 6, 7, 8), 3)])
        with pytest.raises(SamplingTimeout):
            sampling.take(0)  # the last sampled token goes through the model
        moved(policy, 1)
        engine.load(None, 1)
        (second,) = everything(sampling, 1)
    assert second.versions == ((1, len(second.tokens)),)
    assert max(gaps([second], [recomputed(policy, [second])] * 2)) < 1e-4


@pytest.mark.parametrize("path", PATHS)
def test_loading_equal_weights_changes_no_completion(path: str) -> None:
    """Also while one is read by a second sampling; the streams are the same, and so is the place in them."""
    wanted = of_prompts((3, 7, 1, 12), limit=9)
    expected = everything_of(path, wanted, loads=0)
    actual = everything_of(path, wanted, loads=3)
    for mine, other in zip(actual, expected, strict=True):
        assert (mine.tokens, mine.finish) == (other.tokens, other.finish)
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-12)
    assert any(len(each.versions) == 4 for each in actual)
    assert all(each.finish in (Finish.STOP, Finish.LENGTH) for each in actual)


def everything_of(path: str, wanted: list[Continuation], loads: int) -> list[Sampled]:
    engine, done = engine_of(path), list[Sampled]()
    with engine.open(REQUEST) as first, engine.open(REQUEST) as other:
        first.put(wanted)
        other.put(wanted)
        for version in range(1, loads + 1):
            for sampling, into in ((first, done), (other, list[Sampled]())):
                with suppress(SamplingTimeout):
                    into += sampling.take(0)
            engine.load(None, version)
        other.close()
        return sorted(
            done + everything(first, len(wanted) - len(done)),
            key=lambda each: each.continuation.draw * 99 + each.continuation.sample,
        )
