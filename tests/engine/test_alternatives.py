"""The likeliest tokens at each position, kept on request: they are the policy's, and no completion changes."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from posttrain.errors import RunError
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.options.rollout import SamplingParams
from posttrain.records import Grades, Prompt
from posttrain.runs.run_folder import RunFolder
from tests.support.engines import ChangedEngine
from tests.support.refusals import refused
from tests.support.tiny import tiny_policy

PROMPTS = [Prompt(id=f"p{n}", text="", tokens=tuple(range(3, 5 + n))) for n in range(3)]
KEPT = 4


def request(**others: object) -> GroupRequest:
    made = GroupRequest(
        group_size=3, max_completion_tokens=6, sampling=SamplingParams(temperature=0.7), key=StreamKey(5, "rollout", 1)
    )
    return replace(made, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.7), SamplingParams(top_k=2), SamplingParams(greedy=True)], ids=str
)
def test_they_are_the_policys_likeliest_tokens_before_any_cut(sampling: SamplingParams) -> None:
    policy = tiny_policy()
    asked = request(keep_alternatives=KEPT, sampling=sampling)
    for group in sample_groups(InProcessEngine(policy, max_rows=4), PROMPTS, asked):
        for rollout in group.rollouts:
            inputs = torch.tensor([[*group.prompt.tokens, *rollout.tokens]])
            logits = policy.model(inputs).logits[0, len(group.prompt.tokens) - 1 : -1].detach()
            expected = (logits / sampling.recorded_temperature).log_softmax(dim=-1).topk(KEPT)
            assert rollout.alternatives is not None
            assert [[token for token, _ in each] for each in rollout.alternatives] == expected.indices.tolist()
            found = torch.tensor([[logprob for _, logprob in each] for each in rollout.alternatives])
            torch.testing.assert_close(found.to(expected.values), expected.values, rtol=0, atol=1e-5)


def test_asking_for_them_changes_nothing_else() -> None:
    policy = tiny_policy()
    with_them = sample_groups(InProcessEngine(policy, max_rows=4), PROMPTS, request(keep_alternatives=KEPT))
    without = sample_groups(InProcessEngine(policy, max_rows=4), PROMPTS, request())
    bare = [
        replace(group, rollouts=tuple(replace(each, alternatives=None) for each in group.rollouts))
        for group in with_them
    ]
    assert bare == without


def test_an_engine_that_leaves_them_out_is_refused() -> None:
    engine = ChangedEngine(tiny_policy(), lambda sampled: replace(sampled, alternatives=None))
    with refused("alternatives of 0 tokens", "rollout.keep_alternatives", error=RunError):
        sample_groups(engine, PROMPTS, request(keep_alternatives=KEPT))


def test_the_rollout_file_has_them(tmp_path: Path) -> None:
    groups = sample_groups(InProcessEngine(tiny_policy()), PROMPTS, request(keep_alternatives=KEPT))
    scores = torch.zeros(3, 3, dtype=torch.float64)
    grades = Grades(names=("a",), scores=scores[None], weights=torch.ones(1, dtype=torch.float64), rewards=scores)
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        table = pq.read_table(run.write_rollouts(1, groups, grades, scores)).to_pydict()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout, tokens, logprobs in zip(
        rollouts, table["alternative_tokens"], table["alternative_logprobs"], strict=True
    ):
        both = [[*zip(*each, strict=True)] for each in zip(tokens, logprobs, strict=True)]
        assert rollout.alternatives is not None
        assert [[token for token, _ in each] for each in both] == [
            [t for t, _ in each] for each in rollout.alternatives
        ]
        assert len(both) == len(rollout.tokens)
