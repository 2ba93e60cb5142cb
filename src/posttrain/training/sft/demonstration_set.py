"""Demonstrations of a task as examples to learn from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from posttrain.models.context import num_embeddings, require_embeddings
from posttrain.models.conversation_masks import answered
from posttrain.models.policy import Policy
from posttrain.options.task import ArithmeticOptions, CountdownOptions, Demonstrator, SentencesOptions
from posttrain.options.training import SftOptions
from posttrain.records import Example, Prompt
from posttrain.tasks import sentence_grammar
from posttrain.tasks.arithmetic_task import (
    ArithmeticTask,
    demonstrated_additions,
    demonstrated_answer,
    demonstrated_question,
    held_out_additions,
    question_messages,
)
from posttrain.tasks.base import PromptRenderer
from posttrain.tasks.countdown_problems import held_out_problems
from posttrain.tasks.countdown_task import CountdownTask, demonstrate

Demonstration = tuple[Prompt, str]
"""A problem and its answer."""


@dataclass(frozen=True, slots=True)
class CountdownDemonstrations:
    """Imperfect searches."""

    task: CountdownTask
    demonstrator: Demonstrator
    name: str = CountdownTask.name

    def training(self, index: int, rng: Random) -> Demonstration:
        problem = self.task.training_problem(index)
        return self.task.prompt(problem, f"train/{index}"), demonstrate(problem, rng, self.demonstrator)

    def held_out(self, size: int, rng: Random) -> Iterator[Demonstration]:
        problems = held_out_problems(self.task.difficulty, self.task.options.numbers, size)
        for index, problem in enumerate(problems):
            yield self.task.prompt(problem, f"held-out/{index}"), demonstrate(problem, rng, self.demonstrator)


class ArithmeticDemonstrations:
    """Additions, mostly answered in prose and sometimes in the requested form."""

    name = ArithmeticTask.name

    def __init__(self, task: ArithmeticTask) -> None:
        self.task, options = task, task.options
        self.shown = demonstrated_additions(num_training=options.num_questions, num_held_out=options.held_out_size)

    def training(self, index: int, rng: Random) -> Demonstration:
        addition = rng.choice(self.shown)
        content = question_messages(demonstrated_question(addition, rng), self.task.options.system)
        prompt = self.task.renderer.render(content, id=f"train/{index}", prefill="", columns={})
        return prompt, demonstrated_answer(addition, rng)

    def held_out(self, size: int, rng: Random) -> Iterator[Demonstration]:
        options = self.task.options
        apart = held_out_additions(options.held_out_size, num_training=options.num_questions)
        for index, addition in enumerate(apart[:size]):
            yield self.task.prompt(addition, f"held-out/{index}"), demonstrated_answer(addition, rng)


@dataclass(frozen=True, slots=True)
class SentenceDemonstrations:
    """Texts of the grammar; all but the first word is learned."""

    renderer: PromptRenderer
    name: str = SentencesOptions.name

    def training(self, index: int, rng: Random) -> Demonstration:
        return self.shown(sentence_grammar.text(rng), f"train/{index}")

    def held_out(self, size: int, rng: Random) -> Iterator[Demonstration]:
        for index in range(size):
            yield self.shown(sentence_grammar.text(rng), f"held-out/{index}")

    def shown(self, text: str, id: str) -> Demonstration:
        first, space, rest = text.partition(" ")
        return self.renderer.render(first, id=id, prefill="", columns={}), space + rest


DemonstrationSource = CountdownDemonstrations | ArithmeticDemonstrations | SentenceDemonstrations


def demonstrations_of(
    task: CountdownOptions | ArithmeticOptions | SentencesOptions,
    demonstrator: Demonstrator,
    renderer: PromptRenderer,
    *,
    seed: int,
) -> DemonstrationSource:
    """The demonstrations of a recipe's task."""
    if isinstance(task, SentencesOptions):
        return SentenceDemonstrations(renderer)
    if isinstance(task, ArithmeticOptions):
        return ArithmeticDemonstrations(ArithmeticTask(task, renderer, seed=seed))
    return CountdownDemonstrations(CountdownTask(task, renderer, seed=seed), demonstrator)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationSet:
    """Demonstrations by number: any number for training, and held-out ones on other problems."""

    policy: Policy
    demonstrations: DemonstrationSource
    seed: int
    num_different: int
    """Training demonstrations before they repeat; 0 never repeats."""

    def example(self, index: int) -> Example:
        index = index % self.num_different if self.num_different else index
        return self._example(*self.demonstrations.training(index, Random(f"demonstration {self.seed} {index}")))

    def batch(self, first: int, options: SftOptions) -> list[Example]:
        examples: list[Example] = []
        while sum(example.num_inputs for example in examples) < options.tokens_per_batch:
            examples.append(self.example(first + len(examples)))
        return examples

    def held_out(self, options: SftOptions) -> list[Example]:
        shown = self.demonstrations.held_out(options.eval_size, Random("held-out demonstrations"))
        return [self._example(*each) for each in shown]

    def num_steps(self, options: SftOptions) -> None:
        """None: the recipe gives the number of steps."""

    def described(self) -> Sequence[str]:
        return [f"demonstrations of {self.demonstrations.name}, fresh for every batch"]

    def summary(self) -> dict[str, object]:
        return {}

    def _example(self, prompt: Prompt, completion: str) -> Example:
        tokens = self.policy.tokenizer.encode(completion, add_special_tokens=False)
        made = answered(prompt.tokens, (*tokens, self.policy.stop_ids[0]))
        rows = num_embeddings(self.policy.model)
        require_embeddings(made.tokens, rows, self.policy.tokenizer, f"demonstration {prompt.id}")
        return made
