"""The collector's refills: every round draws prompts that no earlier one has drawn."""

from collections.abc import Sequence

import pytest

from posttrain.records import Prompt
from tests.support.stages import Tokens, stages_with


def always_one(completions: Sequence[str], **columns: object) -> list[float]:
    return [1.0] * len(completions)


class Noting(Tokens):
    """Remembers which draws were asked for."""

    def __init__(self) -> None:
        self.asked: list[range] = []

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        self.asked.append(draws)
        return super().prompts(step, draws)


@pytest.mark.parametrize("rounds", [1, 3])
def test_each_round_of_refills_goes_on_behind_the_draws_of_the_last(rounds: int) -> None:
    task = Noting()
    stages = stages_with({"name": "dapo", "resample": {"max_rounds": rounds}}, always_one, task=task)
    collected = stages.collected()
    # Five prompts a step; equal rewards make all of them uninformative in every round.
    assert task.asked == [range(5 * number, 5 * number + 5) for number in range(rounds + 1)]
    assert [group.prompt.id for group in collected.groups] == [f"draw {draw}" for draw in task.asked[-1]]
    assert len(collected.replaced) == rounds
