"""What a run asks of whatever samples its completions: one of ours, or an object of your own.

`generation.in_process` samples in this process from the trainer's own weights.  An engine elsewhere (a server, other
machines) is any object with the members below; it inherits nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from posttrain.errors import UserError
from posttrain.generation.request import Request
from posttrain.records import Group, Prompt

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


@runtime_checkable
class Engine(Protocol):
    """Samples groups of completions from a policy."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """What prompts were rendered with and completions are decoded with."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion."""
        ...

    @property
    def reproducible(self) -> bool:
        """Whether a completion is a function of its prompt, the weights and the request's stream of uniform numbers.

        An engine that draws with random numbers of its own says False; its rollouts still carry their log-probs.
        """
        ...

    @property
    def weights_version(self) -> int:
        """The version that was loaded last: optimiser updates behind the weights.  Every rollout carries its own."""
        ...

    def load(self, weights: "Mapping[str, Tensor]", version: int) -> None:
        """Sample from these weights from now on: the policy's `state_dict`, which goes on changing after the call."""
        ...

    def room(self, prompt: Prompt) -> int:
        """Tokens that the context leaves for a completion of this prompt; below 1 where the prompt fills it."""
        ...

    def rollout(
        self,
        prompts: Sequence[Prompt],
        request: Request,
        *,
        advance: Callable[[int], None] = lambda count: None,
        before_token: Callable[[], None] = lambda: None,
    ) -> list[Group]:
        """A group of `group_size` completions for each prompt, in the order of the prompts.

        `advance` is told of completions that are done; what `before_token` raises ends the sampling.
        Raises UserError where a prompt leaves no room in the model's context, and RunError on non-finite logits.
        """
        ...


MEMBERS = tuple(sorted(name for name in vars(Engine) if not name.startswith("_")))
"""What an engine has."""


def require_engine(candidate: object) -> Engine:
    """The object as an engine; UserError with what it lacks where it is none."""
    if isinstance(candidate, type):
        raise UserError(f"engine: {candidate.__name__} is a class; give an object of it")
    missing = [name for name in MEMBERS if not hasattr(candidate, name)]
    if missing or not isinstance(candidate, Engine):
        raise UserError(
            f"engine: a {type(candidate).__name__} is no engine, for it has no {', '.join(missing)}."
            f"  An engine has {', '.join(MEMBERS)}; see posttrain.generation.engine.Engine."
        )
    return candidate


def require_room_for(prompt: Prompt, engine: Engine) -> int:
    """Tokens that the context leaves for a completion of this prompt; UserError where there is none."""
    room = engine.room(prompt)
    if room < 1 or not prompt.tokens:
        context = room + len(prompt.tokens)
        raise UserError(
            f"prompt {prompt.id}: {len(prompt.tokens)} tokens"
            + (f" leave no room in the model's context of {context}." if prompt.tokens else ".")
            + "  Every prompt needs at least 1 token, and 1 less than the context.  Shorten or drop this row."
        )
    return room
