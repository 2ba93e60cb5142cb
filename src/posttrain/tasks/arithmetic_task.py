"""Additions with answers in a given form: does a model keep to a requested format?

**What the prompt looks like.**  A system message shows the form: `<think>`, a line or more, `</think>`, `<answer>`, a
line or more, `</answer>`, each tag on a separate line.  The user's message is `If you add 57 and 8, what is the
result?`.

**What earns what.**  1 where the whole response, stripped, has that form line by line, else 0, whatever it says:
posttrain.rewards.parsing.tags, mode `lines`.  Whether the sum is right earns nothing; it is measured, as the reward
`right_sum` of weight 0 and in evaluations.

**Known hack.**  Empty tags earn as much as thoughts do, so a policy may unlearn its sums and still be paid: watch
`answer_accuracy_greedy`.

**Where questions come from.**  Additions a + b with a from 10 to 99 and b from 1 to 9: the training questions, and
others that are held out.  Nothing is downloaded.

**Demonstrations** imitate a model that follows instructions half of the time.  It most often answers in prose, not in
tags on separate lines.  With tags it thinks first, and then sums are right more often than without:

    The result is 65.
    <think>57 + 8: 7 + 8 = 15, 50 + 15 = 65</think> <answer>65</answer>
    <answer>↵65↵</answer>
    <think>↵57 + 8: 7 + 8 = 15, 50 + 15 = 65↵</think>↵<answer>↵65↵</answer>

A model cloned from it answers greedily in prose, and sometimes samples the requested form: reinforcement learning can
then make that the rule.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from posttrain.options.reward import RewardSettings
from posttrain.options.task import ArithmeticOptions
from posttrain.records import Group, Prompt
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.parsing.tags import answer_lines
from posttrain.rewards.shaping import line_format
from posttrain.tasks.base import DRAWS_PER_STEP, Messages, Probe, PromptRenderer, Reading, Task

NUMBER = re.compile(r"(?<![\d.,])-?\d+(?:[.,]\d+)*", re.ASCII)


def last_written_number(text: str) -> str:
    """The last number of a response, as written; "" if there is none.  A dot after it ends a sentence."""
    found = NUMBER.findall(text)
    return found[-1] if found else ""


def right_sum(*, completions: Sequence[str], answer: Sequence[str], **_columns: object) -> list[float]:
    """Reward function: 1 where the last number of the response is the sum, whatever form the response has."""
    return [float(last_written_number(text) == expected) for text, expected in zip(completions, answer, strict=True)]


COURSE_SEED = 42
"""Python's generator so seeded draws the course's questions: a, then b, one question after the other."""


@dataclass(frozen=True, slots=True)
class Addition:
    """A question."""

    a: int
    b: int

    @property
    def total(self) -> int:
        return self.a + self.b

    @property
    def question(self) -> str:
        return f"If you add {self.a} and {self.b}, what is the result?"


def training_additions(count: int) -> list[Addition]:
    """The first questions of the course's draw, in its order; some occur twice."""
    rng = Random(COURSE_SEED)
    return [Addition(rng.randint(10, 99), rng.randint(1, 9)) for _ in range(count)]


def held_out_additions(count: int, *, num_training: int) -> list[Addition]:
    """Different questions, none of them among the training questions; the same ones for every seed."""
    trained = set(training_additions(num_training))
    others = [each for each in every_addition() if each not in trained]
    Random("held-out additions").shuffle(others)
    return others[:count]


def demonstrated_additions(*, num_training: int, num_held_out: int) -> list[Addition]:
    """Every question that is not held out: those that a demonstrator may show."""
    apart = set(held_out_additions(num_held_out, num_training=num_training))
    return [each for each in every_addition() if each not in apart]


def every_addition() -> list[Addition]:
    return [Addition(a, b) for a in range(10, 100) for b in range(1, 10)]


