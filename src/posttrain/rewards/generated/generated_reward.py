r"""Answers to the problems of reasoning-gym's generators.

**What is read.**  Behind the last `</think>`: the last closed `<answer>…</answer>`, else the last `\boxed{…}`, else all
there is.

**What earns what.**  A right answer is worth 1, all else 0.  What the row's `scorer` says decides how it is found right
(posttrain.rewards.generated.scorers): as the same text or number, as one of a list, as arithmetic over the problem's
numbers, or by the generator's own scorer, in the sandbox, of which full score is right.  With `partial_credit` what
that gives below is paid as it is.

**Known hacks, and what stops them.**  Answers that run as Python where the scorer evaluates them: those scorers are not
asked, or behind a grammar, and never outside the sandbox.  A text that contains the answer among others, four other
numbers that make 24, towers of powers: not paid, and killed.  Not stopped: whatever a generator's own scorer is lenient
about (blanks, order, a tolerance), and guesses where there are few answers (yes or no).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar, cast

from posttrain.errors import UserError
from posttrain.rewards.function_questions import Unanswered
from posttrain.rewards.generated.gym_scores import GymQuestion, dataset_key, gym_scores
from posttrain.rewards.generated.own_scoring import (
    MAX_CHARACTERS,
    final_text,
    is_expression,
    is_no_number,
    listed,
    makes_target,
    same,
    same_text,
)
from posttrain.rewards.generated.scorers import Scorer
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.resources import Resources, default_resources
from posttrain.sandbox.inside import plain

TRIED_ROWS = 4
"""Rows of each generator whose own answer is scored before training."""
FULL = 1.0 - 1e-9
"""A scorer's number from which on an answer is right."""


class GeneratedOutcome(StrEnum):
    """How an answer fared."""

    CORRECT = "correct"
    WRONG = "wrong"
    PARTIAL = "partial"
    """The generator's scorer gives something for it; paid with `partial_credit` alone."""
    REFUSED = "refused"
    """Too long, nan or infinity, or more than arithmetic where the scorer would evaluate it."""
    UNREADABLE = "unreadable"
    """The scorer raised at it, or ran out of memory."""
    TIME_LIMIT = "time_limit"
    NO_ANSWER = "no_answer"
    TRUNCATED = "truncated"
    """No answer, and the length limit cut the completion off."""


@dataclass(frozen=True, slots=True)
class GeneratedProblem:
    """What a row says of its problem."""

    scorer: Scorer
    gold: str | None
    dataset: str
    """Generator and options."""
    packed: str

    @property
    def entry(self) -> dict[str, Any]:
        """The problem as its generator made it: question, answer and metadata."""
        return cast(dict[str, Any], plain.load(self.packed.encode("utf-8", "surrogatepass")))


