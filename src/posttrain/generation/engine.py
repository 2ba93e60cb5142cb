"""Engines sample completions: `generation.in_process` does it in this process from the trainer's own weights.

Any object with the members of `Engine` works too (a server, other machines); its `open` returns a `Sampling`.
Completions of prompts are functions over an engine, which check what it returns.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, cast, runtime_checkable

from posttrain.binding import build_own
from posttrain.errors import RunError, UserError
from posttrain.generation.request import Continuation, GroupRequest, Request, Sampled
from posttrain.records import Group, Prompt, Rollout, TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.models.loading.saving import ExportedWeights
    from posttrain.models.policy import Policy


@runtime_checkable
class Sampling(Protocol):
    """Completions in progress, all of one request; a context manager.  Continuations may be put at any time."""

    def put(self, continuations: Sequence[Continuation]) -> None:
        """Sample these as well.  A pair of draw and sample of one stream key may be open only once at a time.

        Raises UserError if one leaves no room in the model's context.
        """

    def take(self, seconds: float) -> list[Sampled]:
        """Completions that are done and not yet taken, at least one.

        Raises SamplingTimeout if none is done in this time; another `take` may follow.  Raises RunError on non-finite
        logits.
        """

    def release(self, sampled: Iterable[Sampled]) -> None:
        """These will not be continued, so their caches may be freed."""

    def close(self) -> None:
        """Stop sampling.  Closing twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SamplingTimeout(RunError):
    """No completion was done in time."""

    def __init__(self, engine: str, seconds: float, num_open: int) -> None:
        fault = f"no completion was done in {seconds:g} seconds, and {num_open} are open"
        super().__init__(f"engine {engine}: {fault}.  Check that it is running, or raise its patience_seconds.")


@runtime_checkable
class Engine(Protocol):
    """Samples completions from a policy."""

    @property
    def reproducible(self) -> bool:
        """Whether a completion is a function of its prefix, the weights and the request's stream of uniform numbers.

        False for an engine that draws its own random numbers; it still returns log-probs.
        """

    @property
    def logprob_gap(self) -> float | None:
        """Largest allowed difference between its log-prob for a token and the trainer's, in nats.

        None allows what rounding explains for an engine that is reproducible, and 0.1 for others.
        """

    @property
    def suppresses(self) -> bool:
        """Whether it can sample with tokens suppressed; without it, probes that need this are skipped."""

    @property
    def patience_seconds(self) -> float:
        """How long a run waits for a completion before it fails; infinite if nothing can hang."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Renders prompts and decodes completions."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion."""

    @property
    def max_positions(self) -> int:
        """Longest prefix and completion together, in tokens."""

    @property
    def weights_version(self) -> int:
        """The version that was loaded last: the number of optimiser updates of the weights."""

    def load(self, weights: "ExportedWeights", version: int) -> None:
        """Sample from these weights from now on.  They change after the call: read them before it returns.

        Completions in progress continue with them from their next token, and caches are computed again.
        """

    def open(self, request: Request) -> Sampling:
        """Start sampling."""


@runtime_checkable
class EngineElsewhere(Engine, Protocol):
    """An engine with servers: it holds connections, and may write weights as files."""

    def transfer_in(self, folder: Path) -> None:
        """Write files of weights there, unless the recipe names another folder."""

    def describe(self) -> list[str]:
        """Lines for a run's plan."""

    def close(self) -> None:
        """Free its resources; closing twice does nothing."""


def close_engine(engine: Engine | None) -> None:
    if isinstance(engine, EngineElsewhere):
        engine.close()


def engine_name(engine: Engine) -> str:
    """The class of an engine, for messages.  A wrapper gives the class of the engine that it wraps."""
    return type(getattr(engine, "passes_on_to", engine)).__name__


MEMBERS = tuple(sorted(name for name in vars(Engine) if not name.startswith("_")))
PAGE = "docs/decisions/020-one-way-to-sample.md"


def own_engine(options: Mapping[str, object], policy: "Policy") -> Engine:
    """The user's engine that a recipe names; its class is called as `Class(policy, **options)`."""
    return require_engine(build_own("engine", options, policy))


def load_checked(engine: Engine, weights: "ExportedWeights", version: int) -> None:
    """Load weights into an engine.  Raises RunError if it then states another version."""
    engine.load(weights, version)
    if (loaded := engine.weights_version) != version:
        name = engine_name(engine)
        raise RunError(f"engine {name}: weights_version = {loaded} after load(weights, {version}). Set it in `load`.")


