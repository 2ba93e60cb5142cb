"""The reward functions of `trl.rewards` 1.16, by the same names: `from posttrain.trl.rewards import accuracy_reward`.

They return TRL's scores.  The column `solution` is the right answer.  As in TRL, only LaTeX is read: the first of a
completion, a `\\boxed` before others.  Plain numbers earn 0; the reward `maths` of this package reads those.  A
solution that cannot be read scores nothing (None).  math-verify, the extra `math`, runs in the sandbox: an answer that
takes longer than `CPU_SECONDS` earns 0.

Also calls rewards as TRL does: with the text without special tokens and prefill.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.environments.method_tools import MethodTools
from posttrain.errors import UserError
from posttrain.options.environment import EnvironmentOptions
from posttrain.rewards.code.function_questions import SandboxFunction, Unanswered, sandbox_answers
from posttrain.rewards.grading import function
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.calls import ENVIRONMENT
from posttrain.rewards.grading.function import RewardFunction, ScoringFailure, name_of_callable
from posttrain.rewards.grading.resources import default_resources
from posttrain.rewards.math_reward import sandbox_with_maths
from posttrain.rewards.model import RewardModel, RewardModelEnsemble
from posttrain.rewards.shaping import CosineLength, Repetition, SoftOverlong

__all__ = [
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]
OPENING, CLOSING = "<think>", "</think>"
Ids = Sequence[Sequence[int]]


def content_of_completion(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def think_format_reward(completions: Sequence[Any], **_columns: object) -> list[float]:
    """1 for a completion that begins with `<think>`, has no second one and closes it with `</think>`; else 0."""
    texts = [content_of_completion(each) for each in completions]
    return [
        float(text.startswith(OPENING) and OPENING not in text[len(OPENING) :] and CLOSING in text) for text in texts
    ]


@dataclass(frozen=True)
class RepetitionPenalty:
    """`max_penalty` times the share of a completion's n-grams of tokens that occurred in it before.

    Completions of fewer than `ngram_size` tokens get 0.
    """

    ngram_size: int = 3
    max_penalty: float = -1.0
    __name__ = "repetition_penalty_reward"

    def __post_init__(self) -> None:
        if self.max_penalty > 0:
            raise UserError(f"get_repetition_penalty_reward: max_penalty = {self.max_penalty}: must be 0 or below.")

    def __call__(self, completion_ids: Ids, **_columns: object) -> list[float]:
        shares = Repetition(ngram=self.ngram_size)(completion_ids=completion_ids)
        return [-share * self.max_penalty if share else 0.0 for share in shares]


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """DAPO's punishment of completions near their limit; with a cache of 0 only those beyond it.

    0 up to `max_completion_len - soft_punish_cache` tokens, then falling in a line to -1 at the limit, -1 beyond.
    """

    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Ids, **_columns: object) -> list[float]:
        if self.soft_punish_cache == 0:
            return [-1.0 if len(ids) > self.max_completion_len else 0.0 for ids in completion_ids]
        punish = SoftOverlong(max_tokens=self.max_completion_len, cache_tokens=self.soft_punish_cache)
        return [value or 0.0 for value in punish(completion_ids=completion_ids)]


get_repetition_penalty_reward, get_soft_overlong_punishment = RepetitionPenalty, SoftOverlongPunishment
CPU_SECONDS = 5.0
FIRST_LATEX = SandboxFunction("compare_first_latex", "from prepared import compare_first_latex")
Scores = list[float | ScoringFailure | None]
LogExtra = Callable[[str, list[Any]], None]


Compared = tuple[float | ScoringFailure | None, str, str]
"""The result of comparing a completion with its solution: the score, and what was read in solution and answer."""


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: LogExtra | None = None, **_columns: object
) -> Scores:
    """1 if the first LaTeX of a completion equals the solution, else 0; None if the solution cannot be read."""
    compared = with_solutions([content_of_completion(each) for each in completions], solution)
    return logged(compared, solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **_columns: object,
) -> Scores:
    """The same for the text after the reasoning; a completion whose reasoning does not end earns 0.

    The reasoning ends with the last occurrence of the first of `reasoning_delimiters` that the completion has,
    `</think>` by default.
    """
    delimiters = [CLOSING] if reasoning_delimiters is None else reasoning_delimiters
    texts: list[str | None] = []
    for text in map(content_of_completion, completions):
        end = next((each for each in delimiters if each in text), None)
        texts.append(None if end is None else text.rpartition(end)[2])
    pairs = zip(texts, solution, strict=True)
    finished = [(text, gold) for text, gold in pairs if text is not None]
    found = iter(with_solutions([text for text, _ in finished], [gold for _, gold in finished]))
    incomplete: Compared = 0.0, "[incomplete reasoning]", "[incomplete reasoning]"
    return logged([incomplete if text is None else next(found) for text in texts], solution, log_extra)


@dataclass(frozen=True)
class CosineScaledReward:
    """A correct answer earns more if it is short, a wrong one loses less if it is long; see `CosineLength`."""

    lengths: CosineLength
    __name__ = "cosine_scaled_reward"

    def __call__(
        self, completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **_c: object
    ) -> Scores:
        return [
            self.lengths.value(len(ids), score > 0.5) if isinstance(score, float) else score
            for score, ids in zip(accuracy_reward(completions, solution), completion_ids, strict=True)
        ]


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> CosineScaledReward:
    """`accuracy_reward`, scaled by length along half a cosine up to `max_len` tokens."""
    return CosineScaledReward(
        CosineLength(
            max_tokens=max_len,
            correct_short=max_value_correct,
            correct_long=min_value_correct,
            wrong_short=min_value_wrong,
            wrong_long=max_value_wrong,
        )
    )


def with_solutions(texts: Sequence[str], solutions: Sequence[str]) -> list[Compared]:
    pairs = list(zip(solutions, texts, strict=True))
    if not pairs:
        return []
    sandbox = sandbox_with_maths(default_resources().sandboxes)
    return [compared(reply) for reply in sandbox_answers(sandbox, FIRST_LATEX, pairs, cpu_seconds=CPU_SECONDS)]


def compared(reply: object) -> Compared:
    """The result of a reply, or of a missing reply."""
    if reply is Unanswered.LOST:
        return ScoringFailure("the sandbox failed while it compared this answer"), "[lost]", "[lost]"
    if not isinstance(reply, list | tuple):
        return 0.0, "[unread]", "[unread]"
    verdict, gold, answer = map(str, reply)
    if verdict == "no_gold":
        return None, "[unparseable]", "[skipped]"
    return float(verdict == "same"), gold, answer or "[unparseable]"


def logged(found: Sequence[Compared], solution: Sequence[str], log_extra: LogExtra | None) -> Scores:
    if log_extra is not None:
        log_extra("solution", [*solution])
        log_extra("gold_parsed", [gold for _, gold, _ in found])
        log_extra("answer_parsed", [answer for _, _, answer in found])
    return [score for score, _, _ in found]


COMPLETION_IDS, ENVIRONMENTS = "completion_ids", "environments"
Reward = Callable[..., object]


@dataclass(init=False, eq=False)
class DecodedReward:
    """A reward function of lists that is given completions as TRL decodes them.

    Its signature is that of the function, and `completion_ids`, of which the texts are made.
    """

    call: Reward

    def __init__(self, call: Reward, tokenizer: PreTrainedTokenizerBase, state: Callable[[], object]) -> None:
        """`state` returns what the function gets as `trainer_state`."""
        self.call, self.tokenizer, self.state = call, tokenizer, state
        self.__name__ = name_of_callable(call)
        signature = inspect.signature(call)
        parameters = signature.parameters.values()
        self.takes_ids = COMPLETION_IDS in signature.parameters or any(
            each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters
        )
        self.takes_environments = ENVIRONMENTS in signature.parameters
        added = [COMPLETION_IDS] if not self.takes_ids else []
        kept = [each for each in parameters if each.name != ENVIRONMENTS]
        added += [ENVIRONMENT] if self.takes_environments else []
        others = [each for each in kept if each.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = [each for each in kept if each.kind is inspect.Parameter.VAR_KEYWORD]
        named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in added]
        self.__signature__ = signature.replace(parameters=[*others, *named, *rest])

    def __call__(self, /, **given: Any) -> object:
        """Call the function with the same arguments but other texts."""
        ids = given[COMPLETION_IDS] if self.takes_ids else given.pop(COMPLETION_IDS)
        if "completions" in given:
            given["completions"] = as_trl_decodes(given["completions"], ids, self.tokenizer)
        for name in given.keys() & function.TEXTS:
            given[name] = as_trl_decodes(given[name], ids, self.tokenizer)
        if "trainer_state" in given:
            given["trainer_state"] = self.state()
        given.pop("environment_rewards", None)
        if (environments := given.pop(ENVIRONMENT, None)) is not None:
            given[ENVIRONMENTS] = [getattr(each, "object", each) for each in environments]
        return self.call(**given)


class DecodedRewardModel(RewardModel):
    """A reward model that reads completions as TRL decodes them, and uses its first label as the score."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        policy_tokenizer: PreTrainedTokenizerBase,
        own_tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        """A model object without a tokenizer gets the tokenizer of the folder from which it was loaded."""
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
        text if isinstance(old, str) else old if has_replies(old) else [{"role": "assistant", "content": text}]
        for old, text in zip(completions, texts, strict=True)
    ]


