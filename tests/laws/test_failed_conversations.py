"""A completion whose environment failed teaches nothing, and changes nothing of what the others teach."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from posttrain.algorithms.table import build_algorithm
from posttrain.batch import Batch, collate
from posttrain.records import Finish, Grades, Group, Rollout, TokenSequence
from posttrain.runs.progress import Clock
from posttrain.training.collector import CollectedStep
from posttrain.training.credited_step import ActorCriticState, StepModels, credited_step
from tests.support.tiny import BY_REWARD, SIX, tiny_policy

REWARDS = [[1.0, 0.0, 0.5], [0.25, 1.0, 0.0]]
POLICY = tiny_policy()


def failed(sample: int, num_tokens: int) -> Rollout:
    tokens = tuple(range(6, 6 + num_tokens))
    sequence = TokenSequence.one_turn(tokens, logprobs=(-2.0,) * num_tokens, finish=Finish.FAILED)
    return Rollout(sample=sample, sequence=sequence, text="", failure="Traceback ...")


def with_failed(group: Group) -> Group:
    """One that failed behind some turns, and one whose environment could not begin."""
    return replace(group, rollouts=(failed(7, 4), *group.rollouts, failed(8, 0)))


def batch_of(name: str, groups: Sequence[Group], rewards: Sequence[Sequence[float]]) -> Batch:
    algorithm = build_algorithm({"name": name})
    scores = torch.tensor(rewards, dtype=torch.float64)
    grades = Grades(names=("r",), scores=scores[None], weights=torch.ones(1, dtype=torch.float64), rewards=scores)
    credited = credited_step(
        CollectedStep(step=1, groups=groups, grades=grades),
        algorithm,
        StepModels(needs=frozenset(), policy=POLICY, temperature=1.0, max_tokens=1000),
        ActorCriticState(),
        max_completion_tokens=16,
        clock=Clock(),
    )
    return collate(credited.groups, algorithm.token_weights, max_completion_tokens=16, keep_zero_advantages=True)


@pytest.mark.parametrize("name", [name for name in BY_REWARD if not build_algorithm({"name": name}).uses_reference])
def test_failed_completions_have_no_weight_and_leave_the_others_as_they_were(name: str) -> None:
    nan = torch.nan
    alone = batch_of(name, SIX, REWARDS)
    beside = batch_of(name, list(map(with_failed, SIX)), [[nan, *row, nan] for row in REWARDS])
    assert beside.names == alone.names
    for column in ("advantages", "weights", "behaviour_logprobs"):
        found, expected = (batch.columns.named()[column] for batch in (beside, alone))
        assert torch.equal(found, expected), column
    assert [len(each.completions) for each in beside.split(1000)] == [
        len(each.completions) for each in alone.split(1000)
    ]