def require_engine(candidate: object) -> Engine:
    """The object as an engine.  Raises UserError with the members that it lacks."""
    name = type(candidate).__name__
    if isinstance(candidate, type):
        raise UserError(f"engine: {candidate.__name__} is a class; give an object of it")
    if hasattr(candidate, "rollout") and not hasattr(candidate, "open"):
        raise UserError(f"engine: a {name} has `rollout`, which `open`, `put` and `take` have replaced.  See {PAGE}.")
    missing = [member for member in MEMBERS if not hasattr(candidate, member)]
    if missing:
        raise UserError(f"engine: a {name} is not an engine.  Add {', '.join(missing)}; see posttrain.Engine.")
    engine = cast(Engine, candidate)
    gap = engine.logprob_gap
    if gap is not None and not (isinstance(gap, int | float) and 0 < gap < math.inf):
        raise UserError(f"engine: logprob_gap = {gap!r} of {name}: must be a finite number of nats above 0, or None")
    return engine


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

    With `look_seconds`, `advance` is also called with 0 whenever no completion is done in that time.
    Raises UserError if a prompt leaves no room in the model's context, and RunError if an engine's answer is invalid.
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
    engine: Engine, continuations: Sequence[Continuation], request: Request, advance: Advance, seconds: float | None
) -> list[Sampled]:
    """The result of each continuation, in their order."""
    found: dict[tuple[int, int], Sampled] = {}
    oldest = engine.weights_version
    with opened(engine, request) as sampling:
        sampling.put(continuations)
        open_ones = {(each.draw, each.sample): each for each in continuations}
        waited = 0.0
        while open_ones:
            began = time.monotonic()
            done = take_checked(sampling, engine, seconds, oldest)
            waited = 0.0 if done else waited + time.monotonic() - began
            if waited > engine.patience_seconds:
                raise SamplingTimeout(engine_name(engine), engine.patience_seconds, len(open_ones))
            for sampled in done:
                key = sampled.continuation.draw, sampled.continuation.sample
                if open_ones.pop(key, None) != sampled.continuation:
                    raise RunError(f"{named(engine, sampled)}: this continuation was not put, or was returned before.")
                require_alternatives(engine, sampled, request)
                found[key] = sampled
            advance(len(done))
    return [found[each.draw, each.sample] for each in continuations]


def opened(engine: Engine, request: Request) -> Sampling:
    """Opens a sampling.  Raises UserError if the request suppresses tokens and the engine cannot."""
    if request.suppressed and not engine.suppresses:
        raise UserError(f"engine {engine_name(engine)}: it cannot suppress tokens.  Use the in-process engine.")
    return engine.open(request)


def take_checked(
    sampling: Sampling, engine: Engine, look_seconds: float | None = None, oldest: int | None = None
) -> list[Sampled]:
    """The next completions, checked; empty if none was done in `look_seconds`.

    Without `look_seconds` it waits as long as the engine's patience and then raises SamplingTimeout.  `oldest` is the
    version of the weights when they were put; None is the one that was loaded last.  Raises RunError, which names
    engine, prompt and sample, if a completion is invalid.
    """
    try:
        done = sampling.take(engine.patience_seconds if look_seconds is None else look_seconds)
    except SamplingTimeout:
        if look_seconds is None:
            raise
        return []
    if not done:
        raise RunError(f"engine {engine_name(engine)}: take returned nothing.  Return at least one, or raise.")
    for sampled in done:
        fault = sampled_fault(sampled, engine, oldest)
        if fault is not None:
            raise RunError(f"{named(engine, sampled)}: {fault}.")
    return done


def require_alternatives(engine: Engine, sampled: Sampled, request: Request) -> None:
    """Raises RunError if the request keeps alternatives and the engine returned too few."""
    num_kept = len(sampled.alternatives or ())
    if request.keep_alternatives and num_kept != len(sampled.tokens):
        counts = f"alternatives of {num_kept} tokens for {len(sampled.tokens)} tokens"
        raise RunError(f"{named(engine, sampled)}: {counts}.  Unset rollout.keep_alternatives.")


def named(engine: Engine, sampled: Sampled) -> str:
    return f"engine {engine_name(engine)}, {sampled.continuation.label}"


def sampled_fault(sampled: Sampled, engine: Engine, oldest: int | None = None) -> str | None:
    """What is wrong with a completion's length, end, log-probs or weights; None if it is valid."""
    num_tokens, logprobs, cut = len(sampled.tokens), sampled.logprobs, sampled.cut_logprobs
    limit, version = sampled.continuation.limit, engine.weights_version
    if not 1 <= num_tokens <= limit:
        return f"{num_tokens} tokens; it must have 1 (the stop token) to limit = {limit}"
    if sampled.finish.has_stop_token != (sampled.tokens[-1] in engine.stop_ids):
        return f"finish = {sampled.finish}, and the last token is {sampled.tokens[-1]}, stop_ids = {engine.stop_ids}"
    if sampled.ended_by_text and sampled.finish.has_stop_token:
        return f"ended_by_text with finish = {sampled.finish}.  A completion that a stop text ends has finish = length"
    for kind, numbers in (("logprobs", logprobs), ("cut_logprobs", logprobs if cut is None else cut)):
        if len(numbers) != num_tokens:
            return f"{num_tokens} tokens and {len(numbers)} {kind}.  There is one for each token, the stop token too"
        # Both run over the numbers in C; a NaN or an infinity is still there in the sum.
        if not math.isfinite(sum(numbers)) or max(numbers) > ROUNDING_NATS:
            place = next(i for i, number in enumerate(numbers) if not -math.inf < number <= ROUNDING_NATS)
            return f"{kind}[{place}] = {numbers[place]}; log μ of a sampled token is finite and at most 0"
    if sum(count for _, count in sampled.versions) != num_tokens:
        return f"versions = {sampled.versions} for {num_tokens} tokens.  The counts sum to the number of tokens"
    spans = [each for each, _ in sampled.versions]
    low = version if oldest is None else oldest
    other = next((each for each in spans if not low <= each <= version), None)
    if other is not None:
        since = "" if low == version else f", and {low} when it was put"
        return f"sampled by version {other} of the weights, but version {version} was loaded last{since}"
    if spans != sorted(spans):
        return f"versions = {sampled.versions}: later tokens have later weights"
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
    """Tokens that the context leaves for a completion of this prompt.  Raises UserError if none are left."""
    context, length = engine.max_positions, len(prompt.tokens)
    if not 1 <= length < context:
        rule = f"give 1 to {context - 1}, for the model's context is {context}"
        raise UserError(f"prompt {prompt.id}: {length} tokens; {rule}.  Shorten it, or set task.over_long: skip.")
    return context - length
