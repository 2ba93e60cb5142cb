"""The reward functions of `trl.rewards` 1.16, by the same names: `from posttrain.trl.rewards import accuracy_reward`.

They return TRL's scores.  The column `solution` is the right answer.  As in TRL, only LaTeX is read: the first of a
completion, a `\\boxed` before others.  Plain numbers earn 0; the reward `maths` of this package reads those.  A
solution that cannot be read scores nothing (None).  math-verify, the extra `math`, runs in the sandbox: an answer that
takes longer than `CPU_SECONDS` earns 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import UserError
from posttrain.rewards.code.function_questions import SandboxFunction, Unanswered, answers
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.resources import default_resources
from posttrain.rewards.math_reward import sandbox_with_maths
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
    """`max_penalty` times the share of a completion's n-grams of tokens that occurred in it before."""

    ngram_size: int
    max_penalty: float
    __name__ = "repetition_penalty_reward"

    def __post_init__(self) -> None:
        if self.max_penalty > 0:
            raise UserError(f"get_repetition_penalty_reward: max_penalty = {self.max_penalty}: must be 0 or below.")

    def __call__(self, completion_ids: Ids, **_columns: object) -> list[float]:
        shares = Repetition(ngram=self.ngram_size)(completion_ids=completion_ids)
        return [-share * self.max_penalty if share else 0.0 for share in shares]


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RepetitionPenalty:
    """A penalty for repeated n-grams; completions of fewer than `ngram_size` tokens get 0."""
    return RepetitionPenalty(ngram_size, max_penalty)


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """0 up to `max_completion_len - soft_punish_cache` tokens, then falling in a line to -1 at the limit, -1 beyond."""

    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Ids, **_columns: object) -> list[float]:
        if self.soft_punish_cache == 0:
            return [-1.0 if len(ids) > self.max_completion_len else 0.0 for ids in completion_ids]
        punish = SoftOverlong(max_tokens=self.max_completion_len, cache_tokens=self.soft_punish_cache)
        return [value or 0.0 for value in punish(completion_ids=completion_ids)]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlongPunishment:
    """DAPO's punishment of completions near their limit; with a cache of 0 only those beyond it."""
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)


CPU_SECONDS = 5.0
FIRST_LATEX = SandboxFunction("compare_first_latex", "from prepared import compare_first_latex")
Scores = list[float | ScoringFailure | None]
LogExtra = Callable[[str, list[Any]], None]


@dataclass(frozen=True, slots=True)
class Compared:
    """What comes of comparing one completion with its solution."""

    score: float | ScoringFailure | None
    gold: str
    answer: str


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: LogExtra | None = None, **_columns: object
) -> Scores:
    """1 where the first LaTeX of a completion is the solution, else 0; None where the solution cannot be read."""
    compared = with_solutions([content_of_completion(each) for each in completions], solution)
    return logged(compared, solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **_columns: object,
) -> Scores:
    """The same of what follows the reasoning; a completion whose reasoning does not end earns 0.

    The reasoning ends with the last occurrence of the first of `reasoning_delimiters` that the completion has,
    `</think>` by default.
    """
    delimiters = [CLOSING] if reasoning_delimiters is None else reasoning_delimiters
    texts = [answer_after(content_of_completion(each), delimiters) for each in completions]
    pairs = zip(texts, solution, strict=True)
    finished = [(text, gold) for text, gold in pairs if text is not None]
    found = iter(with_solutions([text for text, _ in finished], [gold for _, gold in finished]))
    incomplete = Compared(0.0, "[incomplete reasoning]", "[incomplete reasoning]")
    return logged([incomplete if text is None else next(found) for text in texts], solution, log_extra)


def answer_after(text: str, delimiters: Sequence[str]) -> str | None:
    """What follows the reasoning; None where it does not end."""
    found = next((each for each in delimiters if each in text), None)
    return None if found is None else text.rpartition(found)[2]


@dataclass(frozen=True)
class CosineScaledReward:
    """A right answer earns more when short, a wrong one loses less when long; see `CosineLength`."""

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
    return [compared(reply) for reply in answers(sandbox, FIRST_LATEX, pairs, cpu_seconds=CPU_SECONDS)]


def compared(reply: object) -> Compared:
    """The result of a reply, or of its absence."""
    if reply is Unanswered.LOST:
        return Compared(ScoringFailure("the sandbox failed while it compared this answer"), "[lost]", "[lost]")
    if not isinstance(reply, list | tuple):
        return Compared(0.0, "[unread]", "[unread]")
    verdict, gold, answer = map(str, reply)
    if verdict == "no_gold":
        return Compared(None, "[unparseable]", "[skipped]")
    return Compared(float(verdict == "same"), gold, answer or "[unparseable]")


def logged(found: Sequence[Compared], solution: Sequence[str], log_extra: LogExtra | None) -> Scores:
    if log_extra is not None:
        log_extra("solution", [*solution])
        log_extra("gold_parsed", [each.gold for each in found])
        log_extra("answer_parsed", [each.answer for each in found])
    return [each.score for each in found]
