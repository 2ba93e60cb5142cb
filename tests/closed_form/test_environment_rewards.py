"""Completions with an environment, by hand: what functions get, what replies earn and where, metrics and files."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.table import build_algorithm
from posttrain.commands.arguments import MAY_CHANGE_ON_RESUME
from posttrain.config import Config
from posttrain.environments.protocol import Reply
from posttrain.environments.workers import Exchange
from posttrain.errors import RunError, UserError
from posttrain.records import CUT_OFF, Finish, Group, Prompt, Rollout, TokenSequence
from posttrain.rewards.grading import answers
from posttrain.rewards.grading.function import ENVIRONMENT_REWARD, reward_function
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.process_rewards import summed, turn_rewards, turnless_rewards
from posttrain.runs.named_inputs import MAY_CHANGE
from posttrain.runs.reply_journal import ReplyFile
from posttrain.runs.rollout_file import parquet_bytes, read_rollouts
from posttrain.runs.run_folder import RunFolder
from posttrain.training.metrics import completion_metrics, turn_metrics
from posttrain.training.session_task import rewards_of
from posttrain.turns import ToolCall, Turn
from tests.support.pages import documented, python
from tests.support.refusals import mentions
from tests.support.sequences import doubles, evidence_of

NAN = math.nan
GAME = object()


def conversation(*rewards: float | None, finish: Finish = Finish.STOP, sample: int = 0, **given: Any) -> Rollout:
    """Turns of two sampled tokens with a reply of one, each of which earned this; and a last turn of one token."""
    tokens = (5, 6, 9) * len(rewards) + (7,)
    sampled = (True, True, False) * len(rewards) + (True,)
    turns = tuple(Turn(end=3 * n + 2, num_given=1, reward=each) for n, each in enumerate(rewards))
    sequence = TokenSequence(tokens=tokens, sampled=sampled, logprobs=(-1.0,) * sum(sampled), finish=finish)
    given = {"text": "ab" * len(rewards) + "c", "turns": turns, "environment": GAME, **given}
    return Rollout(sample=sample, sequence=sequence, **given)


def failed(sample: int = 0) -> Rollout:
    return conversation(0.5, finish=Finish.FAILED, sample=sample, failure="Traceback …\nValueError: boo\n")


def one_group(*rollouts: Rollout, **prompt: Any) -> Group:
    return Group(prompt=Prompt(id="p", text="?", tokens=(1,), **prompt), draw=0, rollouts=rollouts)


def test_a_failed_completion_is_shown_to_no_function_and_has_no_score() -> None:
    seen: list[str] = []

    def each(completions: list[str], **_: object) -> list[float]:
        seen.extend(completions)
        return [1.0] * len(completions)

    def one(response: str) -> float:
        seen.append(response)
        return 1.0

    group = one_group(conversation(0.5), failed(sample=1))
    grades = grade([group], [reward_function(each), reward_function(one, weight=2.0), ENVIRONMENT_REWARD])
    assert seen == ["abc", "abc"]
    assert grades.scores[:, 0, 0].tolist() == [1.0, 1.0, 0.5]
    assert grades.scores[:, 0, 1].isnan().all()
    assert grades.rewards[0, 0].item() == 1.0 + 2.0 + 0.5
    assert grades.rewards[0, 1].isnan()
    assert grades.num_failures == 0  # of scoring; the environment's are counted apart


def test_functions_get_the_objects_and_what_the_replies_earned() -> None:
    got: dict[str, object] = {}

    def lists(completions: list[str], environment: list[object], environment_rewards: list[float]) -> list[float]:
        got.update(environment=environment, earned=environment_rewards)
        return [0.0] * len(completions)

    def single(response: str, environment: object, environment_reward: float | None) -> float:
        got.update(single=environment, single_earned=environment_reward)
        return 0.0

    group = one_group(conversation(0.25, None, 0.5), conversation(None, sample=1))
    grades = grade([group], [reward_function(lists), reward_function(single), ENVIRONMENT_REWARD])
    assert got["environment"] == [GAME, GAME]
    assert got["earned"] == [0.75, None]
    assert (got["single"], got["single_earned"]) == (GAME, None)  # of the second, which is called last
    assert grades.names[-1] == "environment"
    assert grades.scores[-1, 0, 0].item() == 0.75
    assert grades.scores[-1, 0, 1].isnan()


def test_without_an_environment_a_column_of_that_name_is_a_column() -> None:
    def of_rows(completions: list[str], environment: list[str]) -> list[float]:
        return [float(each == "a row's") for each in environment]

    plain = replace(conversation(), turns=(), environment=None)
    group = one_group(plain, columns={"environment": "a row's"})
    assert grade([group], [reward_function(of_rows)]).rewards.item() == 1.0
    with pytest.raises(UserError) as told:
        grade([one_group(plain)], [reward_function(of_rows)])
    mentions(str(told.value), "environment", "environment.path", "tools")


def test_an_object_stays_in_its_process() -> None:
    group = one_group(conversation(0.5), conversation(0.5, sample=1))
    with pytest.raises(UserError) as told:
        grade([group], [reward_function(needs_the_object, workers=1)])
    mentions(str(told.value), "needs_the_object", "environment", "workers")


def needs_the_object(completions: list[str], environment: list[object]) -> list[float]:
    return [0.0 for _ in completions]


def test_a_conversation_is_graded_as_messages_with_its_replies_behind_the_prefill() -> None:
    said = ({"role": "assistant", "content": "4+4="}, {"role": "tool", "content": "8"})
    rollout = conversation(None)
    rollout = replace(rollout, sequence=replace(rollout.sequence, messages=said))
    group = one_group(rollout, prefill="<think>", messages=({"role": "user", "content": "?"},))
    got: list[Any] = []

    def reads(completions: list[Any], **_: object) -> list[float]:
        got.extend(completions)
        completions[0][1]["content"] = "9"  # a copy
        return [0.0]

    grade([group], [reward_function(reads)])
    assert [message["role"] for message in got[0]] == ["assistant", "tool"]
    assert got[0][0]["content"] == "<think>4+4="
    assert said[1]["content"] == "8"


def test_a_reply_is_paid_to_the_token_that_ends_the_turn_before_it() -> None:
    groups = [one_group(conversation(0.25, None), conversation(None, 1.0, sample=1))]
    earned = turn_rewards(groups)
    assert earned is not None
    # two turns of two sampled tokens, and a last token: five each
    expected = [NAN, 0.25, NAN, NAN, NAN, NAN, NAN, NAN, 1.0, NAN]
    assert torch.equal(earned.nan_to_num(-1), doubles(*expected).nan_to_num(-1))
    assert turn_rewards([one_group(conversation(None))]) is None
    both = summed(earned, doubles(*([NAN] * 9), 3.0))
    assert both is not None
    assert both[-1].item() == 3.0
    assert both[1].item() == 0.25
    assert both[0].isnan()


@pytest.mark.parametrize("credit", ["completion", "reward_to_go", "steps"])
def test_what_replies_earn_counts_once_whatever_a_token_is_credited_with(credit: str) -> None:
    """Two completions of five tokens: the first earned 1 with its first turn, the second 3 with its second; 2 by f."""
    groups = [one_group(conversation(1.0, 0.0), conversation(0.0, 3.0, sample=1))]
    grades = grade(
        groups, [reward_function(lambda completions: [2.0] * len(completions), name="f"), ENVIRONMENT_REWARD]
    )
    algorithm = build_algorithm({"name": "grpo", "deviation": "none", "credit": credit})
    assert algorithm.credits_turns == (credit != "completion")
    rewards, steps = grades.rewards, None
    if algorithm.credits_turns:
        rewards, steps = turnless_rewards(grades), turn_rewards(groups)
    evidence = Evidence(
        rewards=rewards,
        scores=grades.scores,
        weights=grades.weights,
        lengths=torch.full((1, 2), 5),
        max_completion_tokens=9,
        token_rewards=None if steps is None else steps.nan_to_num(0.0),
        step_rewards=steps,
    )
    found = algorithm.credited(evidence, groups).advantages.tolist()
    expected = {
        # 3 and 5: 1 below and above their mean
        "completion": [-1.0] * 5 + [1.0] * 5,
        # to go: 2 + (1 1 0 0 0) and 2 + (3 3 3 3 0), less the mean of both at each token
        "reward_to_go": [-1.0, -1.0, -1.5, -1.5, 0.0, 1.0, 1.0, 1.5, 1.5, 0.0],
        # steps 1, 0, 0, 3 less their mean 1: 0 -1 | -1 2, summed from the end; f is the same for both
        "steps": [-1.0, -1.0, -1.0, -1.0, 0.0, 1.0, 1.0, 2.0, 2.0, 0.0],
    }
    assert found == pytest.approx(expected[credit])


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"name": "grpo", "credit": credit} for credit in ("completion", "reward_to_go", "steps")),
        *({"name": "rloo", "credit": credit} for credit in ("completion", "reward_to_go")),
        {"name": "reinforce", "baseline": "batch_mean", "credit": "reward_to_go"},
        {"name": "ppo", "baseline": "leave_one_out"},
    ],
    ids=str,
)
def test_a_completion_that_failed_before_its_first_token_changes_no_advantage(algorithm: dict[str, object]) -> None:
    rule = build_algorithm(algorithm)
    steps = doubles(0.5, NAN, NAN, 1.0, 0.25)

    def advantages(rewards: list[float], lengths: list[int]) -> list[float]:
        groups = [one_group(*(conversation(sample=sample) for sample in range(len(rewards))))]
        evidence = evidence_of([rewards], [lengths], token_rewards=steps.nan_to_num(0.0), step_rewards=steps)
        return rule.credited(evidence, groups).advantages.tolist()

    assert advantages([NAN, 1.0, 4.0], [0, 2, 3]) == pytest.approx(advantages([1.0, 4.0], [2, 3]))
    assert advantages([1.0, NAN, 4.0], [2, 0, 3]) == pytest.approx(advantages([1.0, 4.0], [2, 3]))


def test_the_environment_keeps_its_name_and_comes_last() -> None:
    def environment(completions: list[str], **_: object) -> list[float]:
        return [0.0] * len(completions)

    policy: Any = None  # only reward models ask for one
    found = rewards_of(Config(), [reward_function(environment)], policy, policy, replies_pay=True)
    assert [each.name for each in found] == ["environment_2", "environment"]
    assert found[-1] == ENVIRONMENT_REWARD


def test_metrics_of_turns_tools_and_ends_by_hand() -> None:
    calls = (ToolCall("add"), ToolCall("add", failed=True), ToolCall("find"))
    first = conversation(0.5, None)
    first = replace(
        first, turns=(replace(first.turns[0], calls=calls, seconds=0.5), replace(first.turns[1], seconds=1.5))
    )
    ended = conversation(1.0, finish=Finish.ENVIRONMENT, sample=1)
    ended = replace(ended, sequence=replace(ended.sequence, tokens=(5, 6), sampled=(True, True), logprobs=(-1.0, -1.0)))
    ended = replace(ended, turns=(Turn(end=2, reward=1.0),))
    found = turn_metrics([one_group(first, ended, failed(sample=2))])
    assert found["turns/mean"] == pytest.approx((3 + 1 + 2) / 3)
    assert found["turns/max"] == 3.0
    assert found["tokens/given"] == 2 + 0 + 1
    assert found["completions/given_share"] == pytest.approx(3 / (7 + 2 + 4))
    assert found["environment/reply_seconds"] == pytest.approx((0.5 + 1.5 + 0 + 0) / 4)
    assert found["environment/slowest_reply"] == 1.5
    assert found["environment/num_failed"] == 1.0
    assert found["finish/stop"] == found["finish/environment"] == found["finish/failed"] == pytest.approx(1 / 3)
    assert found["finish/turns"] == 0.0
    assert found["tools/call_frequency"] == 1.0  # three calls by three completions
    assert found["tools/failure_frequency"] == pytest.approx(1 / 3)
    assert found["tools/add/call_frequency"] == pytest.approx(2 / 3)
    assert found["tools/add/failure_frequency"] == 0.5
    assert found["tools/find/failure_frequency"] == 0.0
    assert all(map(documented, found))
    assert turn_metrics([one_group(replace(conversation(), turns=(), environment=None))]) == {}


def test_turns_are_read_from_a_rollout_file_as_they_were_written(tmp_path: Path) -> None:
    turn = Turn(end=2, num_given=1, reward=0.5, calls=(ToolCall("add", failed=True),))
    first = replace(conversation(0.5), turns=(turn,))
    groups = [one_group(first, failed(sample=1))]
    grades = grade(groups, [ENVIRONMENT_REWARD])
    file = tmp_path / "step-000001.parquet"
    file.write_bytes(parquet_bytes(1, groups, grades, grades.rewards))
    ((group,), read) = read_rollouts(file)
    assert [each.turns for each in group.rollouts] == [each.turns for each in groups[0].rollouts]
    assert [each.failure for each in group.rollouts] == ["", "Traceback …\nValueError: boo\n"]
    assert read.rewards[0, 0].item() == 0.5
    assert read.rewards[0, 1].isnan()


def test_a_failure_is_journaled_with_its_traceback(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "run: {}\n") as folder:
        groups = [one_group(conversation(0.5), failed(sample=1)), one_group(conversation(), conversation(sample=1))]
        folder.journal_scores(1, groups, grade(groups, [ENVIRONMENT_REWARD]))
    first, second = map(json.loads, (tmp_path / "run" / "scores.jsonl").read_text().splitlines())
    assert first["failures"] == [None, "Traceback …\nValueError: boo\n"]
    assert first["scores"] == {"environment": [0.5, None]}
    assert "failures" not in second


def test_replies_are_read_again_by_place_and_the_last_ones_count(tmp_path: Path) -> None:
    def exchanges(content: Any) -> list[list[Exchange]]:
        reply = Reply(content, reward=0.5, done=True, calls=(ToolCall("add"),))
        return [[Exchange(), Exchange(said="4+4=", reply=reply, seconds=0.1)], [Exchange(failure="boo")]]

    with RunFolder.create(tmp_path / "run", "run: {}\n") as folder:
        file = ReplyFile(folder)
        file.put("rollout", 1, 0, exchanges("7"))
        with file.at("evaluation at 0, sampled"):
            file.put("rollout", 1, 0, exchanges(({"role": "tool", "content": "x"},)))
        file.put("rollout", 1, 0, exchanges("8"))
        assert file.get("rollout", 1, 0) is None  # a life does not read its own
    with RunFolder.resume(tmp_path / "run") as folder:
        again = ReplyFile(folder)
        assert again.get("rollout", 1, 0) == [exchanges("8")[0], []]  # one failed in the last step of the file
        assert again.get("rollout", 1, 1) is None
        assert again.get("rollout", 2, 0) is None
        with again.at("evaluation at 0, sampled"):
            assert again.get("rollout", 1, 0) == exchanges(({"role": "tool", "content": "x"},))
        with pytest.raises(RunError) as told:
            again.put("rollout", 1, 0, exchanges(({"role": "tool", "content": object()},)))
        mentions(str(told.value), "plain data", "reproducible = True")


def test_an_object_of_an_environment_does_not_leave_its_process() -> None:
    rollout = conversation(0.5, None)
    there = copy(rollout)  # by the same state as a pickle
    assert there == rollout
    assert there.environment is None
    assert there.turns == rollout.turns
    assert rollout.environment is GAME


ONE_TURN = """
import sys
from contextlib import ExitStack
from posttrain.environments.run_environment import RepliesOfRun, ReplySettings
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import ModelOptions
import posttrain.training.rl
policy = load_policy(ModelOptions(path="bundled"), inference=True)
with ExitStack() as opened:
    assert RepliesOfRun(policy, ReplySettings(), {}, opened).open(list).workers is None
