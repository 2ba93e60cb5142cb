"""Rows of a file or a list as examples: split, masked and counted.

All rows are tokenised before a run starts, so that invalid rows are found then.  The seed and the epoch decide their
order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import cast

from posttrain.errors import UserError
from posttrain.models.context import num_embeddings, require_embeddings
from posttrain.models.conversation_masks import Masking, answered
from posttrain.models.messages import ASSISTANT
from posttrain.models.policy import Policy
from posttrain.options.dataset import DatasetOptions
from posttrain.options.task import ArithmeticOptions, CountdownOptions, Demonstrator, SentencesOptions
from posttrain.options.training import SftOptions
from posttrain.records import Example, Prompt
from posttrain.tasks import arithmetic_task
from posttrain.tasks.base import PromptRenderer
from posttrain.tasks.countdown_problems import held_out_problems
from posttrain.tasks.countdown_task import CountdownTask, demonstrate
from posttrain.tasks.dataset import SOURCE, configured_rows, held_out_of, split
from posttrain.tasks.draw_order import permutation
from posttrain.tasks.row_files.row_formats import CompletionRow
from posttrain.tasks.row_files.rows import MEMORY, NO_ROWS_GIVEN, BadRows, DatasetRow, GivenRows, numbered_rows
from posttrain.tasks.sentences_task import grammar_text
from posttrain.training.sft import example_maker


@dataclass(slots=True, kw_only=True)
class RowExamples:
    """Examples by number, epoch after epoch."""

    seed: int
    trained: Sequence[example_maker.PackedExample]
    apart: Sequence[example_maker.PackedExample]
    """Held-out ones."""
    maker: example_maker.ExampleMaker
    """Counts rows that were cut, left out or empty."""
    format: str
    """The columns that are read or not read, for the plan."""

    def row(self, index: int) -> int:
        epoch, place = divmod(index, len(self.trained))
        return int(permutation(self.seed, "sft", epoch, len(self.trained))[place])

    def batch(self, first: int, options: SftOptions) -> list[Example]:
        return [self.trained[number].unpacked() for number in self.batch_rows(first, options)]

    def batch_rows(self, first: int, options: SftOptions) -> list[int]:
        """The numbers of the rows of a batch."""
        most = options.rows_per_batch or len(self.trained)
        if options.num_epochs is not None:
            most = min(most, self.num_rows(options.num_epochs) - first)
        chosen: list[int] = []
        tokens = 0
        while len(chosen) < most and tokens < options.tokens_per_batch:
            number = self.row(first + len(chosen))
            if number in chosen:  # an epoch ends within the batch, which holds no row twice
                break
            chosen.append(number)
            tokens += len(self.trained[number].tokens) - 1
        return chosen

    def num_rows(self, epochs: float) -> int:
        return max(1, round(epochs * len(self.trained)))

    def num_steps(self, options: SftOptions) -> int | None:
        if options.num_epochs is None:
            return None
        steps = first = 0
        while first < self.num_rows(options.num_epochs):
            first += len(self.batch_rows(first, options))
            steps += 1
        return steps

    def held_out(self, options: SftOptions) -> list[Example]:
        return [each.unpacked() for each in self.apart]

    def described(self) -> list[str]:
        tokens = sum(len(each.tokens) for each in self.trained)
        learned = sum(sum(each.learned) for each in self.trained)
        bad = self.maker.bad
        return [
            f"{len(self.trained)} rows of {tokens} tokens, {learned} of them learned",
            self.format,
            *self.maker.notes(),
            *(f"invalid rows skipped:{bad.listed()}".splitlines() if bad.faults else []),
        ]

    def summary(self) -> dict[str, object]:
        counts = {"trained": len(self.trained), "held_out": len(self.apart)}
        listed = {"skipped": self.maker.skipped, "cut": self.maker.cut, "empty_answers": self.maker.silent}
        return {"rows": {**counts, **{name: [*rows] for name, rows in listed.items()}, "bad": [*self.maker.bad.faults]}}


def row_examples(
    masking: Masking,
    task: DatasetOptions,
    options: SftOptions,
    *,
    longest: int,
    seed: int,
    given: GivenRows = NO_ROWS_GIVEN,
) -> RowExamples:
    """The rows of the task's file, or those given, as examples of at most `longest` tokens."""
    bad = BadRows(task.skip_bad_rows)
    read = configured_rows(task, bad) if given.rows is None else numbered_rows(given.rows, MEMORY, bad)
    held_out_rows = held_out_of(task, given.held_out, bad)
    everything = example_maker.learned_rows(read, bad)
    apart = None if held_out_rows is None else example_maker.learned_rows(held_out_rows, bad)

    def keyed(rows: Sequence[example_maker.LearnedRow]) -> list[DatasetRow]:
        return [DatasetRow(row.where, {task.prompt_column: prompt_of(row), "row": row}) for row in rows]

    training, held_out = split(keyed(everything), None if apart is None else keyed(apart), task)
    maker = example_maker.ExampleMaker(masking=masking, task=task, options=options, longest=longest, bad=bad)
    trained, measured = (
        maker.examples([cast(example_maker.LearnedRow, row.columns["row"]) for row in part])
        for part in (training, held_out)
    )
    if maker.too_long and options.long_rows == "error":
        rows = example_maker.row_list([f"{where} ({length} tokens)" for where, length in maker.too_long])
        raise UserError(
            f"sft.max_length: {len(maker.too_long)} rows are longer than {longest} tokens: {rows}.  Use a larger value"
            " within the model's context, or sft.long_rows = skip or cut."
        )
    if not trained and not (maker.too_long or maker.skipped):
        raise UserError(f"no row is valid.  The first ones:{bad.listed()}")
    if not trained:
        where = f"sft.long_rows = {options.long_rows}"
        raise UserError(f"{where}: all rows are longer than {longest} tokens.  Use a larger sft.max_length.")
    format = example_maker.columns_line(read, known=SOURCE if task.sources and given.rows is None else "")
    return RowExamples(seed=seed, trained=trained, apart=measured, maker=maker, format=format)


