"""The sampler: what a completion depends on, what the sampler spends, and when it stops.

Everything in float64, where equal means equal tokens and log-probs that differ by rounding alone.
"""

import math
from collections.abc import Sequence

import pytest
import torch

from posttrain.errors import RunError
from posttrain.generation import in_process as engine_module
from posttrain.generation.decoder_steps import KeyValueSlots, StaticSteps
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import engine_in_parity
from posttrain.generation.request import StreamKey
from posttrain.generation.steps import PrefilledPrompts, Steps
from posttrain.models.policy import Policy
from posttrain.options.rollout import SamplingParams
from posttrain.records import Finish, Group
from tests.support.refusals import refused
from tests.support.streams import uniforms
from tests.support.tiny import (
    ALL_DECODERS,
    DECODERS,
    STOP_IDS,
    VOCAB,
    next_logprobs,
    request,
    some_prompts,
    through_its_own_forward,
    tiny_policy,
)

SHAPES = True
ROUNDING = 1e-12
LENGTHS = (3, 7, 1, 12)


def tokens_of(groups: Sequence[Group]) -> list[list[tuple[int, ...]]]:
    return [[rollout.tokens for rollout in group.rollouts] for group in groups]


def assert_same_rollouts(actual: Sequence[Group], expected: Sequence[Group]) -> None:
    assert tokens_of(actual) == tokens_of(expected)
    for mine, other in zip(actual, expected, strict=True):
        for a, b in zip(mine.rollouts, other.rollouts, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=ROUNDING)


class Watched:
    """The steps of a policy, with a note of what went through the model."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.prefilled: list[list[tuple[int, ...]]] = []
        self.rows: list[int] = []

    def refresh(self) -> None:
        self.steps.refresh()

    def release(self) -> None:
        self.steps.release()

    def slots(self) -> KeyValueSlots:
        return self.steps.slots()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        self.prefilled.append([tuple(prompt) for prompt in prompts])
        return self.steps.prefill(prompts)

    def step(self, tokens: torch.Tensor, slots: KeyValueSlots) -> torch.Tensor:
        self.rows.append(len(tokens))
        return self.steps.step(tokens, slots)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """The steps of every engine, in order."""
    made: list[Watched] = []
    steps_for = engine_module.steps_for

    def watching(policy: Policy) -> Watched:
        made.append(Watched(steps_for(policy)))
        return made[-1]

    monkeypatch.setattr(engine_module, "steps_for", watching)
    return made


# Cached = uncached.


def engine_of(policy: Policy, path: str, max_rows: int = 256) -> InProcessEngine:
    """An engine that samples through our decoder, through the model's own forward, or in steps of fixed shapes."""
    engine = InProcessEngine(through_its_own_forward(policy) if path == "own_forward" else policy, max_rows=max_rows)
    if path == "static":
        engine._steps = StaticSteps(policy)  # as on a GPU, but for the capture
    return engine


WAYS = [  # at temperature 1 one family goes every way, and the others the way that they do not go at 0.7
    *(("qwen3", path, 1.0) for path in ("decoder", "own_forward", "static")),
    *((family, "own_forward", 1.0) for family in DECODERS if family != "qwen3"),
    *((family, path, 0.7) for family in ALL_DECODERS for path in ("decoder", "static")),
    ("gpt2_plain", "own_forward", 0.7),
]


@pytest.mark.parametrize(("family", "path", "temperature"), WAYS)
def test_each_token_is_the_one_that_an_uncached_model_would_have_drawn(
    family: str, path: str, temperature: float
) -> None:
    policy, key = tiny_policy(family), StreamKey(4, "test", 2)
    groups = sample_groups(
        engine_of(policy, path, max_rows=5),
        some_prompts(LENGTHS),
        request(2, 8, SamplingParams(temperature=temperature), key=key),
    )
    for draw, group in enumerate(groups):
        for rollout in group.rollouts:
            numbers = uniforms(key, draw, rollout.sample, 0, len(rollout.tokens)).tolist()
            for t, (token, logprob, number) in enumerate(zip(rollout.tokens, rollout.logprobs, numbers, strict=True)):
                expected = next_logprobs(policy.model, (*group.prompt.tokens, *rollout.tokens[:t]), temperature)
                assert token == int((expected.exp().cumsum(0) <= number).sum())
                assert logprob == pytest.approx(expected[token].item(), abs=ROUNDING)


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
def test_greedy_takes_what_the_model_finds_likeliest_and_records_temperature_one(family: str) -> None:
    policy = tiny_policy(family)
    (group,) = sample_groups(
        InProcessEngine(policy), some_prompts([5]), request(2, 10, SamplingParams(greedy=True, temperature=0.5))
    )
    first, second = group.rollouts
    assert first.tokens == second.tokens
    for t, token in enumerate(first.tokens):
        expected = next_logprobs(policy.model, (*group.prompt.tokens, *first.tokens[:t]))
        assert token == int(expected.argmax())
        assert first.logprobs[t] == pytest.approx(expected[token].item(), abs=ROUNDING)