unwanted = [f"posttrain.environments.{name}" for name in ("making", "tools", "openenv", "method_tools")]
print(*(name for name in (*unwanted, "websockets", "httpx") if name in sys.modules))
"""


def test_a_run_without_an_environment_loads_nothing_of_them(tmp_path: Path) -> None:
    ended = python(ONE_TURN, tmp_path)
    assert ended.code == 0, ended.err
    assert ended.out.strip() == ""


def test_both_names_of_what_is_cut_off_are_the_same() -> None:
    assert {each.value for each in CUT_OFF} == answers.CUT_OFF


def test_completions_without_a_replied_turn_are_of_an_environment_also_from_a_journal_and_a_file(
    tmp_path: Path,
) -> None:
    silent = replace(conversation(), turns=(), environment=None, in_conversation=True)
    groups = [one_group(silent, replace(silent, sample=1))]
    grades = grade(groups, [reward_function(lambda completions, environment: [1.0] * 2, name="one")])
    assert "turns/mean" in turn_metrics(groups)
    file = tmp_path / "step-000001.parquet"
    file.write_bytes(parquet_bytes(1, groups, grades, grades.rewards))
    ((group,), _) = read_rollouts(file)
    assert all(each.has_environment for each in group.rollouts)


def test_failures_where_the_journal_ends_are_asked_anew_and_an_accepted_change_voids_all(tmp_path: Path) -> None:
    exchanges = [[Exchange(failure="boo")], [Exchange(), Exchange(said="4", reply=Reply("7"))]]
    with RunFolder.create(tmp_path / "run", "run: {}\n") as folder:
        for step in (1, 2):
            ReplyFile(folder).put("rollout", step, 0, exchanges)
    with RunFolder.resume(tmp_path / "run") as folder:
        file = ReplyFile(folder)
        assert file.get("rollout", 1, 0) == exchanges
        assert file.get("rollout", 2, 0) == [[], exchanges[1]]
        assert ReplyFile(folder, changed=True).get("rollout", 1, 0) is None
        assert ReplyFile(folder).get("rollout", 1, 0) is None  # nor in a later life


def test_an_evaluation_on_one_thread_does_not_move_the_replies_of_another(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "run: {}\n") as folder:
        file = ReplyFile(folder)
        with file.at("evaluation"), ThreadPoolExecutor(1) as other:
            assert other.submit(lambda: file.place).result() == "step"
            assert file.place == "evaluation"


def test_a_failed_completion_has_no_length() -> None:
    groups = [one_group(conversation(), failed(sample=1))]
    metrics, sound = completion_metrics(groups), groups[0].rollouts[0].num_sampled
    for name in ("mean_length", "min_length", "min_terminated_length"):
        assert metrics[f"completions/{name}"] == sound


@pytest.mark.parametrize("name", ["max_failures", "seconds", "workers", "url"])
def test_limits_and_the_server_of_an_environment_may_change_on_resume(name: str) -> None:
    assert f"environment.{name}" in MAY_CHANGE
    assert f"environment.{name}" in MAY_CHANGE_ON_RESUME
