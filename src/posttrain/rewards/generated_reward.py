r"""Answers to the problems of reasoning-gym's generators.

It reads what follows the last `</think>`: the last closed `<answer>…</answer>`, else the last `\boxed{…}`, else
everything.  A right answer is worth 1, all else 0; the row's `scorer` decides (posttrain.rewards.exact_match).

**Known hacks, and what stops them.**  Answers that run as Python in a scorer that evaluates them: those scorers are not
used, or only after a grammar check, and never outside the sandbox.  A text that contains the answer among others, four
other numbers that make 24, towers of powers: not paid, and killed.  Not stopped: whatever a generator's scorer is
lenient about (blanks, order, a tolerance), and guesses if there are few answers (yes or no).
"""

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

from posttrain.errors import UserError
from posttrain.rewards import exact_match
from posttrain.rewards.code.function_questions import SandboxFunction, Unanswered, answered_together, sandbox_answers
from posttrain.rewards.grading.answers import CUT_OFF, Graded, Texts
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.resources import Resources, SessionReward
from posttrain.sandbox import inside
from posttrain.sandbox.execution import FEW, ServerOptions
from posttrain.sandbox.inside import plain
from posttrain.sandbox.sandboxes import site_packages

COLUMNS = ("generator", "scorer", "answer", "entry")
SCORE = SandboxFunction("score", "from prepared import score")
PREPARE = Path(inside.__file__).with_name("gym_check.py")


class GymQuestion(NamedTuple):
    """An answer for its generator's scorer."""

    dataset: str
    answer: str
    entry: Mapping[str, Any]


def dataset_key(generator: str, options: Mapping[str, object]) -> str:
    return json.dumps([generator, options], sort_keys=True)


@dataclass(frozen=True, slots=True)
class GeneratedProblem:
    """A row's problem."""

    scorer: exact_match.Scorer
    gold: str | None
    dataset: str
    packed: str

    @property
    def entry(self) -> dict[str, Any]:
        return cast(dict[str, Any], plain.load(self.packed.encode("utf-8", "surrogatepass")))


