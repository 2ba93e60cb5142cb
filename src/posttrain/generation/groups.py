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
"""Is called with the number of completions that were done since the last call.  What it raises ends the sampling."""


def ignored(count: int) -> None:
    """Does nothing with the number."""


def sample_groups(
    engine: Engine,
    prompts: Sequence[Prompt],
    request: GroupRequest,
    *,
    advance: Advance = ignored,
    look_seconds: float | None = None,
) -> list[Group]:
    """A group of `group_size` completions for each prompt, in the order of the prompts.

    With `look_seconds`, `advance` is also called with 0 each time no completion was done in that time.
    Raises UserError where a prompt leaves no room in the model's context, and RunError where an engine's answer is not
    what was asked for.
    """
    continuations = [each for place, prompt in enumerate(prompts) for each in of_prompt(engine, prompt, place, request)]
    if not continuations:
        return []
    rollouts = rollouts_of(engine, sample_all(engine, continuations, request, advance, look_seconds))
    size, rest = request.group_size, iter(rollouts)
    return [
        Group(prompt=prompt, draw=request.first_draw + place, rollouts=tuple(islice(rest, size)))
        for place, prompt in enumerate(prompts)
    ]


def of_prompt(engine: Engine, prompt: Prompt, place: int, request: GroupRequest) -> list[Continuation]:
    """The continuations that are the group of one prompt."""
    limit = min(request.max_completion_tokens, require_room_for(prompt, engine))
    return [
        Continuation(
            prefix=prompt.tokens,
            draw=request.first_draw + place,
            sample=request.first_sample + number,
            limit=limit,
            name=f"prompt {prompt.id}",
        )
        for number in range(request.group_size)
    ]


def sample_all(
    engine: Engine,
    continuations: Sequence[Continuation],
    request: Request,
    advance: Advance = ignored,
    look_seconds: float | None = None,
) -> list[Sampled]:
    """What is sampled of each continuation, in their order."""
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
                    raise RunError(
                        f"engine {type(engine).__name__}, {sampled.continuation.label}: this continuation was not put,"
                        " or was returned before."
                    )
                require_alternatives(sampled, request, engine)
                found[key] = sampled
            advance(len(done))
    return [found[each.draw, each.sample] for each in continuations]


def require_alternatives(sampled: Sampled, request: Request, engine: Engine) -> None:
    """Refuse a completion without the alternatives that were asked for.  Raises RunError."""
    if request.keep_alternatives and len(sampled.alternatives or ()) != len(sampled.tokens):
        raise RunError(
            f"engine {type(engine).__name__}, {sampled.continuation.label}: alternatives of"
            f" {len(sampled.alternatives or ())} tokens for {len(sampled.tokens)} tokens, and request.keep_alternatives"
            f" = {request.keep_alternatives}.  Return them, or leave out rollout.keep_alternatives."
        )


def opened(engine: Engine, request: Request) -> Sampling:
    """A sampling of an engine that can do what is asked for."""
    if request.suppressed and not engine.suppresses:
        raise UserError(
            f"engine {type(engine).__name__}: it cannot suppress tokens (suppresses = False), and"
            f" {len(request.suppressed)} are to be suppressed.  Sample without, or with the in-process engine."
        )
    return engine.open(request)


def take_checked(sampling: Sampling, engine: Engine, look_seconds: float | None = None) -> list[Sampled]:
    """What is done next, known to be sound; none where nothing was done in `look_seconds`.

    Without `look_seconds` it waits as long as the engine's patience.  Raises SamplingTimeout then, and RunError with
    engine, prompt and sample where what it returns cannot be.
    """
    name = type(engine).__name__
    try:
        done = sampling.take(engine.patience_seconds if look_seconds is None else look_seconds)
    except SamplingTimeout:
        if look_seconds is None:
            raise
        return []
    if not done:
        raise RunError(f"engine {name}: take returned nothing.  It returns at least one completion, or raises.")
    for sampled in done:
        fault = sampled_fault(sampled, engine)
        if fault is not None:
            raise RunError(f"engine {name}, {sampled.continuation.label}: {fault}.")
    return done


def sampled_fault(sampled: Sampled, engine: Engine) -> str | None:
    """What of a completion cannot be: its length, its end, its log-probs, the weights behind it; None where all can."""
    num_tokens, logprobs, cut = len(sampled.tokens), sampled.logprobs, sampled.cut_logprobs
    limit, version = sampled.continuation.limit, engine.weights_version
    if not 1 <= num_tokens <= limit:
        return f"{num_tokens} tokens, where it has 1, the stop token, to limit = {limit}"
    if sampled.finish.has_stop_token != (sampled.tokens[-1] in engine.stop_ids):
        return (
            f"finish = {sampled.finish}, where the last token is {sampled.tokens[-1]} and stop_ids = {engine.stop_ids}"
        )
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
    """Completions as rollouts, with their texts."""
    bodies = [each.tokens[:-1] if each.finish.has_stop_token else each.tokens for each in sampled]
    texts = engine.tokenizer.batch_decode([list(body) for body in bodies], skip_special_tokens=False)
    return [
        Rollout(
            sample=each.continuation.sample,
            sequence=sequence_of(each),
            text=text,
            alternatives=each.alternatives,
        )
        for each, text in zip(sampled, texts, strict=True)
    ]


def sequence_of(sampled: Sampled) -> TokenSequence:
    """The record of what was sampled: no token of it was given."""
    starts = accumulate((count for _, count in sampled.versions[:-1]), initial=0)
    return TokenSequence(
        tokens=sampled.tokens,
        sampled=(True,) * len(sampled.tokens),
        logprobs=sampled.logprobs,
        cut_logprobs=sampled.cut_logprobs,
        versions=tuple((start, version) for start, (version, _) in zip(starts, sampled.versions, strict=True)),
        finish=sampled.finish,
    )


def require_room_for(prompt: Prompt, engine: Engine) -> int:
    """Tokens that the context leaves for a completion of this prompt; UserError where there is none."""
    context = engine.max_positions
    room = context - len(prompt.tokens)
    if room < 1 or not prompt.tokens:
        raise UserError(
            f"prompt {prompt.id}: {len(prompt.tokens)} tokens"
            + (f" leave no room in the model's context of {context}." if prompt.tokens else ".")
            + "  Every prompt needs at least 1 token, and 1 less than the context.  Shorten or drop this row; of a"
            " dataset task.over_long: skip or cut_left does it."
        )
    return room