@dataclass(frozen=True, kw_only=True)
class GeneratedReward:
    """Reward function: 1 for a right answer to a row that a generator made; other rows are not scored."""

    partial_credit: bool = False
    """Pay what a generator's own scorer gives below full score, as it is: some of that is for showing up."""
    cpu_seconds: float = 3.0
    """Processor time for one answer in the sandbox."""
    rows_stand_alone: ClassVar[bool] = True
    modules: ClassVar[tuple[str, ...]] = ("reasoning_gym",)

    def __call__(self, /, *, completions: Sequence[str], finish_reasons: Sequence[str], **columns: Any) -> list[object]:
        return self.scores(default_resources(), completions=completions, finish_reasons=finish_reasons, **columns)

    def with_resources(self, resources: Resources) -> Callable[..., list[object]]:
        """The same in a session's sandbox."""
        return partial(self.scores, resources)

    def scores(
        self,
        resources: Resources,
        /,
        *,
        completions: Sequence[str],
        finish_reasons: Sequence[str],
        **columns: Any,
    ) -> list[object]:
        """A score for each completion, or what kept it from having one."""
        count = len(completions)
        named = [columns.get(name) or [None] * count for name in ("generator", "scorer", "answer", "entry")]
        problems = [problem_of(*of_row) for of_row in zip(*named, strict=True)]
        texts = zip(completions, finish_reasons, problems, strict=True)
        first = [self.quickly(text, finish == "length", problem) for text, finish, problem in texts]
        questions = [each for each in first if isinstance(each, GymQuestion)]
        said = iter(self.asked(questions, resources))
        return [self.slowly(next(said)) if isinstance(each, GymQuestion) else each for each in first]

    def asked(self, questions: Sequence[GymQuestion], resources: Resources) -> list[object]:
        """What the generators' scorers say of some answers."""
        if not questions:
            return []
        known = resources.memory(self, set[str])
        known |= {each.dataset for each in questions}
        return gym_scores(questions, known, resources.sandboxes, cpu_seconds=self.cpu_seconds)

    def quickly(self, text: str, cut_off: bool, problem: GeneratedProblem | None) -> Graded | GymQuestion | None:
        """The verdict where it is found here, or the question to the generator's scorer."""
        if problem is None:
            return None
        answer = final_text(text, cut_off=cut_off)
        if not answer:
            return Graded(0.0, GeneratedOutcome.TRUNCATED if cut_off else GeneratedOutcome.NO_ANSWER)
        if len(answer) > MAX_CHARACTERS:
            return Graded(0.0, GeneratedOutcome.REFUSED)
        match problem.scorer:
            case Scorer.SAME:
                return right(problem.gold is not None and same(answer, problem.gold))
            case Scorer.TEXT:
                return right(problem.gold is not None and same_text(answer, problem.gold))
            case Scorer.LISTED:
                return right(listed(answer, problem.entry))
            case Scorer.ARITHMETIC:
                return right(makes_target(answer, problem.entry))
            case Scorer.EXPRESSION if not is_expression(answer):
                return Graded(0.0, GeneratedOutcome.REFUSED)
            case _ if is_no_number(answer, problem.gold):
                return Graded(0.0, GeneratedOutcome.REFUSED)
        return GymQuestion(problem.dataset, answer, problem.entry)

    def slowly(self, said: object) -> Graded | ScoringFailure:
        """What a scorer's answer is worth."""
        if isinstance(said, float):
            if said >= FULL:
                return right(True)
            outcome = GeneratedOutcome.PARTIAL if said > 0 else GeneratedOutcome.WRONG
            return Graded(said if self.partial_credit else 0.0, outcome)
        if said is Unanswered.LOST:
            return ScoringFailure("the sandbox lost an answer to a generated problem")
        return Graded(
            0.0, GeneratedOutcome.TIME_LIMIT if said is Unanswered.TIME_LIMIT else GeneratedOutcome.UNREADABLE
        )

    def check_rows(self, rows: Sequence[tuple[str, Mapping[str, object]]], resources: Resources) -> None:
        """Have some rows' own answers scored.  Raises UserError for one that is not paid: no completion would be."""
        tried: dict[str, list[tuple[str, str, Mapping[str, object]]]] = {}
        for where, columns in rows:
            problem = problem_of(*(columns.get(name) for name in ("generator", "scorer", "answer", "entry")))
            if problem is not None and problem.gold is not None:
                tried.setdefault(problem.dataset, []).append((where, problem.gold, columns))
        chosen = [each for of_dataset in tried.values() for each in of_dataset[:TRIED_ROWS]]
        verdicts = self.scores(
            resources,
            completions=[f"<answer>{gold}</answer>" for _, gold, _ in chosen],
            finish_reasons=["stop"] * len(chosen),
            **{name: [columns[name] for *_, columns in chosen] for name in ("generator", "scorer", "answer", "entry")},
        )
        for (where, gold, columns), verdict in zip(chosen, verdicts, strict=True):
            if isinstance(verdict, Graded) and verdict.outcome is not GeneratedOutcome.CORRECT:
                raise UserError(
                    f"{where}: its own answer {gold[:60]!r} is not paid ({verdict.outcome}), so none would be: the"
                    f" generator {columns['generator']} cannot be scored here.  Choose another, or other"
                    " generator_options."
                )


def problem_of(generator: object, scorer: object, answer: object, entry: object) -> GeneratedProblem | None:
    """What a row's columns say of its problem; None for a row that no generator made."""
    if not isinstance(generator, str) or not isinstance(entry, str):
        return None
    content = json.loads(entry)
    gold = answer if isinstance(answer, str) else None
    return GeneratedProblem(Scorer(str(scorer)), gold, dataset_key(generator, content["options"]), content["entry"])


def right(is_right: bool) -> Graded:
    """The verdict on an answer that is right or wrong."""
    return Graded(1.0, GeneratedOutcome.CORRECT) if is_right else Graded(0.0, GeneratedOutcome.WRONG)