@pytest.mark.parametrize("path", ["decoder", "own_forward", "static"])
def test_an_engine_remembers_nothing_of_earlier_rollouts(path: str) -> None:
    def leave(count: int) -> None:
        raise InterruptedError

    policy, prompts = tiny_policy(), some_prompts(LENGTHS)
    used = engine_of(policy, path, max_rows=5)
    sample_groups(used, some_prompts([30, 2, 8], seed=9), request(4, 20, key=StreamKey(8, "test", 1)))
    with pytest.raises(InterruptedError):
        sample_groups(used, prompts, request(), advance=leave)  # and left in the middle
    expected = sample_groups(engine_of(policy, path, max_rows=5), prompts, request())
    assert_same_rollouts(sample_groups(used, prompts, request()), expected)


@pytest.mark.parametrize("path", ["decoder", "own_forward", "static"])
def test_an_engine_reads_the_weights_of_the_moment(path: str) -> None:
    policy, changed, prompts = tiny_policy(), tiny_policy(seed=1), some_prompts(LENGTHS)
    engine = engine_of(policy, path)
    before = sample_groups(engine, prompts, request())
    engine.policy.model.load_state_dict(changed.model.state_dict())
    after = sample_groups(engine, prompts, request())
    assert_same_rollouts(after, sample_groups(InProcessEngine(changed), prompts, request()))
    assert tokens_of(before) != tokens_of(after)


def test_a_longer_limit_only_adds_to_completions_that_were_cut() -> None:
    engine, prompts = InProcessEngine(tiny_policy()), some_prompts(LENGTHS)
    short, long = sample_groups(engine, prompts, request(limit=6)), sample_groups(engine, prompts, request(limit=20))
    assert [[tokens[:6] for tokens in group] for group in tokens_of(long)] == tokens_of(short)
    assert {r.finish for g in short for r in g.rollouts} == {Finish.LENGTH, Finish.STOP}
    assert max(len(tokens) for group in tokens_of(long) for tokens in group) > 6


def test_a_small_prefill_changes_no_completion(monkeypatch: pytest.MonkeyPatch, watched: list[Watched]) -> None:
    policy, prompts = tiny_policy(), some_prompts(LENGTHS)
    expected = sample_groups(InProcessEngine(policy), prompts, request())
    assert len(watched[0].prefilled) == 1
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 8)
    assert_same_rollouts(sample_groups(InProcessEngine(policy), prompts, request()), expected)
    # 3 + 7 reaches 8, then 1 + 12 does.
    assert [[len(prompt) for prompt in call] for call in watched[1].prefilled] == [[3, 7], [1, 12]]


@pytest.mark.parametrize(
    "key",
    [StreamKey(1, "test", 1), StreamKey(0, "evaluation", 1), StreamKey(0, "test", 2)],
    ids=["seed", "purpose", "step"],
)
def test_another_seed_purpose_or_step_gives_other_completions(key: StreamKey) -> None:
    engine, prompts = InProcessEngine(tiny_policy()), some_prompts([4])
    ours, theirs = sample_groups(engine, prompts, request(8)), sample_groups(engine, prompts, request(8, key=key))
    # Eight completions each, all first tokens alike by chance: below (1/5)^8.
    assert tokens_of(ours) != tokens_of(theirs)


def test_samples_of_a_group_and_draws_of_one_prompt_differ() -> None:
    (prompt,) = some_prompts([4])
    first, second = tokens_of(sample_groups(InProcessEngine(tiny_policy()), [prompt, prompt], request(8)))
    assert len(set(first)) > 4
    assert first != second


def test_draws_are_numbered_from_the_first_one() -> None:
    groups = sample_groups(InProcessEngine(tiny_policy()), some_prompts([4, 2]), request(first_draw=7))
    assert [group.draw for group in groups] == [7, 8]
    assert [[rollout.sample for rollout in group.rollouts] for group in groups] == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("max_rows", [2, 5, 256])
def test_every_prompt_goes_through_the_model_once_however_large_its_group(
    watched: list[Watched], max_rows: int
) -> None:
    prompts = some_prompts(LENGTHS)
    sample_groups(InProcessEngine(tiny_policy(), max_rows=max_rows), prompts, request(4))
    (steps,) = watched
    assert [prompt for call in steps.prefilled for prompt in call] == [prompt.tokens for prompt in prompts]


def test_a_finished_row_leaves_before_the_next_step(watched: list[Watched]) -> None:
    groups = sample_groups(InProcessEngine(tiny_policy()), some_prompts(LENGTHS), request(4))
    lengths = [len(rollout.tokens) for group in groups for rollout in group.rollouts]
    # The prefill gives the first token; step t gives token t + 1 to the rows that have one.
    assert watched[0].rows == [sum(length > t for length in lengths) for t in range(1, max(lengths))]
    assert len(set(watched[0].rows)) > 3