def has_replies(completion: object) -> bool:
    """Whether it is a conversation: TRL reads its messages, and not its tokens."""
    return isinstance(completion, list) and (len(completion) > 1 or "tool_calls" in completion[0])


def own_reward(
    factory: Callable[[], Any] | None, tools: Sequence[Callable[..., Any]] | None = None
) -> list[RewardFunction]:
    """The reward from `get_reward` of an environment's objects, named after their class, with weight 1.

    Raises UserError if a resumed step would read replies from the journal, and so would not have objects.
    """
    if factory is None:
        return []
    made, seconds = MethodTools(factory), EnvironmentOptions().seconds
    example = made.example(seconds)
    made.close(example, seconds)
    name = type(example).__name__
    if not callable(getattr(type(example), "get_reward", None)):
        return []
    if not all(getattr(each, "reproducible", True) for each in (example, *(tools or ()))):
        fault = f"{name} has get_reward, and reproducible = False is set on it or on a tool"
        why = "A resumed step reads their replies from the journal, so there is no object to pay"
        raise UserError(f"environment_factory: {fault}.  {why}.  Pay in reward_funcs, or remove reproducible = False.")

    def get_reward(environment: Sequence[Any], **_columns: object) -> list[object]:
        return [getattr(each, "object", each).get_reward() for each in environment]

    return [function.reward_function(get_reward, name=name)]


