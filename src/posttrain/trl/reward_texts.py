"""Reward functions as TRL calls them: the text without special tokens and without what was prefilled."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.rewards.grading.function import RewardFunction, own_name, reward_function

COMPLETION_IDS = "completion_ids"
Reward = Callable[..., object]


@dataclass(init=False, eq=False)
class DecodedReward:
    """A reward function of lists that is given completions as TRL decodes them.

    Its signature is that of the function, and `completion_ids`, of which the texts are made.
    """

    call: Reward

    def __init__(self, call: Reward, tokenizer: PreTrainedTokenizerBase, state: Callable[[], object]) -> None:
        """`state` gives what the function sees as `trainer_state`."""
        self.call, self.tokenizer, self.state = call, tokenizer, state
        self.__name__ = own_name(call)
        signature = inspect.signature(call)
        parameters = signature.parameters.values()
        self.takes_ids = COMPLETION_IDS in signature.parameters or any(
            each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters
        )
        self.__signature__ = signature if self.takes_ids else with_ids(signature)

    def __call__(self, **given: Any) -> object:
        """The function's answer to the same with other texts."""
        ids = given[COMPLETION_IDS] if self.takes_ids else given.pop(COMPLETION_IDS)
        if "completions" in given:
            texts: list[str] = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            given["completions"] = [
                text if isinstance(old, str) else [{"role": "assistant", "content": text}]
                for old, text in zip(given["completions"], texts, strict=True)
            ]
        if "trainer_state" in given:
            given["trainer_state"] = self.state()
        return self.call(**given)


def with_ids(signature: inspect.Signature) -> inspect.Signature:
    """The signature with `completion_ids`, by keyword."""
    ids = inspect.Parameter(COMPLETION_IDS, inspect.Parameter.KEYWORD_ONLY)
    return signature.replace(parameters=[*signature.parameters.values(), ids])


def reward_functions(
    calls: Sequence[Reward],
    weights: Sequence[float] | None,
    tokenizer: PreTrainedTokenizerBase,
    state: Callable[[], object],
) -> list[RewardFunction]:
    """The functions with TRL's names, weights and texts; equal names are told apart by a number."""
    if weights is not None and len(weights) != len(calls):
        raise UserError(
            f"GRPOConfig: reward_weights has {len(weights)} numbers for {len(calls)} reward functions; give one for"
            " each."
        )
    made: list[RewardFunction] = []
    names: list[str] = []
    for place, call in enumerate(calls):
        name = own_name(call)
        names.append(name)
        if names.count(name) > 1:
            name = f"{name}_{names.count(name)}"
        weight = 1.0 if weights is None else float(weights[place])
        made.append(reward_function(decoded(call, tokenizer, state), name=name, weight=weight))
    return made


def decoded(call: Reward, tokenizer: PreTrainedTokenizerBase, state: Callable[[], object]) -> Reward:
    """The function as TRL calls it; one that scores a single response per call stays as it is."""
    if not callable(call) or isinstance(call, type):
        raise UserError(
            f"reward_funcs: {call!r:.80} ({type(call).__name__}) cannot score completions.  Give a function, an object"
            " with a __call__ method, a model, or a model's folder."
        )
    named = inspect.signature(call).parameters
    if "response" in named and not named.keys() & {"prompts", "completions", COMPLETION_IDS}:
        return call
    return DecodedReward(call, tokenizer, state)
