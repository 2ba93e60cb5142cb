"""Small exercises for the mistakes: a bundled model, questions for it, and a correct grader."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.options.task import SentencesOptions
from posttrain.rewards.countdown import Outcome, countdown_outcome, puzzle
from posttrain.rewards.parsing.tags import answer_lines, answer_text
from posttrain.tasks.arithmetic_task import training_additions

Messages = list[dict[str, str]]

OPENINGS = SentencesOptions().openings


@dataclass(frozen=True, slots=True, kw_only=True)
class ExerciseQuestion:
    """A prompt, and the data to grade its answer."""

    asked: str | Messages
    numbers: tuple[int, ...] = ()
    target: int = 0


Grader = Callable[[ExerciseQuestion, str], float]


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """A task for a policy, on a model that can already do some of it."""

    model: str
    """A bundled model."""
    ask: Callable[[Random], ExerciseQuestion]
    grade: Grader
    limit: int
    """Most tokens of a completion."""
    learning_rate: float = 2e-3
    num_prompts: int = 16
    """Prompts of a step."""

    def policy(self) -> Policy:
        """The model with a new adapter over it."""
        options = ModelOptions(path=self.model, adapter=AdapterOptions(rank=16, alpha=32), device="cpu")
        return load_policy(options)

    def questions(self, step: int) -> list[ExerciseQuestion]:
        rng = Random(f"step {step}")
        return [self.ask(rng) for _ in range(self.num_prompts)]


def addition(rng: Random) -> ExerciseQuestion:
    drawn = rng.choice(training_additions(64))
    return ExerciseQuestion(asked=[{"role": "user", "content": drawn.question}], target=drawn.total)


def opening(rng: Random) -> ExerciseQuestion:
    return ExerciseQuestion(asked=rng.choice(OPENINGS))


def countdown(rng: Random) -> ExerciseQuestion:
    """Half of the problems are three numbers and their sum; half are two, and the sum with one of them twice."""
    a, b, c = rng.sample(range(2, 13), 3)
    if rng.random() < 0.5:
        return countdown_question((a, b, c), a + b + c)
    return countdown_question((a, b), 2 * a + b)


def countdown_of_some(rng: Random) -> ExerciseQuestion:
    """Four numbers in any order, and the sum of three of them."""
    numbers = rng.sample(range(2, 20), 4)
    return countdown_question(tuple(numbers), sum(numbers) - rng.choice(numbers), "some")


def countdown_question(numbers: tuple[int, ...], target: int, share: str = "all") -> ExerciseQuestion:
    named = ", ".join(map(str, numbers))
    return ExerciseQuestion(asked=f"Use {share} of {named} to make {target}.\n", numbers=numbers, target=target)


def in_form(question: ExerciseQuestion, text: str) -> float:
    """1 where the whole answer has the form that the homework asks for, line by line."""
    return float(answer_lines(text) is not None)


HOMEWORK_FORM = re.compile(r"^<think>\n[\s\S]*\n</think>\n<answer>\n[\s\S]*\n</answer>$", re.MULTILINE)


def in_form_or_beyond(question: ExerciseQuestion, text: str) -> float:
    """The homework's own pattern, whose `$` ends at any line."""
    return float(HOMEWORK_FORM.match(text.strip()) is not None)


SHORT, LONG = 40, 200
"""Length in characters that earns nothing, and the most that a longer text earns."""


def length_share(text: str) -> float:
    return min(max(len(text) - SHORT, 0), LONG) / LONG


def long_in_form(question: ExerciseQuestion, text: str) -> float:
    """The form, and up to the same again for length: a tempting way to pay for longer thoughts."""
    return in_form(question, text) * (1 + length_share(text))


def long_in_form_or_beyond(question: ExerciseQuestion, text: str) -> float:
    return in_form_or_beyond(question, text) * (1 + length_share(text))


def full_stops(question: ExerciseQuestion, text: str) -> float:
    return float(text.count("."))


def one_sentence(question: ExerciseQuestion, text: str) -> float:
    """1 for a text that ends where its first sentence does."""
    return float(text.count(".") == 1 and text.endswith("."))


def early_letter(question: ExerciseQuestion, text: str) -> float:
    """1 for a text whose first letter is one of a to h: its first token decides."""
    return float(text.lstrip(" ,.")[:1].lower() in tuple("abcdefgh"))


def solved(question: ExerciseQuestion, text: str) -> float:
    return float(countdown_outcome(puzzle(question.numbers, question.target, "all"), text) is Outcome.CORRECT)


def solved_with_some(question: ExerciseQuestion, text: str) -> float:
    return float(countdown_outcome(puzzle(question.numbers, question.target, "subset"), text) is Outcome.CORRECT)


def solved_by_membership(question: ExerciseQuestion, text: str) -> float:
    """A page's check of the numbers: each used number is one of them, however often it is used."""
    used = [int(each) for each in re.findall(r"\d+", answer_text(text, "strict") or "")]
    if not all(each in question.numbers for each in used):
        return 0.0
    return float(countdown_outcome(puzzle(used, question.target, "all"), text) is Outcome.CORRECT)


FORM = Exercise(model="bundled-instruct", ask=addition, grade=in_form, limit=56)
FORM_AND_LENGTH = Exercise(model="bundled-instruct", ask=addition, grade=long_in_form, limit=72)
PROSE = Exercise(model="bundled-prose", ask=opening, grade=full_stops, limit=24, learning_rate=1e-3)
EARLY_LETTER = Exercise(model="bundled-prose", ask=opening, grade=early_letter, limit=8)
ONE_SENTENCE = Exercise(model="bundled-prose", ask=opening, grade=one_sentence, limit=24)
COUNTDOWN = Exercise(model="bundled", ask=countdown, grade=solved, limit=56, num_prompts=10)
COUNTDOWN_OF_SOME = Exercise(model="bundled", ask=countdown_of_some, grade=solved_with_some, limit=56, num_prompts=10)
