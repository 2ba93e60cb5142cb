"""What samples completions: the engine of this package, or an object of your own.

`generation.in_process` samples in this process from the trainer's own weights.  An engine elsewhere (a server, other
machines) is any object with the members of `Engine`; what its `open` returns inherits from `Sampling`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Self, cast, runtime_checkable

from posttrain.binding import build_own
from posttrain.errors import RunError, UserError
from posttrain.generation.request import Continuation, Request, Sampled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.models.loading.exported_weights import ExportedWeights
    from posttrain.models.policy import Policy


@runtime_checkable
class Sampling(Protocol):
    """Completions under way, all of one request; a context manager.  Continuations may be put at any time."""

    def put(self, continuations: Sequence[Continuation]) -> None:
        """Sample these as well.  A pair of draw and sample is open once at a time.

        Raises UserError where one leaves no room in the model's context.
        """
        ...

    def take(self, seconds: float) -> list[Sampled]:
        """What is done and was not taken before, at least one.

        Raises SamplingTimeout where nothing was done in so many seconds; another `take` may follow.  Raises RunError on
        non-finite logits.
        """
        ...

    def release(self, sampled: Iterable[Sampled]) -> None:
        """These will not be continued: what is kept for them may go.  An engine that keeps nothing does nothing."""

    def close(self) -> None:
        """End what is under way.  Closing twice does nothing."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SamplingTimeout(RunError):
    """No completion was done in the time that was given for one."""

    def __init__(self, engine: str, seconds: float, num_open: int) -> None:
        super().__init__(
            f"engine {engine}: no completion was done in {seconds:g} seconds, and {num_open} are open.  Check that what"
            " samples is running, or set patience_seconds of the engine higher."
        )


@runtime_checkable
class Engine(Protocol):
    """Samples completions from a policy."""

    @property
    def reproducible(self) -> bool:
        """Whether a completion is a function of its prefix, the weights and the request's stream of uniform numbers.

        An engine that draws its own random numbers says False; its completions still carry their log-probs.
        """
        ...

    @property
    def logprob_gap(self) -> float | None:
        """Nats that a token's log-prob may be from the trainer's.

        None is what rounding explains for an engine that is reproducible, and 0.1 for others.
        """
        ...

    @property
    def suppresses(self) -> bool:
        """Whether it can sample with tokens suppressed; where it cannot, probes that need this are left out."""
        ...

    @property
    def patience_seconds(self) -> float:
        """How long a run waits for a completion until it ends with SamplingTimeout; infinite where nothing can hang."""
        ...

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """What prompts were rendered with and completions are decoded with."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion."""
        ...

    @property
    def max_positions(self) -> int:
        """Longest prefix and completion together, in tokens."""
        ...

    @property
    def weights_version(self) -> int:
        """The version that was loaded last: optimiser updates behind the weights."""
        ...

    def load(self, weights: "ExportedWeights", version: int) -> None:
        """Sample from these weights from now on.  They go on changing after the call: read them before it returns."""
        ...

    def open(self, request: Request) -> Sampling:
        """Begin to sample."""
        ...


MEMBERS = tuple(sorted(name for name in vars(Engine) if not name.startswith("_")))
"""What an engine has."""
PAGE = "docs/decisions/020-one-way-to-sample.md"


def own_engine(options: Mapping[str, object], policy: "Policy") -> Engine:
    """The engine of the user's own that a recipe names; its class is called as `Class(policy, **options)`."""
    return require_engine(build_own("engine", options, policy))


def load_checked(engine: Engine, weights: "ExportedWeights", version: int) -> None:
    """Have an engine sample from these weights.  Raises RunError if it still says another version."""
    engine.load(weights, version)
    loaded = engine.weights_version
    if loaded != version:
        raise RunError(
            f"engine {type(engine).__name__}: weights_version = {loaded} after load(weights, {version}).  It is the"
            " version that was loaded last."
        )


def require_engine(candidate: object) -> Engine:
    """The object as an engine; UserError with what it lacks where it is none."""
    name = type(candidate).__name__
    if isinstance(candidate, type):
        raise UserError(f"engine: {candidate.__name__} is a class; give an object of it")
    if hasattr(candidate, "rollout") and not hasattr(candidate, "open"):
        raise UserError(
            f"engine: a {name} samples by `rollout`, which `open`, `put` and `take` have replaced.  {PAGE} shows what"
            " to write in its place."
        )
    missing = [member for member in MEMBERS if not hasattr(candidate, member)]
    if missing:
        raise UserError(
            f"engine: a {name} is not an engine: it has no {', '.join(missing)}."
            f"  An engine has {', '.join(MEMBERS)}; see posttrain.generation.engine.Engine."
        )
    engine = cast(Engine, candidate)
    gap = engine.logprob_gap
    if gap is not None and not (isinstance(gap, int | float) and 0 < gap < math.inf):
        raise UserError(
            f"engine: logprob_gap = {gap!r} of {name} limits nothing; give the nats that a token's log-prob may be from"
            " the trainer's, a number above 0, or None"
        )
    return engine
