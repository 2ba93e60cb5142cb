"""Tools and servers answer while a policy decodes: the bundled models' equations, and conversations over OpenEnv."""

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
from posttrain.options.environment import EnvironmentOptions
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import SamplingParams
from posttrain.options.task import CountdownOptions
from posttrain.records import Finish, Group, Rollout
from posttrain.tasks.countdown_task import CountdownTask
from tests.support.openenv_server import EchoServer, echo_server

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


def talked(server: EchoServer, instruct: Policy) -> list[Rollout]:
    options = EnvironmentOptions(url=server.url, max_failures=1)
    settings = TurnSettings(max_turns=5, options=options)
    renderer = renderer_of(instruct)
    made = environments_of(settings, Toolbox(), renderer, instruct.stop_ids)
    assert made is not None
    prompts = [renderer.render([{"role": "user", "content": f"What's 1{digit} + 5?"}], id=digit) for digit in "12"]
    request = GroupRequest(
        sampling=SamplingParams(), key=StreamKey(0, "rollout", 0), group_size=2, max_completion_tokens=400
    )
    with ReplyWorkers(made) as workers:
        groups = sample_conversations(InProcessEngine(instruct, max_rows=4), prompts, request, workers)
    return [rollout for group in groups for rollout in group.rollouts]


@pytest.fixture(scope="module")
def instruct() -> Policy:
    return load_policy(ModelOptions(path="bundled-instruct"), inference=True)


def test_a_conversation_with_an_openenv_server_lasts_until_the_server_is_done(instruct: Policy) -> None:
    with echo_server() as server:
        rollouts = talked(server, instruct)
    # The server echoes each turn, gives .1, .2, .3 and says `done` with the third.
    assert {rollout.finish for rollout in rollouts} == {Finish.ENVIRONMENT}
    assert [[turn.reward for turn in rollout.turns] for rollout in rollouts] == [[0.1, 0.2, 0.3]] * 4
    assert all("You said" in rollout.text for rollout in rollouts)


def test_a_session_that_dies_fails_the_completion_that_it_answers_and_keeps_what_was_said(instruct: Policy) -> None:
    with echo_server() as server:
        server.dies_at_step = 2
        rollouts = talked(server, instruct)
    failed = [rollout for rollout in rollouts if rollout.finish is Finish.FAILED]
    assert len(failed) == 2
    assert all("OpenEnvFailure" in rollout.failure for rollout in failed)
    assert all(len(rollout.turns) == 1 and rollout.num_sampled > 0 for rollout in failed)
