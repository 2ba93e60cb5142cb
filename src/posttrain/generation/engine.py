"""Engines sample completions: `generation.in_process` does it in this process from the trainer's own weights.

Any object with the members of `Engine` works too (a server, other machines); its `open` returns a `Sampling`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Self, cast, runtime_checkable

from posttrain.binding import build_own
from posttrain.errors import RunError, UserError
from posttrain.generation.request import Continuation, Request, Sampled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.models.loading.saving import ExportedWeights
    from posttrain.models.policy import Policy


@runtime_checkable
class Sampling(Protocol):
    """Completions under way, all of one request; a context manager.  Continuations may be put at any time."""

    def put(self, continuations: Sequence[Continuation]) -> None:
        """Sample these as well.  A pair of draw and sample is open once at a time.

        Raises UserError where one leaves no room in the model's context.
        """

    def take(self, seconds: float) -> list[Sampled]:
        """Completions that are done and were not taken before, at least one.

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
        super().__init__(
            f"engine {engine}: no completion was done in {seconds:g} seconds, and {num_open} are open."
            "  Check that it is running, or raise its patience_seconds."
        )


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
        """Largest allowed difference between its log-prob of a token and the trainer's, in nats.

        None allows what rounding explains for an engine that is reproducible, and 0.1 for others.
        """

    @property
    def suppresses(self) -> bool:
        """Whether it can sample with tokens suppressed; without it, probes that need this are skipped."""

    @property
    def patience_seconds(self) -> float:
        """How long a run waits for a completion before it fails; infinite where nothing can hang."""

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
        """The version that was loaded last: the number of optimiser updates behind the weights."""

    def load(self, weights: "ExportedWeights", version: int) -> None:
        """Sample from these weights from now on.  They change after the call: read them before it returns."""

    def open(self, request: Request) -> Sampling:
        """Start sampling."""


MEMBERS = tuple(sorted(name for name in vars(Engine) if not name.startswith("_")))
PAGE = "docs/decisions/020-one-way-to-sample.md"


def own_engine(options: Mapping[str, object], policy: "Policy") -> Engine:
    """The user's engine that a recipe names; its class is called as `Class(policy, **options)`."""
    return require_engine(build_own("engine", options, policy))


def load_checked(engine: Engine, weights: "ExportedWeights", version: int) -> None:
    """Load weights into an engine.  Raises RunError if it then states another version."""
    engine.load(weights, version)
    if (loaded := engine.weights_version) != version:
        name = type(engine).__name__
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