def test_waiting_completions_take_the_places_of_finished_ones(watched: list[Watched]) -> None:
    groups = sample_groups(InProcessEngine(tiny_policy(), max_rows=4), some_prompts(LENGTHS), request(6))
    lengths = [len(rollout.tokens) for group in groups for rollout in group.rollouts]
    rows = watched[0].rows
    assert sum(rows) == sum(length - 1 for length in lengths)  # a token after the first is one row of one step
    assert max(rows) == 4
    # A free row is filled before the next step while any of the 24 completions waits.
    last_full = max(step for step, count in enumerate(rows) if count == 4)
    assert rows[:last_full] == [4] * last_full


def test_large_batches_are_refilled_when_a_quarter_is_free(watched: list[Watched]) -> None:
    sample_groups(InProcessEngine(tiny_policy(), max_rows=16), some_prompts([3] * 6), request(8))
    rows = watched[0].rows
    last_full = max(step for step, count in enumerate(rows) if count == 16)
    assert min(rows[:last_full]) == 13  # 12 would be a quarter free


@pytest.mark.parametrize("family", ["llama", "gpt2_plain"])
def test_every_stop_token_of_the_model_ends_a_completion(family: str) -> None:
    policy = tiny_policy(family)
    assert policy.stop_ids == STOP_IDS
    groups = sample_groups(InProcessEngine(policy), some_prompts([2] * 8), request(8, 30))
    seen = set()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert not set(rollout.tokens[:-1]) & set(STOP_IDS)
        assert rollout.finish is (Finish.STOP if rollout.tokens[-1] in STOP_IDS else Finish.LENGTH)
        assert rollout.finish is Finish.STOP or len(rollout.tokens) == 30
        seen.add(rollout.tokens[-1])
    assert seen >= set(STOP_IDS)


def test_the_stop_token_is_kept_among_the_tokens_and_left_out_of_the_text() -> None:
    policy = tiny_policy("gpt2_plain")
    groups = sample_groups(InProcessEngine(policy), some_prompts([2] * 4), request(6, 4))
    finishes = set()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        body = rollout.tokens[:-1] if rollout.finish is Finish.STOP else rollout.tokens
        assert rollout.text == "".join(policy.tokenizer.convert_ids_to_tokens(list(body)))
        finishes.add(rollout.finish)
    assert finishes == {Finish.STOP, Finish.LENGTH}


def test_a_completion_has_at_least_one_token_though_it_stops_at_once() -> None:
    policy = tiny_policy()
    suppressed = tuple(token for token in range(VOCAB) if token not in STOP_IDS)
    (group,) = sample_groups(InProcessEngine(policy), some_prompts([3]), request(5, suppressed=suppressed))
    assert {len(rollout.tokens) for rollout in group.rollouts} == {1}
    assert {rollout.text for rollout in group.rollouts} == {""}


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
def test_a_prompt_that_leaves_little_room_is_cut_at_the_context(family: str) -> None:
    policy = tiny_policy(family)  # a context of 64
    groups = sample_groups(InProcessEngine(policy), some_prompts([60, 3, 63]), request(4, 12, suppressed=STOP_IDS))
    assert [{len(r.tokens) for r in group.rollouts} for group in groups] == [{4}, {12}, {1}]
    assert {r.finish for group in groups for r in group.rollouts} == {Finish.LENGTH}


@pytest.mark.parametrize("length", [64, 65])
def test_a_prompt_that_leaves_no_room_is_named(length: int) -> None:
    with refused(f"prompt p1: {length} tokens", "1 to 63", "task.over_long"):
        sample_groups(InProcessEngine(tiny_policy()), some_prompts([3, length]), request())


def test_an_empty_prompt_is_named() -> None:
    with refused("prompt p0: 0 tokens", "1 to 63"):
        sample_groups(InProcessEngine(tiny_policy()), some_prompts([0, 3]), request())


def test_logits_that_are_no_numbers_stop_the_run() -> None:
    policy = tiny_policy()
    with torch.no_grad():
        policy.model.model.norm.weight[0] = math.nan
    with refused("NaN", error=RunError):
        sample_groups(InProcessEngine(policy), some_prompts([3]), request())


# How tokens are drawn.


def test_steps_of_fixed_shapes_sample_again_after_their_log_probs_were_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison must not leave copies of weights that only inference mode may write."""
    monkeypatch.setattr(engine_module, "steps_for", StaticSteps)
    engine = engine_in_parity(tiny_policy("qwen3", dtype=torch.float32), max_rows=4, longest=12)
    before = sample_groups(engine, some_prompts((3, 5)), request(2, 4))
    engine.policy.output_layer.matrix.detach().mul_(-3)
    assert sample_groups(engine, some_prompts((3, 5)), request(2, 4)) != before