def one_for_each(
    tokenizers: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None, given: object
) -> list[PreTrainedTokenizerBase | None]:
    """The tokenizer given for each reward, or None."""
    count = len(given) if isinstance(given, list | tuple) else 1
    if tokenizers is None:
        return [None] * count
    made = [*([tokenizers] if isinstance(tokenizers, PreTrainedTokenizerBase) else tokenizers)]
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
        made.append(function.reward_function(call, name=f"{name}_{before + 1}" if before else name, weight=weight))
    return made


def decoded_reward(
    call: object, tokenizer: PreTrainedTokenizerBase, given: PreTrainedTokenizerBase | None, state: Callable[[], object]
) -> Reward:
    """The reward as TRL calls it; a function that scores a single response per call does not change."""
    if isinstance(call, str | PreTrainedModel):
        return DecodedRewardModel(call, tokenizer, given)
    if isinstance(call, RewardModel | RewardModelEnsemble):
        return call
    if not callable(call) or isinstance(call, type | nn.Module):
        raise UserError(
            f"reward_funcs: {call!r:.80} ({type(call).__name__}) cannot score completions.  Give a function, a callable"
            " object, or a sequence classifier of transformers or its folder."
        )
    if function.keywords(RewardFunction(name=name_of_callable(call), call=call)).one_by_one:
        return call
    return DecodedReward(call, tokenizer, state)
