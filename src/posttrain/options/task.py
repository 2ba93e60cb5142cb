"""The `task` section of a recipe: one class of options per task, chosen by `name`; and the demonstrator."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from posttrain.options.bounds import Bounded, NonNegativeInt, PositiveInt, Rule, Share, Unused, by_name
from posttrain.options.dataset import DatasetOptions, GeneratedOptions, ProgramsOptions

NumbersRule = Literal["all", "subset"]
"""Whether an answer uses every given number exactly once, or each at most once."""

FormatMode = Literal["strict", "last"]
"""How much of a text must follow the tag structure: all of it, or only its end."""
OPERATORS = "+-*/"


@dataclass(frozen=True, kw_only=True)
class CountdownOptions(Bounded):
    """Make a target from given numbers: which problems, how they are asked, and how answers are read."""

    name: Literal["countdown"] = "countdown"
    variant: Literal["default", "course"] = "default"
    """`default`: as hard as the options below say.  `course`: four numbers from 1, 2, 5, 10, 25, 50, 75, 100, and a
    target made from three of them with + - * and |a-b| that is not one of the four; meant for `numbers: subset`."""
    numbers: NumbersRule = "all"
    """The rule in the prompt and in grading: use every number exactly once (`all`), or each at most once (`subset`)."""
    num_numbers: Annotated[int, Ge(2), Le(6)] = 3
    """Numbers in a problem, 2 to 6."""
    min_number: NonNegativeInt = 1
    """Smallest number given."""
    max_number: int = 30
    """Largest number given."""
    operators: str = OPERATORS
    """Operators used to make targets, some of `+-*/`; answers may use all four."""
    min_target: NonNegativeInt = 1
    """Smallest target."""
    max_target: int = 99
    """Largest target."""
    held_out_size: PositiveInt = 512
    """Problems kept for evaluation; their sets of numbers are never trained on.  They are the same for every seed."""
    prompt_style: Literal["compact", "r1"] = "compact"
    """`compact`: one line, the format of the bundled model.  `r1`: chat messages that ask for the tags, for real
    models."""
    prefill_think: bool = False
    """End the prompt with the opening `<think>` of the answer; the model continues from there."""
    format_mode: FormatMode = "strict"
    """`strict`: the response contains only the tags and their content.  `last`: only its last four tags count."""

    rules = (
        Unused("num_numbers min_number max_number operators min_target max_target", {"variant": "default"}),
        Rule("max_number", lambda o: o.max_number >= o.min_number, "is below min_number = {o.min_number}.  Raise it."),
        Rule("operators", lambda o: {*o.operators} <= {*OPERATORS}, f"should be some of {OPERATORS}.  Use those."),
        Rule("operators", lambda o: o.operators, f"should be some of {OPERATORS}.  Name at least one."),
        Rule("operators", lambda o: len({*o.operators}) == len(o.operators), "names one twice.  Name each once."),
        Rule("max_target", lambda o: o.max_target >= o.min_target, "is below min_target = {o.min_target}.  Raise it."),
    )


SYSTEM = (
    "You are a helpful assistant. Think first, then answer. Reply in this form alone:\n"
    "<think>\n...\n</think>\n<answer>\n...\n</answer>"
)
NUM_ADDITIONS = 90 * 9
"""Number of different questions: a from 10 to 99, b from 1 to 9."""


@dataclass(frozen=True, kw_only=True)
class ArithmeticOptions(Bounded):
    """Additions of a two-digit and a one-digit number, answered in tags on separate lines."""

    name: Literal["arithmetic"] = "arithmetic"
    num_questions: PositiveInt = 64
    """Number of training questions, the same for every seed; with 64 they are those of a well-known course."""
    repeats: PositiveInt = 1
    """Groups of each question in a step: with 8, 32 prompts per step are 4 questions."""
    held_out_size: PositiveInt = 32
    """Number of questions in evaluations."""
    measured_on: Literal["held_out", "training"] = "held_out"
    """Which questions evaluations ask: questions that are never trained on, or, as in that course, the first training
    questions."""
    system: str = SYSTEM
    """System message before every question; it describes the form that is rewarded."""

    rules = (
        Rule(
            "held_out_size",
            lambda o: o.measured_on == "held_out" or o.held_out_size <= o.num_questions,
            "with measured_on = training must be at most num_questions = {o.num_questions}.",
        ),
        Rule(
            "num_questions",
            lambda o: o.num_questions + o.held_out_size <= NUM_ADDITIONS,
            f"and held_out_size = {{o.held_out_size}} are more than the {NUM_ADDITIONS} that exist.  Use fewer.",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class SentencesOptions(Bounded):
    """Beginnings of texts for a model to continue; for `posttrain sft`, texts from a small grammar."""

    name: Literal["sentences"] = "sentences"
    openings: tuple[str, ...] = ("The weather today is", "I think that", "Once upon a time", "In my opinion")
    """Beginnings to train on, in turn; by default those of a well-known course."""
    held_out_openings: tuple[str, ...] = ("The most important thing about science is", "I went to the store and bought")
    """Beginnings that are never trained on."""
    held_out_size: PositiveInt = 64
    """Number of problems in an evaluation; each is a completion of a held-out beginning, in turn."""

    rules = (
        Rule("openings", lambda o: are_texts(o.openings), "must be a list of one or more texts, none of them empty."),
        Rule(
            "held_out_openings",
            lambda o: are_texts(o.held_out_openings),
            "must be a list of texts, none of them empty.",
        ),
        Rule(
            "held_out_openings",
            lambda o: not {*o.openings} & {*o.held_out_openings},
            "and openings = {o.openings} share an entry.  Remove it from one of them.",
        ),
    )


def are_texts(given: tuple[str, ...]) -> bool:
    return bool(given) and all(map(str.strip, given))


@dataclass(frozen=True, kw_only=True)
class Demonstrator(Bounded):
    """Who writes the demonstrations."""

    give_up: Share = 0.6
    """Probability of stopping after a failed try."""
    max_tries: PositiveInt = 18
    """Maximum number of tries in one demonstration."""
    largest_result: PositiveInt = 200
    """Steps with a larger result are not written."""


TaskOptions = (
    CountdownOptions | ArithmeticOptions | SentencesOptions | DatasetOptions | ProgramsOptions | GeneratedOptions
)

TASK_OPTIONS: dict[str, type[TaskOptions]] = by_name(TaskOptions)
