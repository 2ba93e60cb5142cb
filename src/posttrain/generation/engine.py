"""What a run asks of whatever samples its completions: one of ours, or an object of your own.

`generation.in_process` samples in this process from the trainer's own weights.  An engine elsewhere (a server, other
machines) is any object with the members below; it inherits nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from posttrain.errors import RunError, UserError
from posttrain.generation.request import Request
from posttrain.records import Group, Prompt, Rollout

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

        An engine that draws with random numbers of its own says False; its rollouts still carry their log-probs, which
        may be up to `logprob_gap` nats from the trainer's: an attribute that it may have, 0.1 where it has none.
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


ROUNDING_NATS = 1e-3
"""How far above 0 rounding may put a log-prob."""


def require_engine(candidate: object) -> Engine:
    """The object as an engine; UserError with what it lacks where it is none."""
    if isinstance(candidate, type):
        raise UserError(f"engine: {candidate.__name__} is a class; give an object of it")
    missing = [name for name in MEMBERS if not hasattr(candidate, name)]
    if missing or not isinstance(candidate, Engine):
        raise UserError(
            f"engine: a {type(candidate).__name__} is not an engine: it has no {', '.join(missing)}."
            f"  An engine has {', '.join(MEMBERS)}; see posttrain.generation.engine.Engine."
        )
    gap = getattr(candidate, "logprob_gap", None)
    if gap is not None and not (isinstance(gap, int | float) and 0 < gap < math.inf):
        raise UserError(
            f"engine: logprob_gap = {gap!r} of {type(candidate).__name__} limits nothing; give the nats that a token's"
            " log-prob may be from the trainer's, a number above 0, or leave it out for 0.1"
        )
    return candidate


def sample_groups(
    engine: Engine,
    prompts: Sequence[Prompt],
    request: Request,
    *,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Group]:
    """The engine's groups for these prompts, known to be what was asked for."""
    groups = engine.rollout(prompts, request, advance=advance)
    require_groups(groups, prompts, request, engine)
    return groups


def require_groups(groups: Sequence[Group], prompts: Sequence[Prompt], request: Request, engine: Engine) -> None:
    """Refuse groups that are not what an engine was asked for: one number too few would shift all that follow.

    Raises RunError with the engine, the prompt and the sample.
    """
    name = type(engine).__name__
    if len(groups) != len(prompts):
        raise RunError(
            f"engine {name}: {len(groups)} groups for {len(prompts)} prompts.  `rollout` returns a group for each"
            " prompt, in the order of the prompts."
        )
    version = engine.weights_version
    for index, (group, prompt) in enumerate(zip(groups, prompts, strict=True)):
        fault = group_fault(group, prompt, index, request)
        if fault is not None:
            raise RunError(f"engine {name}, prompt {prompt.id}: {fault}.")
        for rollout in group.rollouts:
            fault = rollout_fault(rollout, request.max_completion_tokens, version)
            if fault is not None:
                raise RunError(f"engine {name}, prompt {prompt.id}, sample {rollout.sample}: {fault}.")


def group_fault(group: object, prompt: Prompt, index: int, request: Request) -> str | None:
    """What of the group that stands at `index` is not that of the prompt there; None where all is."""
    if not isinstance(group, Group):
        return f"a {type(group).__name__} is no posttrain.records.Group, which `rollout` returns for each prompt"
    if (group.prompt.id, group.prompt.tokens) != (prompt.id, prompt.tokens):
        return f"its group is of prompt {group.prompt.id}.  Groups stand in the order of the prompts"
    key = request.key
    if group.draw != key.first_draw + index:
        return f"draw = {group.draw}, where it is request.key.first_draw + {index} = {key.first_draw + index}"
    if len(group.rollouts) != request.group_size:
        return f"{len(group.rollouts)} completions, where request.group_size = {request.group_size} were asked for"
    for number, rollout in enumerate(group.rollouts, start=key.first_sample):
        if rollout.sample != number:
            return f"sample = {rollout.sample} stands where {number} does: they count from request.key.first_sample"
    return None


def rollout_fault(rollout: Rollout, limit: int, version: int) -> str | None:
    """What of a completion cannot be: its length, its log-probs, or the weights behind it; None where all can."""
    num_tokens, logprobs, cut = rollout.num_sampled, rollout.logprobs, rollout.cut_logprobs
    if not 1 <= num_tokens <= limit:
        return f"{num_tokens} tokens, where a completion has 1, the stop token, to max_completion_tokens = {limit}"
    for kind, numbers in (("logprobs", logprobs), ("cut_logprobs", logprobs if cut is None else cut)):
        if len(numbers) != num_tokens:
            return f"{num_tokens} tokens and {len(numbers)} {kind}.  There is one for each token, the stop token too"
        # Both run over the numbers in C; a NaN or an infinity is still there in the sum.
        if not math.isfinite(sum(numbers)) or max(numbers) > ROUNDING_NATS:
            place = next(i for i, number in enumerate(numbers) if not -math.inf < number <= ROUNDING_NATS)
            return f"{kind}[{place}] = {numbers[place]}, where log μ of a sampled token is finite and at most 0"
    if rollout.weights_version != version:
        return f"sampled by version {rollout.weights_version} of the weights, where version {version} was loaded last"
    return None


def require_room_for(prompt: Prompt, engine: Engine) -> int:
    """Tokens that the context leaves for a completion of this prompt; UserError where there is none."""
    room = engine.room(prompt)
    if room < 1 or not prompt.tokens:
        context = room + len(prompt.tokens)
        raise UserError(
            f"prompt {prompt.id}: {len(prompt.tokens)} tokens"
            + (f" leave no room in the model's context of {context}." if prompt.tokens else ".")
            + "  Every prompt needs at least 1 token, and 1 less than the context.  Shorten or drop this row; of a"
            " dataset task.over_long: skip or cut_left does it."
        )
    return room