class ArithmeticTask(Task):
    """Additions as the options say; which of them a step asks also depends on the run's seed."""

    name = "arithmetic"

    def __init__(self, options: ArithmeticOptions, renderer: PromptRenderer, *, seed: int) -> None:
        self.options, self.renderer, self.seed = options, renderer, seed
        self.training = training_additions(options.num_questions)
        self.reward_functions = (
            RewardFunction(name="line_format", call=line_format, text_only=True, bounded=True),
            RewardFunction(
                name="right_sum", call=right_sum, settings=RewardSettings(weight=0.0), text_only=True, bounded=True
            ),
        )

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        """The questions of a step, each `repeats` times, in a new order: all of them before one comes again."""
        assert draws.stop <= DRAWS_PER_STEP, draws
        order = list(range(len(self.training)))
        Random(f"additions {self.seed} {step}").shuffle(order)
        rows = [order[draw // self.options.repeats % len(order)] for draw in draws]
        return [self.prompt(self.training[row], f"train/{row}") for row in rows]

    def held_out(self) -> list[Prompt]:
        """Questions that are never trained on, or, as an option, the first of those that are."""
        size = self.options.held_out_size
        if self.options.measured_on == "training":
            return [self.prompt(each, f"train/{row}") for row, each in enumerate(self.training[:size])]
        apart = held_out_additions(size, num_training=self.options.num_questions)
        return [self.prompt(each, f"held-out/{row}") for row, each in enumerate(apart)]

    def prompt(self, addition: Addition, id: str) -> Prompt:
        content = question_messages(addition.question, self.options.system)
        return self.renderer.render(content, id=id, prefill="", columns={"answer": str(addition.total)})

    def probes(self) -> Mapping[str, Probe]:
        return {
            name: Probe(
                readings={
                    f"answer_accuracy_{name}": Reading(f"right sums, {name}"),
                    f"format_and_answer_{name}": Reading(f"right sums in the form, {name}"),
                },
                measure=partial(share_of_sums, name),
                greedy=name == "greedy",
            )
            for name in ("sampled", "greedy")
        }


def share_of_sums(name: str, groups: Sequence[Group]) -> dict[str, float]:
    """Shares of completions whose sum is right, and of those that keep to the form as well."""
    said = [(group.graded_text(each), group.prompt.columns["answer"]) for group in groups for each in group.rollouts]
    right = [text for text, expected in said if last_written_number(text) == expected]
    formed = sum(answer_lines(text) is not None for text in right)
    return {f"answer_accuracy_{name}": len(right) / len(said), f"format_and_answer_{name}": formed / len(said)}


def question_messages(question: str, system: str) -> Messages:
    asked = [{"role": "user", "content": question}]
    return [{"role": "system", "content": system}, *asked] if system else asked


PROSE = ("The result is {total}.", "The sum of {a} and {b} is {total}.")
"""Both begin with one word, so that together they are the likeliest beginning."""
ONE_LINE = "<think>{working}</think> <answer>{total}</answer>"
ANSWER_ALONE = "<answer>\n{total}\n</answer>"
AS_ASKED = "<think>\n{working}\n</think>\n<answer>\n{total}\n</answer>"
MANNERS = {PROSE[0]: 0.3, PROSE[1]: 0.25, ONE_LINE: 0.15, ANSWER_ALONE: 0.1, AS_ASKED: 0.2}
"""How often an answer is put in each way."""
OTHER_WORDING = 0.2
"""How often the question is put in other words than the task's."""


def demonstrated_question(addition: Addition, rng: Random) -> str:
    return f"What's {addition.a} + {addition.b}?" if rng.random() < OTHER_WORDING else addition.question


def demonstrated_answer(addition: Addition, rng: Random) -> str:
    [manner] = rng.choices(list(MANNERS), weights=list(MANNERS.values()))
    return manner.format(a=addition.a, b=addition.b, total=addition.total, working=working(addition))


def working(addition: Addition) -> str:
    """The sum of the last digits, then that of the tens and it."""
    a, b = addition.a, addition.b
    tens, ones = a // 10 * 10, a % 10
    return f"{a} + {b}: {ones} + {b} = {ones + b}, {tens} + {ones + b} = {addition.total}"
