r"""Answers to the problems of reasoning-gym's generators.

**What is read.**  Behind the last `</think>`: the last closed `<answer>…</answer>`, else the last `\boxed{…}`, else all
there is.

**What earns what.**  A right answer is worth 1, all else 0.  What the row's `scorer` says decides how it is found right
(posttrain.rewards.exact_match): as the same text or number, as one of a list, as arithmetic over the problem's
numbers, or by the generator's own scorer, in the sandbox, of which full score is right.  With `partial_credit` what
that gives below is paid as it is.

**Known hacks, and what stops them.**  Answers that run as Python where the scorer evaluates them: those scorers are not
asked, or behind a grammar, and never outside the sandbox.  A text that contains the answer among others, four other
numbers that make 24, towers of powers: not paid, and killed.  Not stopped: whatever a generator's own scorer is lenient
about (blanks, order, a tolerance), and guesses where there are few answers (yes or no).
"""

import importlib.util
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, cast

from posttrain.errors import UserError
from posttrain.rewards.code.function_questions import SandboxFunction, Unanswered, answers
from posttrain.rewards.exact_match import (
    MAX_CHARACTERS,
    Scorer,
    final_text,
    is_expression,
    is_listed,
    is_no_number,
    makes_target,
    same_answer,
    same_text,
)
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.resources import Resources, SessionReward
from posttrain.sandbox import inside
from posttrain.sandbox.execution import FEW, ServerOptions
from posttrain.sandbox.inside import plain
from posttrain.sandbox.process_pool import ProcessPool
from posttrain.sandbox.sandboxes import Sandboxes, site_packages

TRIED_ROWS = 4
"""Rows of each generator whose own answer is scored before training."""
FULL = 1.0 - 1e-9
"""A scorer's number from which on an answer is right."""


SCORE = SandboxFunction("score", "from prepared import score")
PREPARE = Path(inside.__file__).with_name("gym_check.py")


@dataclass(frozen=True, slots=True)
class GymQuestion:
    """What an answer to a problem is worth to its generator's scorer."""

    dataset: str
    """Generator and options, as `dataset_key` writes them."""
    answer: str
    entry: Mapping[str, Any]


def dataset_key(generator: str, options: Mapping[str, object]) -> str:
    return json.dumps([generator, options], sort_keys=True)


def gym_scores(
    questions: Sequence[GymQuestion], datasets: Collection[str], sandboxes: Sandboxes, *, cpu_seconds: float
) -> list[object]:
    """What the scorers say, a number where nothing went wrong, or `Unanswered`.

    `datasets` are all that are known, those of the questions among them: a server is started for each such collection.
    """
    asked = [(each.dataset, each.answer, each.entry) for each in questions]
    return answers(sandbox_with_datasets(sandboxes, datasets), SCORE, asked, cpu_seconds=cpu_seconds)


def sandbox_with_datasets(sandboxes: Sandboxes, datasets: Collection[str]) -> ProcessPool:
    """The sealed one with reasoning-gym imported and the data sets open."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            "reward generated: reasoning-gym's own scorer is asked about such answers, and it is not installed.\n"
            "    `pip install posttrain[gym]`."
        )
    source = PREPARE.read_text(encoding="utf-8") + f"\n\nopen_datasets({sorted(datasets)!r})\n"
    return sandboxes.started_with(ServerOptions(modules=FEW, path=site_packages(), prepare=source))


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
class GeneratedReward(SessionReward):
    """Reward function: 1 for a right answer to a row that a generator made; other rows are not scored."""

    partial_credit: bool = False
    """Pay what a generator's own scorer gives below full score, as it is: some of that is for showing up."""
    cpu_seconds: float = 3.0
    """Processor time for one answer in the sandbox."""
    rows_stand_alone: ClassVar[bool] = True
    modules: ClassVar[tuple[str, ...]] = ("reasoning_gym",)

    def scores(
        self,
        resources: Resources,
        /,
        *,
        completions: Sequence[str],
        finish_reasons: Sequence[str],
        **columns: Any,
    ) -> list[object]:
        """A score for each completion, or why it has none."""
        count = len(completions)
        named = [columns.get(name) or [None] * count for name in ("generator", "scorer", "answer", "entry")]
        problems = [problem_of(*of_row) for of_row in zip(*named, strict=True)]
        texts = zip(completions, finish_reasons, problems, strict=True)
        first = [self.quickly(text, finish == "length", problem) for text, finish, problem in texts]
        questions = [each for each in first if isinstance(each, GymQuestion)]
        said = iter(self.asked(questions, resources))
        return [self.slowly(next(said)) if isinstance(each, GymQuestion) else each for each in first]

    def asked(self, questions: Sequence[GymQuestion], resources: Resources) -> list[object]:
        """The generators' own scores of some answers."""
        if not questions:
            return []
        known = resources.memory(self, set[str])
        known |= {each.dataset for each in questions}
        return gym_scores(questions, known, resources.sandboxes, cpu_seconds=self.cpu_seconds)

    def quickly(self, text: str, cut_off: bool, problem: GeneratedProblem | None) -> Graded | GymQuestion | None:
        """The verdict where no library is needed, or the question for the generator's scorer."""
        if problem is None:
            return None
        answer = final_text(text, cut_off=cut_off)
        if not answer:
            return Graded(0.0, GeneratedOutcome.TRUNCATED if cut_off else GeneratedOutcome.NO_ANSWER)
        if len(answer) > MAX_CHARACTERS:
            return Graded(0.0, GeneratedOutcome.REFUSED)
        match problem.scorer:
            case Scorer.SAME:
                return right(problem.gold is not None and same_answer(answer, problem.gold))
            case Scorer.TEXT:
                return right(problem.gold is not None and same_text(answer, problem.gold))
            case Scorer.LISTED:
                return right(is_listed(answer, problem.entry))
            case Scorer.ARITHMETIC:
                return right(makes_target(answer, problem.entry))
            case Scorer.EXPRESSION if not is_expression(answer):
                return Graded(0.0, GeneratedOutcome.REFUSED)
            case _ if is_no_number(answer, problem.gold):
                return Graded(0.0, GeneratedOutcome.REFUSED)
        return GymQuestion(problem.dataset, answer, problem.entry)

    def slowly(self, said: object) -> Graded | ScoringFailure:
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
        """Score some gold answers.  Raises UserError for one that is not paid: no completion would be."""
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
    return Graded(1.0, GeneratedOutcome.CORRECT) if is_right else Graded(0.0, GeneratedOutcome.WRONG)
