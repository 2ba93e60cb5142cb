"""Demonstrations of a task as examples to learn from."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from posttrain.models.conversation_masks import answered
from posttrain.models.policy import Policy
from posttrain.options.demonstrator import Demonstrator
from posttrain.options.training import SftOptions
from posttrain.records import Example, Prompt
from posttrain.tasks.countdown.countdown_task import CountdownTask
from posttrain.tasks.countdown.demonstrator import demonstrate
from posttrain.tasks.countdown.problems import held_out_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationSet:
    """Demonstrations by number: training ones without end, held-out ones on problems that are never trained on."""

    policy: Policy
    task: CountdownTask
    demonstrator: Demonstrator
    seed: int
    num_different: int
    """Training demonstrations before they repeat; 0 never repeats."""

    def example(self, index: int) -> Example:
        """The training demonstration with this number."""
        index = index % self.num_different if self.num_different else index
        problem = self.task.training_problem(index)
        rng = Random(f"demonstration {self.seed} {index}")
        return self._example(self.task.prompt(problem, f"train/{index}"), demonstrate(problem, rng, self.demonstrator))

    def batch(self, first: int, options: SftOptions) -> list[Example]:
        """Demonstrations from a number on, until together they fill a batch."""
        examples: list[Example] = []
        while sum(example.num_inputs for example in examples) < options.tokens_per_batch:
            examples.append(self.example(first + len(examples)))
        return examples

    def held_out(self, options: SftOptions) -> list[Example]:
        """Demonstrations of problems whose numbers are held out."""
        rng = Random("held-out demonstrations")
        chosen: list[Example] = []
        for problem in held_out_problems(self.task.difficulty, self.task.options.numbers, options.eval_size):
            prompt = self.task.prompt(problem, f"held-out/{len(chosen)}")
            chosen.append(self._example(prompt, demonstrate(problem, rng, self.demonstrator)))
        return chosen

    def num_steps(self, options: SftOptions) -> None:
        """There is no end to them: the recipe says when the run ends."""

    def described(self) -> Sequence[str]:
        """What the plan says of them."""
        return [f"demonstrations of {self.task.name}, fresh for every batch"]

    def summary(self) -> dict[str, object]:
        """What summary.json says of them."""
        return {}

    def _example(self, prompt: Prompt, completion: str) -> Example:
        tokens = self.policy.tokenizer.encode(completion, add_special_tokens=False)
        return answered(prompt.tokens, (*tokens, self.policy.stop_ids[0]))
