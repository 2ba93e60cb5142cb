"""Continuations: what a completion does not depend on, and the cache that it goes on from."""

import gc
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st

from posttrain.generation import in_process as engine_module
from posttrain.generation.decoder_steps import StaticSteps
from posttrain.generation.engine import Sampling, SamplingTimeout
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.model_steps import RecomputedSteps
from posttrain.generation.native_steps import NativeSteps
from posttrain.generation.request import Continuation, Request, Sampled, StreamKey
from posttrain.models.native.native_decoder import native_refusal
from posttrain.models.policy import Policy
from posttrain.options.rollout import SamplingParams
from posttrain.records import Finish
from tests.support.refusals import refused
from tests.support.tiny import some_prompts, through_its_own_forward, tiny_policy

REQUEST = Request(sampling=SamplingParams(), key=StreamKey(4, "test", 2))
TORCH_PATHS = ("decoder", "static", "own_forward", "recomputed")
ROUNDING = 1e-12
KERNEL = replace(tiny_policy("qwen3", torch.float32), native_reason=None)
NATIVE = ("native",) if native_refusal(KERNEL) is None else ()
PATHS = (*TORCH_PATHS, *NATIVE)


def engine_of(path: str, *, max_rows: int = 256, policy: Policy | None = None) -> InProcessEngine:
    """An engine that takes one kind of steps; the native one needs a policy in float32."""
    native = path.startswith("native")
    policy = policy or tiny_policy("qwen3", torch.float32 if native else torch.float64)
    policy = replace(policy, native_reason=None) if native else policy
    engine = InProcessEngine(through_its_own_forward(policy) if path == "own_forward" else policy, max_rows=max_rows)
    if native:
        engine._steps = NativeSteps(policy)
    if path == "native":
        engine._steps.most_steps = 1  # so that weights can be loaded between any two tokens
    if path in ("static", "recomputed"):
        engine._steps = StaticSteps(policy) if path == "static" else RecomputedSteps(policy)
    return engine


def of_prompts(lengths: Sequence[int], *, size: int = 3, limit: int = 12) -> list[Continuation]:
    return [
        Continuation(prefix=prompt.tokens, draw=draw, sample=sample, limit=limit)
        for draw, prompt in enumerate(some_prompts(lengths))
        for sample in range(size)
    ]


def place_of(sampled: Sampled) -> tuple[int, int]:
    return sampled.continuation.draw, sampled.continuation.sample


def everything(sampling: Sampling, count: int) -> list[Sampled]:
    """All that is open, in the order of draws and samples."""
    done: list[Sampled] = []
    while len(done) < count:
        done += sampling.take(60)
    return sorted(done, key=place_of)


def sampled_of(engine: InProcessEngine, continuations: Sequence[Continuation], request: Request) -> list[Sampled]:
    with engine.open(request) as sampling:
        sampling.put(continuations)
        return everything(sampling, len(continuations))


def assert_same(actual: Sequence[Sampled], expected: Sequence[Sampled], within: float = ROUNDING) -> None:
    for mine, other in zip(actual, expected, strict=True):
        assert (mine.tokens, mine.finish) == (other.tokens, other.finish)
        assert mine.logprobs == pytest.approx(other.logprobs, abs=within)


def joined(first: Sampled, second: Sampled) -> Sampled:
    """Two parts as one completion."""
    return replace(
        second,
        continuation=first.continuation,
        tokens=first.tokens + second.tokens,
        logprobs=first.logprobs + second.logprobs,
    )


def behind(first: Sampled, given: tuple[int, ...], limit: int) -> Continuation:
    """What continues a completion after some given tokens."""
    one = first.continuation
    return replace(
        one, prefix=first.sequence + given, first_position=one.first_position + len(first.tokens), limit=limit
    )


