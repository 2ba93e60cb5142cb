"""Tools answer while a policy decodes: every equation that the bundled model begins is finished exactly."""

import operator
import re
from fractions import Fraction

import pytest
import torch

from posttrain.environments.making import TurnSettings, environments_of
from posttrain.environments.tools import Toolbox, toolbox_of
from posttrain.environments.workers import ReplyWorkers
from posttrain.generation.conversations import sample_conversations
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import SamplingParams
from posttrain.options.task import CountdownOptions
from posttrain.records import Finish, Group
from posttrain.tasks.countdown_task import CountdownTask

EQUATION = re.compile(r"(?<![0-9)+*/-])(\d+)([-+*/])(\d+)=(-?\d+(?:/\d+)?)")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.set_num_threads(1)
    return load_policy(ModelOptions(path="bundled"), inference=True)


def sampled(policy: Policy, toolbox: Toolbox, tool: str, *, max_turns: int = 100) -> list[Group]:
    renderer = renderer_of(policy)
    settings = TurnSettings(max_turns=max_turns, tools_at={tool: "="})
    made = environments_of(settings, toolbox, renderer, policy.stop_ids)
    assert made is not None
    prompts = CountdownTask(CountdownOptions(prompt_style="compact"), renderer, seed=0).prompts(0, range(4))
    request = GroupRequest(
        sampling=SamplingParams(), key=StreamKey(0, "rollout", 0), group_size=2, max_completion_tokens=120
    )
    with ReplyWorkers(made) as workers:
        return sample_conversations(InProcessEngine(policy, max_rows=8), prompts, request, workers)


def test_every_equation_is_exact_and_only_its_value_is_given(policy: Policy) -> None:
    groups = sampled(policy, toolbox_of(["calculator"]), "calculator")
    equations = 0
    for rollout in (each for group in groups for each in group.rollouts):
        for left, sign, right, value in EQUATION.findall(rollout.text):
            assert OPERATORS[sign](Fraction(left), Fraction(right)) == Fraction(value)
            equations += 1
        given = [token for token, own in zip(rollout.tokens, rollout.sequence.sampled, strict=True) if not own]
        assert set(policy.tokenizer.decode(given)) <= set("0123456789-/")
        assert len(rollout.turns) == rollout.text.count("=")
    assert equations > 20


def test_a_tool_that_has_no_answer_writes_nothing_and_the_tokens_are_those_without_tools(policy: Policy) -> None:
    def mute(said: str) -> str | None:
        """Says nothing.

        Args:
            said: anything
        """
        return None

    with_mute = sampled(policy, toolbox_of([mute]), "mute")
    engine, renderer = InProcessEngine(policy, max_rows=8), renderer_of(policy)
    prompts = CountdownTask(CountdownOptions(prompt_style="compact"), renderer, seed=0).prompts(0, range(4))
    request = GroupRequest(
        sampling=SamplingParams(), key=StreamKey(0, "rollout", 0), group_size=2, max_completion_tokens=120
    )
    without = sample_conversations(engine, prompts, request)
    assert [[each.tokens for each in group.rollouts] for group in with_mute] == [
        [each.tokens for each in group.rollouts] for group in without
    ]


def test_the_last_turn_ends_a_completion_that_would_go_on(policy: Policy) -> None:
    groups = sampled(policy, toolbox_of(["calculator"]), "calculator", max_turns=2)
    finishes = {rollout.finish for group in groups for rollout in group.rollouts}
    assert Finish.TURNS in finishes
    assert all(len(rollout.turns) <= 2 for group in groups for rollout in group.rollouts)
