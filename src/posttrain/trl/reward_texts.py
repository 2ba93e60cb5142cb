"""Reward functions as TRL calls them: the text without special tokens and without what was prefilled."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.function import TEXTS, RewardFunction, keywords, name_of_callable, reward_function
from posttrain.rewards.model import RewardModel, RewardModelEnsemble

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
        self.__name__ = name_of_callable(call)
        signature = inspect.signature(call)
        parameters = signature.parameters.values()
        self.takes_ids = COMPLETION_IDS in signature.parameters or any(
            each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters
        )
        ids = [] if self.takes_ids else [inspect.Parameter(COMPLETION_IDS, inspect.Parameter.KEYWORD_ONLY)]
        self.__signature__ = signature.replace(parameters=[*parameters, *ids])

    def __call__(self, /, **given: Any) -> object:
        """The function's answer to the same with other texts."""
        ids = given[COMPLETION_IDS] if self.takes_ids else given.pop(COMPLETION_IDS)
        if "completions" in given:
            given["completions"] = as_trl_decodes(given["completions"], ids, self.tokenizer)
        for name in given.keys() & TEXTS:
            given[name] = as_trl_decodes(given[name], ids, self.tokenizer)
        if "trainer_state" in given:
            given["trainer_state"] = self.state()
        return self.call(**given)


class DecodedRewardModel(RewardModel):
    """A reward model that reads completions as TRL decodes them, and takes its first label for the score."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        policy_tokenizer: PreTrainedTokenizerBase,
        own_tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        """A model object without a tokenizer gets that of the folder it was loaded from."""
        if own_tokenizer is None and isinstance(model, PreTrainedModel) and model.name_or_path:
            own_tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        super().__init__(model, tokenizer=own_tokenizer, label=0)
        self.policy_tokenizer = policy_tokenizer

    def __call__(
        self, /, *, prompts: Sequence[object], completions: Sequence[object], **columns: object
    ) -> list[float] | list[Graded]:
        ids = cast(Sequence[Sequence[int]], columns[COMPLETION_IDS])
        return super().__call__(prompts=prompts, completions=as_trl_decodes(completions, ids, self.policy_tokenizer))


def as_trl_decodes(
    completions: Sequence[object], ids: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> list[object]:
    texts: list[str] = tokenizer.batch_decode([list(each) for each in ids], skip_special_tokens=True)
    return [
        text if isinstance(old, str) else [{"role": "assistant", "content": text}]
        for old, text in zip(completions, texts, strict=True)
    ]


def one_for_each(
    tokenizers: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None, given: object
) -> list[PreTrainedTokenizerBase | None]:
    """The tokenizer given for each reward, or None."""
    count = len(given) if isinstance(given, list | tuple) else 1
    if tokenizers is None:
        return [None] * count
    made: list[PreTrainedTokenizerBase | None] = (
        [tokenizers] if isinstance(tokenizers, PreTrainedTokenizerBase) else [*tokenizers]
    )
    if len(made) != count:
        numbers = f"{len(made)} for {count} reward functions, which must match"
        raise UserError(f"reward_processing_classes: {numbers}; give one for each, None for a function.")
    return made


def reward_functions(
    given: object,
    tokenizers: Sequence[PreTrainedTokenizerBase | None],
    weights: Sequence[float] | None,
    tokenizer: PreTrainedTokenizerBase,
    state: Callable[[], object],
) -> list[RewardFunction]:
    """The rewards with TRL's names, weights and texts; equal names get a number.

    `tokenizers` are those of reward models, one for each reward, and `tokenizer` is the policy's.
    """
    rewards = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    if not rewards:
        missing = "it is missing" if given is None else "the list is empty"
        raise UserError(f"reward_funcs: {missing}.  Give a function, or a list of them.")
    calls = [decoded_reward(call, tokenizer, each, state) for call, each in zip(rewards, tokenizers, strict=True)]
    if weights is not None and len(weights) != len(calls):
        numbers = f"{len(weights)} numbers for {len(calls)} reward functions"
        raise UserError(f"reward_weights has {numbers}; give one for each.")
    made: list[RewardFunction] = []
    names = [name_of_callable(call) for call in calls]
    for number, (call, name) in enumerate(zip(calls, names, strict=True)):
        before = names[:number].count(name)
        weight = 1.0 if weights is None else float(weights[number])
        made.append(reward_function(call, name=f"{name}_{before + 1}" if before else name, weight=weight))
    return made


def decoded_reward(
    call: object, tokenizer: PreTrainedTokenizerBase, given: PreTrainedTokenizerBase | None, state: Callable[[], object]
) -> Reward:
    """The reward as TRL calls it; a function that scores a single response per call stays as it is."""
    if isinstance(call, str | PreTrainedModel):
        return DecodedRewardModel(call, tokenizer, given)
    if isinstance(call, RewardModel | RewardModelEnsemble):
        return call
    if not callable(call) or isinstance(call, type | nn.Module):
        raise UserError(
            f"reward_funcs: {call!r:.80} ({type(call).__name__}) cannot score completions.  Give a function, a callable"
            " object, or a sequence classifier of transformers or its folder."
        )
    if keywords(RewardFunction(name=name_of_callable(call), call=call)).one_by_one:
        return call
    return DecodedReward(call, tokenizer, state)