def prompt_of(row: example_maker.LearnedRow) -> object:
    """The part of a row before its first answer."""
    if isinstance(row, example_maker.TextRow):
        return row.text
    if isinstance(row, example_maker.TokenRow):
        return [*row.tokens]
    if isinstance(row, CompletionRow):
        return row.prompt if isinstance(row.prompt, str) else [*row.prompt]
    roles = [message["role"] for message in row.messages]
    return [*row.messages[: roles.index(ASSISTANT) if ASSISTANT in roles else None]]


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

    name = arithmetic_task.ArithmeticTask.name

    def __init__(self, task: arithmetic_task.ArithmeticTask) -> None:
        self.task, options = task, task.options
        self.shown = arithmetic_task.demonstrated_additions(
            num_training=options.num_questions, num_held_out=options.held_out_size
        )

    def training(self, index: int, rng: Random) -> Demonstration:
        addition = rng.choice(self.shown)
        content = arithmetic_task.question_messages(
            arithmetic_task.demonstrated_question(addition, rng), self.task.options.system
        )
        prompt = self.task.renderer.render(content, id=f"train/{index}", prefill="", columns={})
        return prompt, arithmetic_task.demonstrated_answer(addition, rng)

    def held_out(self, size: int, rng: Random) -> Iterator[Demonstration]:
        options = self.task.options
        apart = arithmetic_task.held_out_additions(options.held_out_size, num_training=options.num_questions)
        for index, addition in enumerate(apart[:size]):
            yield self.task.prompt(addition, f"held-out/{index}"), arithmetic_task.demonstrated_answer(addition, rng)


@dataclass(frozen=True, slots=True)
class SentenceDemonstrations:
    """Texts of the grammar; everything after the first word is learned."""

    renderer: PromptRenderer
    name: str = SentencesOptions.name

    def training(self, index: int, rng: Random) -> Demonstration:
        return self.shown(grammar_text(rng), f"train/{index}")

    def held_out(self, size: int, rng: Random) -> Iterator[Demonstration]:
        for index in range(size):
            yield self.shown(grammar_text(rng), f"held-out/{index}")

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
        return ArithmeticDemonstrations(arithmetic_task.ArithmeticTask(task, renderer, seed=seed))
    return CountdownDemonstrations(CountdownTask(task, renderer, seed=seed), demonstrator)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationSet:
    """Demonstrations by number: an unlimited number for training, and held-out ones on other problems."""

    policy: Policy
    demonstrations: DemonstrationSource
    seed: int
    num_different: int
    """Number of training demonstrations before they repeat; 0: they never repeat."""

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
        """None: the recipe sets the number of steps."""

    def described(self) -> Sequence[str]:
        return [f"demonstrations of {self.demonstrations.name}, new ones for every batch"]

    def summary(self) -> dict[str, object]:
        return {}

    def _example(self, prompt: Prompt, completion: str) -> Example:
        tokens = self.policy.tokenizer.encode(completion, add_special_tokens=False)
        made = answered(prompt.tokens, (*tokens, self.policy.stop_ids[0]))
        rows = num_embeddings(self.policy.model)
        require_embeddings(made.tokens, rows, self.policy.tokenizer, f"demonstration {prompt.id}")
        return made