class Counted:
    """The tokens that go through the model, by prefill and by steps."""

    def __init__(self, engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefilled: list[list[int]] = []
        self.steps = 0
        made = engine_module.steps_for(engine.policy) if engine._steps is None else engine._steps
        prefill, step = made.prefill, made.step

        def counted_prefill(prompts: Sequence[Sequence[int]]) -> object:
            self.prefilled.append([len(each) for each in prompts])
            return prefill(prompts)

        def counted_step(tokens: torch.Tensor, slots: object) -> object:
            self.steps += len(tokens)
            return step(tokens, slots)

        monkeypatch.setattr(made, "prefill", counted_prefill)
        monkeypatch.setattr(made, "step", counted_step)
        engine._steps = made


ENGINES = {max_rows: engine_of("decoder", max_rows=max_rows) for max_rows in (2, 5, 256)}
EXPECTED = sampled_of(engine_of("decoder"), of_prompts((3, 7, 1, 12), limit=7), REQUEST)


@settings(max_examples=8)
@given(
    order=st.permutations(range(12)),
    puts=st.lists(st.integers(0, 5), max_size=8),
    max_rows=st.sampled_from([2, 5, 256]),
    keep=st.booleans(),
    let_go=st.integers(0, 3),
)
def test_a_completion_does_not_depend_on_what_else_is_put_or_when_or_in_which_order(
    order: list[int], puts: list[int], max_rows: int, keep: bool, let_go: int
) -> None:
    wanted = of_prompts((3, 7, 1, 12), limit=7)
    waiting, done, put = [wanted[place] for place in order], list[Sampled](), 0
    with ENGINES[max_rows].open(replace(REQUEST, keep=keep)) as sampling:
        for count in [*puts, len(wanted)]:
            sampling.put(waiting[put : put + count])
            put = min(put + count, len(wanted))
            if len(done) < put:
                done += sampling.take(60)
            sampling.release(done[:let_go])
        done = everything(sampling, len(wanted) - len(done)) + done
    assert_same(sorted(done, key=place_of), EXPECTED)


@pytest.mark.parametrize("path", [*PATHS, *(f"{path} in long calls" for path in NATIVE)])
def test_a_completion_alone_is_the_one_among_63_others(path: str) -> None:
    wanted = of_prompts((3, 7, 1, 12, 2, 9, 4, 5), size=8)
    together = sampled_of(engine_of(path), wanted, REQUEST)
    for place in (0, 21, 63):
        assert_same(sampled_of(engine_of(path), [wanted[place]], REQUEST), [together[place]])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("length", [1, 4])
def test_a_completion_that_is_cut_and_continued_is_the_one_in_one_piece(path: str, keep: bool, length: int) -> None:
    request = replace(REQUEST, keep=keep)
    expected = sampled_of(engine_of(path), of_prompts((3, 7, 1, 12), limit=12), request)
    with engine_of(path).open(request) as sampling:
        sampling.put(of_prompts((3, 7, 1, 12), limit=length))
        first = everything(sampling, 12)
        more = [each for each in first if each.finish is Finish.LENGTH]
        assert len(more) > 3
        sampling.put([behind(each, (), 12 - length) for each in more])
        second = {place_of(each): each for each in everything(sampling, len(more))}
    whole = [joined(each, second[place_of(each)]) if each in more else each for each in first]
    prefilled_in_float32 = path == "native" and not keep
    assert_same(whole, expected, within=1e-6 if prefilled_in_float32 else ROUNDING)


def test_a_continuation_at_the_first_position_draws_the_numbers_of_its_first_part_again() -> None:
    engine, cut = engine_of("decoder"), of_prompts((3, 7), size=8, limit=3)
    first = [each for each in sampled_of(engine, cut, REQUEST) if each.finish is Finish.LENGTH]
    behind_it = [behind(each, (), 6) for each in first]
    again = [replace(each, first_position=0) for each in behind_it]
    ours, theirs = sampled_of(engine, behind_it, REQUEST), sampled_of(engine, again, REQUEST)
    assert sum(a.tokens != b.tokens for a, b in zip(ours, theirs, strict=True)) > len(first) / 2


@pytest.mark.parametrize(
    ("path", "dtype"),
    [*product(TORCH_PATHS, (torch.float64, torch.float32)), *((path, torch.float32) for path in NATIVE)],
)
def test_given_tokens_go_on_from_the_cache_as_from_a_prefill(path: str, dtype: torch.dtype) -> None:
    def second(keep: bool) -> list[Sampled]:
        with engine_of(path, policy=tiny_policy("qwen3", dtype)).open(replace(REQUEST, keep=keep)) as sampling:
            sampling.put(of_prompts((20, 30, 25), limit=3))
            first = everything(sampling, 9)
            sampling.put([behind(each, (5, 6, 7)[: each.continuation.draw + 1], 6) for each in first])
            return everything(sampling, 9)

    kept, prefilled = second(True), second(False)
    assert [each.tokens for each in kept] == [each.tokens for each in prefilled]
    if dtype == torch.float64:
        assert_same(kept, prefilled)


@pytest.mark.parametrize("path", TORCH_PATHS)
def test_a_kept_row_runs_its_given_tokens_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(path)
    counted = Counted(engine, monkeypatch)
    with engine.open(replace(REQUEST, keep=True)) as sampling:
        sampling.put(of_prompts((20,), size=2, limit=1))
        first = everything(sampling, 2)
        assert (counted.prefilled, counted.steps) == ([[20]], 0)
        sampling.put([behind(each, (5, 6, 7), 1) for each in first])
        everything(sampling, 2)
    assert (counted.prefilled, counted.steps) == ([[20]], 2 * 4)  # the token sampled last, and the three given ones


def test_what_is_let_go_or_too_much_is_prefilled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("decoder")
    counted = Counted(engine, monkeypatch)
    with engine.open(replace(REQUEST, keep=True)) as sampling:
        sampling.put(of_prompts((20,), size=3, limit=1))
        first = everything(sampling, 3)
        sampling.release(first[:1])
        sampling.put([behind(each, given, 1) for each, given in zip(first, [(5,), (5,) * 10, (5,) * 11], strict=True)])
        everything(sampling, 3)
    assert counted.prefilled == [[20], [22, 32]]  # more given tokens than half of the 20 in the cache


def test_kept_rows_count_as_rows_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("decoder", max_rows=4)
    counted = Counted(engine, monkeypatch)
    with engine.open(replace(REQUEST, keep=True)) as sampling:
        sampling.put(of_prompts((9,), size=4, limit=2))
        first = everything(sampling, 4)
        assert len(sampling.kept) == 4
        sampling.put([replace(each, draw=7) for each in of_prompts((3,), size=1, limit=2)])
        everything(sampling, 1)
        kept = [each.continuation for each in first if (None, 0, each.continuation.sample) in sampling.kept]
        assert len(sampling.kept) == 4
        assert len(kept) == 3  # one gave its place to draw 7
        sampling.put([behind(each, (), 2) for each in first])
        everything(sampling, 4)
    assert [len(call) for call in counted.prefilled] == [1, 1, 1]


def test_only_one_of_two_that_continue_a_row_gets_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("decoder")
    counted = Counted(engine, monkeypatch)
    with engine.open(replace(REQUEST, keep=True)) as sampling:
        sampling.put(of_prompts((9,), size=1, limit=2))
        (first,) = everything(sampling, 1)
        other = replace(behind(first, (4,), 3), prefix=(*first.sequence[:-1], 9, 9))  # a prefix that parts before
        sampling.put([other])
        everything(sampling, 1)
    assert counted.prefilled == [[9], [len(other.prefix)]]


def test_equal_prefixes_are_prefilled_once_and_put_in_the_middle_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("decoder")
    counted = Counted(engine, monkeypatch)
    first, second = of_prompts((9,), size=4), [replace(each, draw=1) for each in of_prompts((6,), size=4)]
    with engine.open(REQUEST) as sampling:
        sampling.put(first)
        done = sampling.take(60)
        sampling.put(second)
        everything(sampling, 8 - len(done))
    assert counted.prefilled == [[9], [6]]


def test_a_take_that_waits_too_long_names_the_engine_and_the_seconds_and_may_be_repeated() -> None:
    engine = engine_of("decoder")
    with engine.open(REQUEST) as sampling:
        sampling.put(of_prompts((9,), size=2))
        with refused("InProcessEngine", "0 seconds", "2 are open", error=SamplingTimeout):
            sampling.take(0)
        assert len(everything(sampling, 2)) == 2


WRONG = {
    "no prefix": (
        Continuation(prefix=(), draw=0, sample=0, limit=1, name="prompt a"),
        ("prompt a, sample 0", "prefix of 0"),
    ),
    "no limit": (Continuation(prefix=(1,), draw=3, sample=2, limit=0), ("draw 3, sample 2", "limit = 0")),
    "no room": (Continuation(prefix=(1,) * 60, draw=0, sample=0, limit=5), ("limit = 5", "64", "1 to 4")),
    "unknown token": (Continuation(prefix=(1, 99), draw=0, sample=0, limit=1), ("99",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_continued_is_refused_before_anything_is_open(name: str) -> None:
    wrong, says = WRONG[name]
    with engine_of("decoder").open(REQUEST) as sampling:
        with refused(*says):
            sampling.put([*of_prompts((3,), size=1), wrong])
        with refused("nothing is open"):
            sampling.take(1)


def test_a_closed_sampling_samples_no_more_and_weights_are_loaded_between() -> None:
    engine = engine_of("decoder")
    sampling = engine.open(REQUEST)
    sampling.put(of_prompts((3,), size=1))
    sampling.close()
    sampling.close()
    with refused("closed"):
        sampling.take(1)
    engine.load(None, 1)
    (done,) = sampled_of(engine, of_prompts((3,), size=1), REQUEST)
    assert done.versions == ((1, len(done.tokens)),)


@pytest.mark.parametrize("path", PATHS)
def test_two_samplings_side_by_side_are_each_as_it_is_alone(path: str) -> None:
    engine, other = engine_of(path), replace(REQUEST, sampling=SamplingParams(greedy=True))
    both = of_prompts((3, 7, 1), limit=9)
    alone = [sampled_of(engine_of(path), both, each) for each in (REQUEST, other)]
    with engine.open(REQUEST) as first:
        first.put(both)
        with pytest.raises(SamplingTimeout):
            first.take(0)
        with engine.open(other) as second:
            second.put(both)
            done = everything(second, 9)
        assert_same(done, alone[1])
        assert_same(everything(first, 9), alone[0])


def test_steps_with_keys_of_their_own_share_a_sampling() -> None:
    engine, keys = engine_of("decoder"), [StreamKey(4, "test", step) for step in (2, 3)]
    wanted = [[replace(each, key=key) for each in of_prompts((3, 7), limit=7)] for key in keys]
    with engine.open(replace(REQUEST, key=StreamKey(0, "another", 0), keep=True)) as sampling:
        sampling.put([each for pair in zip(*wanted, strict=True) for each in pair])
        done = everything(sampling, 12)
        assert len(sampling.kept) == 12
    for key, expected in zip(keys, (sampled_of(engine, each, REQUEST) for each in wanted), strict=True):
        assert_same([each for each in done if each.continuation.key == key], expected)
    alone = sampled_of(engine, of_prompts((3, 7), limit=7), replace(REQUEST, key=keys[1]))
    assert_same([each for each in done if each.continuation.key == keys[1]], alone)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_closed_sampling_leaves_no_cache_behind(goes_on: bool) -> None:
    """An update that follows has the memory; a caller may still hold the sampling."""
    engine = InProcessEngine(tiny_policy())
    sampling = engine.open(replace(REQUEST, keep=True))
    sampling.put(of_prompts([3], size=1))
    (first,) = sampling.take(60)
    kept = [weakref.ref(each.cached[0]) for each in sampling.kept.values()]
    if goes_on:
        sampling.put([replace(first.continuation, prefix=first.sequence, first_position=len(first.tokens))])
    held = [weakref.ref(sampling.rows.slots), *kept]
    sampling.close()
    gc.collect()
    assert kept
    assert [each() for each in held] == [None] * len(held)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("max_rows", [4, 256])
@pytest.mark.parametrize("steps", [0, 3])
def test_what_is_dropped_is_gone_and_changes_nothing_of_the_others(path: str, max_rows: int, steps: int) -> None:
    wanted = of_prompts((3, 7, 1), size=3)
    expected = {place_of(each): each for each in sampled_of(engine_of(path), wanted, REQUEST)}
    with engine_of(path, max_rows=max_rows).open(replace(REQUEST, keep=True)) as sampling:
        sampling.put(wanted)
        done: list[Sampled] = []
        for _ in range(steps):
            with suppress(SamplingTimeout):
                done += sampling.take(0)
        taken = {place_of(each) for each in done}
        gone = [each for each in wanted[1::2] if (each.draw, each.sample) not in taken]
        assert len(gone) > 1
        sampling.drop(gone)
        left = len(wanted) - len(gone)
        done += everything(sampling, left - len(done)) if left > len(done) else []
        assert not sampling.num_open
    done.sort(key=place_of)
    assert len(done) == left
    assert not {place_of(each) for each in done} & {(each.draw, each.sample) for each in gone}
    assert_same(done, [expected[place_of(each)] for each in done])


def test_looking_for_no_time_at_all_still_gets_on() -> None:
    with InProcessEngine(tiny_policy()).open(REQUEST) as sampling:
        sampling.put(of_prompts([3], size=1))
        done: list[Sampled] = []
        for _ in range(20):  # a limit of 12 tokens, a step each
            try:
                done += sampling.take(0)
            except SamplingTimeout:
                continue
            break
    assert len(done) == 1