@dataclass(frozen=True, kw_only=True)
class GeneratedReward(SessionReward):
    """Reward function: 1 for a right answer to a generated row; other rows are not scored."""

    partial_credit: bool = False
    """Also pay a generator's scores below full score, some of which are given for any answer."""
    cpu_seconds: float = 3.0
    """Processor time for one answer in the sandbox."""
    rows_stand_alone: ClassVar[bool] = True
    modules: ClassVar[tuple[str, ...]] = ("reasoning_gym",)

    def scores(
        self, resources: Resources, /, *, completions: Texts, finish_reasons: Texts, **columns: Any
    ) -> list[Graded | ScoringFailure | None]:
        count = len(completions)
        named = [columns.get(name) or [None] * count for name in COLUMNS]
        problems = [problem_of(*of_row) for of_row in zip(*named, strict=True)]
        texts = zip(completions, finish_reasons, problems, strict=True)
        first = [self.quickly(text, finish in CUT_OFF, problem) for text, finish, problem in texts]

        def scored(questions: list[GymQuestion]) -> Iterable[Graded | ScoringFailure]:
            if importlib.util.find_spec("reasoning_gym") is None:
                problem = "reasoning-gym, whose scorer such answers need, is not installed"
                raise UserError(f"reward generated: {problem}. Run `pip install posttrain[gym]`.")
            known = resources.memory(self, set[str])
            known |= {each.dataset for each in questions}  # each collection of known data sets starts a sealed server
            source = PREPARE.read_text(encoding="utf-8") + f"\n\nopen_datasets({sorted(known)!r})\n"
            options = ServerOptions(modules=FEW, path=site_packages(), prepare=source)
            sandbox = resources.sandboxes.started_with(options)
            return map(self.slowly, sandbox_answers(sandbox, SCORE, questions, cpu_seconds=self.cpu_seconds))

        return answered_together(first, GymQuestion, scored)

    def quickly(self, text: str, cut_off: bool, problem: GeneratedProblem | None) -> Graded | GymQuestion | None:
        """The verdict if no library is needed, or the question for the generator's scorer."""
        if problem is None:
            return None
        answer = exact_match.final_text(text, cut_off=cut_off)
        if not answer:
            return exact_match.missing_answer(cut_off)
        if len(answer) > exact_match.MAX_CHARACTERS:
            return Graded(0.0, exact_match.AnswerOutcome.REFUSED)
        gold = problem.gold
        match problem.scorer:
            case exact_match.Scorer.SAME:
                return exact_match.graded_answer(gold is not None and exact_match.same_answer(answer, gold))
            case exact_match.Scorer.TEXT:
                return exact_match.graded_answer(gold is not None and exact_match.same_text(answer, gold))
            case exact_match.Scorer.LISTED:
                listed = {exact_match.unspaced(str(each)) for each in problem.entry["metadata"]["valid_answers"]}
                return exact_match.graded_answer(exact_match.unspaced(answer) in listed)
            case exact_match.Scorer.ARITHMETIC:
                return exact_match.graded_answer(exact_match.makes_target(answer, problem.entry))
            case exact_match.Scorer.EXPRESSION if not exact_match.is_expression(answer):
                return Graded(0.0, exact_match.AnswerOutcome.REFUSED)
            case _ if exact_match.is_no_number(answer, problem.gold):
                return Graded(0.0, exact_match.AnswerOutcome.REFUSED)
        return GymQuestion(problem.dataset, answer, problem.entry)

    def slowly(self, said: object) -> Graded | ScoringFailure:
        if isinstance(said, float):
            if said >= 1.0 - 1e-9:
                return exact_match.graded_answer(True)
            outcome = exact_match.AnswerOutcome.PARTIAL if said > 0 else exact_match.AnswerOutcome.WRONG
            return Graded(said if self.partial_credit else 0.0, outcome)
        if said is Unanswered.LOST:
            return ScoringFailure("the sandbox lost an answer to a generated problem")
        late = said is Unanswered.TIME_LIMIT
        return Graded(0.0, exact_match.AnswerOutcome.TIME_LIMIT if late else exact_match.AnswerOutcome.UNREADABLE)

    def check_rows(self, rows: Sequence[tuple[str, Mapping[str, object]]], resources: Resources) -> None:
        """Score some gold answers.  Raises UserError for one that is not paid, since no completion would be."""
        tried: dict[str, list[tuple[str, str, Mapping[str, object]]]] = {}
        for where, columns in rows:
            problem = problem_of(*map(columns.get, COLUMNS))
            if problem is not None and problem.gold is not None:
                tried.setdefault(problem.dataset, []).append((where, problem.gold, columns))
        chosen = [each for of_dataset in tried.values() for each in of_dataset[:4]]
        verdicts = self.scores(
            resources,
            completions=[f"<answer>{gold}</answer>" for _, gold, _ in chosen],
            finish_reasons=["stop"] * len(chosen),
            **{name: [columns[name] for *_, columns in chosen] for name in COLUMNS},
        )
        for (where, gold, columns), verdict in zip(chosen, verdicts, strict=True):
            if isinstance(verdict, Graded) and verdict.outcome is not exact_match.AnswerOutcome.CORRECT:
                unpaid = f"its answer {gold[:60]!r} is not paid ({verdict.outcome}), so none would be"
                remedy = f"Choose another generator than {columns['generator']}, or other generator_options."
                raise UserError(f"{where}: {unpaid}. {remedy}")


def problem_of(generator: object, scorer: object, answer: object, entry: object) -> GeneratedProblem | None:
    if not isinstance(generator, str) or not isinstance(entry, str):
        return None
    content = json.loads(entry)
    gold = answer if isinstance(answer, str) else None
    return GeneratedProblem(
        exact_match.Scorer(str(scorer)), gold, dataset_key(generator, content["options"]), content["entry"]
    )
