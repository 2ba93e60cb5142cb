"""Additions whose answer is to come in a given form: does a model keep to a format that it is asked for?

**What the prompt looks like.**  A system message that shows the form, `<think>`, a line or more, `</think>`,
`<answer>`, a line or more, `</answer>`, each tag on a line of its own, and a user's message `If you add 57 and 8, what
is the result?`.

**What earns what.**  1 where the whole response, stripped, has that form line by line, else 0, whatever it says:
posttrain.rewards.parsing.tags, mode `lines`.  Whether the sum is right earns nothing; it is measured, as the reward
`right_sum` of weight 0 and in evaluations.

**Known hack.**  The tags around nothing earn as much as thought does, so a policy may unlearn its sums and be paid:
watch `answer_accuracy_greedy`.

**Where questions come from.**  posttrain.tasks.arithmetic.additions draws them; nothing is downloaded.
"""

import re
from collections.abc import Mapping, Sequence
from random import Random

from posttrain.options.arithmetic import ArithmeticOptions
from posttrain.options.reward import RewardSettings
from posttrain.records import Group, Prompt
from posttrain.rewards.format import line_format
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.parsing.tags import answer_lines
from posttrain.tasks.arithmetic.additions import Addition, held_out_additions, training_additions
from posttrain.tasks.base import DRAWS_PER_STEP, Messages, Probe, PromptRenderer, Reading, Task

NUMBER = re.compile(r"(?<![\d.,])-?\d+(?:[.,]\d+)*", re.ASCII)


def last_number(text: str) -> str:
    """The last number of a response, as written; a dot behind it ends a sentence.  Empty where there is none."""
    found = NUMBER.findall(text)
    return found[-1] if found else ""


def right_sum(*, completions: Sequence[str], answer: Sequence[str], **_columns: object) -> list[float]:
    """Reward function: 1 where the last number of the response is the sum, whatever form the response has."""
    return [float(last_number(text) == expected) for text, expected in zip(completions, answer, strict=True)]


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
        """The questions of a step, each `repeats` times, in an order of its own: all of them before one comes again."""
        assert draws.stop <= DRAWS_PER_STEP, draws
        order = list(range(len(self.training)))
        Random(f"additions {self.seed} {step}").shuffle(order)
        rows = [order[draw // self.options.repeats % len(order)] for draw in draws]
        return [self.prompt(self.training[row], f"train/{row}") for row in rows]

    def held_out(self) -> list[Prompt]:
        """Questions that are never trained on, or where the options say so the first of those that are."""
        size = self.options.held_out_size
        if self.options.measured_on == "training":
            return [self.prompt(each, f"train/{row}") for row, each in enumerate(self.training[:size])]
        apart = held_out_additions(size, num_training=self.options.num_questions)
        return [self.prompt(each, f"held-out/{row}") for row, each in enumerate(apart)]

    def prompt(self, addition: Addition, id: str) -> Prompt:
        """A question as the policy sees it, with the column that its answer is compared with."""
        content = conversation(addition.question, self.options.system)
        return self.renderer.render(content, id=id, prefill="", columns={"answer": str(addition.total)})

    def probes(self) -> Mapping[str, Probe]:
        """What the answers are worth, read from the sampled completions and from the likeliest ones."""
        return {
            name: Probe(
                readings={
                    f"answer_accuracy_{name}": Reading(f"right sums, {name}"),
                    f"format_and_answer_{name}": Reading(f"right sums in the form, {name}"),
                },
                measure=SumsOf(name),
                greedy=name == "greedy",
            )
            for name in ("sampled", "greedy")
        }


class SumsOf:
    """Shares of completions whose sum is right, and of those that keep to the form as well."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, groups: Sequence[Group]) -> dict[str, float]:
        """Of all completions of the groups."""
        said = [
            (group.graded_text(each), group.prompt.columns["answer"]) for group in groups for each in group.rollouts
        ]
        right = [last_number(text) == expected for text, expected in said]
        formed = [answer_lines(text) is not None for text, _ in said]
        both = [sum_right and kept for sum_right, kept in zip(right, formed, strict=True)]
        return {
            f"answer_accuracy_{self.name}": sum(right) / len(right),
            f"format_and_answer_{self.name}": sum(both) / len(both),
        }


def conversation(question: str, system: str) -> Messages:
    """The messages behind a prompt; without a system message, the question alone."""
    asked = [{"role": "user", "content": question}]
    return [{"role": "system", "content": system}, *asked] if system else asked
