"""Rewards for a right mathematical answer: the column `solution` says which.

As in TRL the first LaTeX of a completion is read, a `\\boxed` before others.  A number in plain text is not read, and
earns 0; the reward `maths` of this package reads it.  A solution that cannot be read scores nothing (None).
math-verify, the extra `math`, runs in the sandbox; what takes longer than `CPU_SECONDS` earns 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.rewards.code.function_questions import SandboxFunction, Unanswered, answers
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.resources import default_resources
from posttrain.rewards.math_verify import sandbox_with_maths
from posttrain.rewards.shaping import CosineLength
from posttrain.trl.rewards.completion_rewards import CLOSING, content_of_completion

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
    """Each text compared with its solution, inside the sandbox."""
    asked = list(zip(solutions, texts, strict=True))
    if not asked:
        return []
    sandbox = sandbox_with_maths(default_resources().sandboxes)
    return [compared(said) for said in answers(sandbox, FIRST_LATEX, asked, cpu_seconds=CPU_SECONDS)]


def compared(said: object) -> Compared:
    """What a reply, or the lack of one, says of a completion."""
    if said is Unanswered.LOST:
        return Compared(ScoringFailure("the sandbox failed while it compared this answer"), "[lost]", "[lost]")
    if not isinstance(said, list | tuple):
        return Compared(0.0, "[unread]", "[unread]")
    verdict, gold, answer = map(str, said)
    if verdict == "no_gold":
        return Compared(None, "[unparseable]", "[skipped]")
    return Compared(float(verdict == "same"), gold, answer or "[unparseable]")


def logged(found: Sequence[Compared], solution: Sequence[str], log_extra: LogExtra | None) -> Scores:
    """The scores; what was read goes to the log where the trainer gives one."""
    if log_extra is not None:
        log_extra("solution", [*solution])
        log_extra("gold_parsed", [each.gold for each in found])
        log_extra("answer_parsed", [each.answer for each in found])
    return [each.score for each in found]
