"""Completions of prompts as functions over an engine, and the checks of what an engine returns."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, islice

from posttrain.errors import RunError, UserError
from posttrain.generation.engine import Engine, Sampling, SamplingTimeout
from posttrain.generation.request import Continuation, GroupRequest, Request, Sampled
from posttrain.records import Group, Prompt, Rollout, TokenSequence

ROUNDING_NATS = 1e-3
"""How far above 0 rounding may put a log-prob."""

Advance = Callable[[int], None]
"""Called with the number of completions done since the last call.  If it raises, sampling ends."""


def sample_groups(
    engine: Engine,
    prompts: Sequence[Prompt],
    request: GroupRequest,
    *,
    advance: Advance = lambda count: None,
    look_seconds: float | None = None,
) -> list[Group]:
    """A group of `group_size` completions for each prompt, in the order of the prompts.

    With `look_seconds`, `advance` is also called with 0 each time no completion was done in that time.
    Raises UserError where a prompt leaves no room in the model's context, and RunError where an engine's answer is
    unsound.
    """
    rooms = [require_room_for(prompt, engine) for prompt in prompts]
    continuations = [
        Continuation(
            prefix=prompt.tokens,
            draw=request.first_draw + place,
            sample=request.first_sample + number,
            limit=min(request.max_completion_tokens, rooms[place]),
            name=f"prompt {prompt.id}",
        )
        for place, prompt in enumerate(prompts)
        for number in range(request.group_size)
    ]
    if not continuations:
        return []
    rollouts = rollouts_of(engine, sample_all(engine, continuations, request, advance, look_seconds))
    size, rest = request.group_size, iter(rollouts)
    return [
        Group(prompt=prompt, draw=request.first_draw + place, rollouts=tuple(islice(rest, size)))
        for place, prompt in enumerate(prompts)
    ]


def sample_all(
    engine: Engine,
    continuations: Sequence[Continuation],
    request: Request,
    advance: Advance = lambda count: None,
    look_seconds: float | None = None,
) -> list[Sampled]:
    """The result of each continuation, in their order."""
    found: dict[tuple[int, int], Sampled] = {}
    with opened(engine, request) as sampling:
        sampling.put(continuations)
        open_ones = {(each.draw, each.sample): each for each in continuations}
        waited = 0.0
        while open_ones:
            began = time.monotonic()
            done = take_checked(sampling, engine, look_seconds)
            waited = 0.0 if done else waited + time.monotonic() - began
            if waited > engine.patience_seconds:
                raise SamplingTimeout(type(engine).__name__, engine.patience_seconds, len(open_ones))
            for sampled in done:
                key = sampled.continuation.draw, sampled.continuation.sample
                if open_ones.pop(key, None) != sampled.continuation:
                    raise RunError(f"{named(engine, sampled)}: this continuation was not put, or was returned before.")
                num_kept = len(sampled.alternatives or ())
                if request.keep_alternatives and num_kept != len(sampled.tokens):
                    counts = f"alternatives of {num_kept} tokens for {len(sampled.tokens)} tokens"
                    raise RunError(f"{named(engine, sampled)}: {counts}.  Unset rollout.keep_alternatives.")
                found[key] = sampled
            advance(len(done))
    return [found[each.draw, each.sample] for each in continuations]


def opened(engine: Engine, request: Request) -> Sampling:
    """A sampling of an engine.  Raises UserError where it cannot suppress tokens and the request does."""
    if request.suppressed and not engine.suppresses:
        raise UserError(f"engine {type(engine).__name__}: it cannot suppress tokens.  Use the in-process engine.")
    return engine.open(request)


def take_checked(sampling: Sampling, engine: Engine, look_seconds: float | None = None) -> list[Sampled]:
    """The next completions, checked; none where none was done in `look_seconds`.

    Without `look_seconds` it waits as long as the engine's patience and then raises SamplingTimeout.  Raises RunError,
    which names engine, prompt and sample, where a completion is unsound.
    """
    try:
        done = sampling.take(engine.patience_seconds if look_seconds is None else look_seconds)
    except SamplingTimeout:
        if look_seconds is None:
            raise
        return []
    if not done:
        raise RunError(f"engine {type(engine).__name__}: take returned nothing.  Return at least one, or raise.")
    for sampled in done:
        fault = sampled_fault(sampled, engine)
        if fault is not None:
            raise RunError(f"{named(engine, sampled)}: {fault}.")
    return done


def named(engine: Engine, sampled: Sampled) -> str:
    return f"engine {type(engine).__name__}, {sampled.continuation.label}"


def sampled_fault(sampled: Sampled, engine: Engine) -> str | None:
    """The fault of a completion in its length, its end, its log-probs or its weights; None where it is sound."""
    num_tokens, logprobs, cut = len(sampled.tokens), sampled.logprobs, sampled.cut_logprobs
    limit, version = sampled.continuation.limit, engine.weights_version
    if not 1 <= num_tokens <= limit:
        return f"{num_tokens} tokens, where it has 1, the stop token, to limit = {limit}"
    if sampled.finish.has_stop_token != (sampled.tokens[-1] in engine.stop_ids):
        return f"finish = {sampled.finish}, and the last token is {sampled.tokens[-1]}, stop_ids = {engine.stop_ids}"
    for kind, numbers in (("logprobs", logprobs), ("cut_logprobs", logprobs if cut is None else cut)):
        if len(numbers) != num_tokens:
            return f"{num_tokens} tokens and {len(numbers)} {kind}.  There is one for each token, the stop token too"
        # Both run over the numbers in C; a NaN or an infinity is still there in the sum.
        if not math.isfinite(sum(numbers)) or max(numbers) > ROUNDING_NATS:
            place = next(i for i, number in enumerate(numbers) if not -math.inf < number <= ROUNDING_NATS)
            return f"{kind}[{place}] = {numbers[place]}, where log μ of a sampled token is finite and at most 0"
    if sum(count for _, count in sampled.versions) != num_tokens:
        return f"versions = {sampled.versions} for {num_tokens} tokens.  The counts sum to the number of tokens"
    other = next((each for each, _ in sampled.versions if each != version), version)
    if other != version:
        return f"sampled by version {other} of the weights, where version {version} was loaded last"
    return None


def rollouts_of(engine: Engine, sampled: Sequence[Sampled]) -> list[Rollout]:
    """Completions in which no token was given, with their decoded texts."""
    bodies = [[*(each.tokens[:-1] if each.finish.has_stop_token else each.tokens)] for each in sampled]
    texts, rollouts = engine.tokenizer.batch_decode(bodies, skip_special_tokens=False), []
    for each, text in zip(sampled, texts, strict=True):
        starts = accumulate((count for _, count in each.versions[:-1]), initial=0)
        sequence = TokenSequence(
            tokens=each.tokens,
            sampled=(True,) * len(each.tokens),
            logprobs=each.logprobs,
            cut_logprobs=each.cut_logprobs,
            versions=tuple((start, version) for start, (version, _) in zip(starts, each.versions, strict=True)),
            finish=each.finish,
        )
        sample = each.continuation.sample
        rollouts.append(Rollout(sample=sample, sequence=sequence, text=text, alternatives=each.alternatives))
    return rollouts


def require_room_for(prompt: Prompt, engine: Engine) -> int:
    """Tokens that the context leaves for a completion of this prompt; UserError where there is no room."""
    context, length = engine.max_positions, len(prompt.tokens)
    if not 1 <= length < context:
        rule = f"give 1 to {context - 1}, for the model's context is {context}"
        raise UserError(f"prompt {prompt.id}: {length} tokens; {rule}.  Shorten it, or set task.over_long: skip.")
    return context - length
