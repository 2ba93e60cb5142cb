"""How a conversation ends, and what becomes of an environment that raises, is late, or returns nonsense."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from posttrain.environments.protocol import Reply
from posttrain.environments.workers import ReplyWorkers
from posttrain.errors import RunError
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.policy import Policy
from posttrain.records import Finish, Rollout
from posttrain.training.update import group_logprobs
from posttrain.turns import ToolCall
from tests.support.refusals import refused
from tests.support.stages import stages_with
from tests.support.tiny import STOP_IDS, VOCAB, request, some_prompts, through_its_own_forward, tiny_policy
from tests.support.turns import conversations, environments

STOP = STOP_IDS[0]
SAYS_NOTHING = tuple(token for token in range(VOCAB) if token != STOP)
"""Suppressed, so that each turn is one stop token."""
LETTERS = tuple(token for token in range(VOCAB) if token not in (7, 8))
"""Suppressed, so that no turn ends before its limit."""


class Scripted:
    """Replies in turn; what is no reply is called with what was said."""

    def __init__(self, *script: object, adds: object = None) -> None:
        self.script, self.adds, self.closed = list(script), adds, 0

    def reset(self, row: Mapping[str, object], seed: int) -> object:
        return self.adds() if callable(self.adds) else self.adds

    def reply(self, said: str) -> object:
        step = self.script.pop(0) if self.script else Reply("7", reward=0.5)
        return step(said) if callable(step) else step

    def close(self) -> None:
        self.closed += 1


def talk(
    make: Callable[[], object], *, limit: int = 12, suppressed: tuple[int, ...] = SAYS_NOTHING, **options: object
) -> Rollout:
    """One conversation with an environment, beside another that does not fail."""
    others = [Scripted(None)]
    made = environments(lambda: others.pop() if others else make(), **{"max_failures": 1.0, "workers": 1, **options})
    asked = request(2, limit, suppressed=suppressed)
    ((_, rollout),) = (
        g.rollouts for g in conversations(InProcessEngine(tiny_policy()), some_prompts([4]), asked, made)
    )
    return rollout


def marks(rollout: Rollout) -> str:
    return "".join("s" if sampled else "g" for sampled in rollout.sequence.sampled)


def test_none_lets_the_answer_stand() -> None:
    rollout = talk(lambda: Scripted(Reply("7 8"), None))
    assert (rollout.finish, marks(rollout), len(rollout.turns)) == (Finish.STOP, "sggs", 1)
    assert rollout.tokens == (STOP, 7, 8, STOP)
    assert rollout.sequence.text_tokens == (STOP, 7, 8)
    assert rollout.text == tiny_policy().tokenizer.decode([STOP, 7, 8])


def test_a_reply_that_is_done_ends_the_conversation_and_nobody_reads_it() -> None:
    rollout = talk(lambda: Scripted(Reply("7"), Reply("9", reward=1.0, done=True, calls=(ToolCall("look"),))))
    assert (rollout.finish, marks(rollout)) == (Finish.ENVIRONMENT, "sgs")
    assert [(turn.end, turn.num_given, turn.reward) for turn in rollout.turns] == [(1, 1, None), (3, 0, 1.0)]
    assert rollout.turns[1].calls == (ToolCall("look"),)
    assert rollout.sequence.text_tokens == (STOP, 7)  # the stop token at the end writes no text
    assert not rollout.finish.cut_off


def test_the_last_turn_is_replied_to_and_its_reward_counts() -> None:
    rollout = talk(lambda: Scripted(), max_turns=3)
    assert (rollout.finish, marks(rollout)) == (Finish.TURNS, "sgsgs")
    assert [turn.reward for turn in rollout.turns] == [0.5] * 3
    assert rollout.finish.cut_off


def test_the_limit_counts_sampled_tokens_over_all_turns() -> None:
    rollout = talk(lambda: Scripted(), limit=2)
    assert (rollout.finish, marks(rollout), len(rollout.turns)) == (Finish.LENGTH, "sgs", 2)
    cut = talk(lambda: Scripted(), limit=5, suppressed=LETTERS)
    assert (cut.finish, marks(cut), cut.turns) == (Finish.LENGTH, "sssss", ())  # cut off: nothing is asked


def test_sampled_and_given_tokens_together_are_bounded_by_the_context() -> None:
    thirty = Reply(" ".join(["7"] * 28))
    rollout = talk(lambda: Scripted(thirty, thirty, thirty), limit=60)  # 4 + 1 + 28 + 1 + 28 + 1 of 64, and 28 more
    assert (rollout.finish, len(rollout.tokens), len(rollout.turns)) == (Finish.LENGTH, 59, 3)
    assert rollout.turns[2].num_given == 0


def test_a_turn_that_a_stop_text_ended_is_no_stop() -> None:
    """None then ends the conversation for the environment's sake: the last token writes text."""
    letter = tiny_policy().tokenizer.decode([8])
    rollout = talk(lambda: Scripted(Reply("7"), None), suppressed=LETTERS, stop_texts=(letter,), limit=40)
    assert rollout.finish is Finish.ENVIRONMENT
    assert rollout.tokens[-1] == 8
    assert rollout.text.endswith(letter)
    assert rollout.text.count(letter) == 2


def test_with_tools_at_stop_texts_a_stop_token_ends_the_completion_unasked() -> None:
    rollout = talk(lambda: Scripted(), only_at_stop_texts=True, stop_texts=("no such text",))
    assert (rollout.finish, marks(rollout), rollout.turns) == (Finish.STOP, "s", ())


def sleeps(seconds: float) -> Callable[[str], Reply]:
    return lambda said: time.sleep(seconds) or Reply("7")


async def late(said: str) -> Reply:
    await asyncio.sleep(5)
    return Reply("7")


async def blocks_its_loop(said: str) -> Reply:
    time.sleep(1.5)
    return Reply("7")


def raises(*_: object) -> Reply:
    raise SystemExit("the game broke")


FAULTS: dict[str, tuple[object, tuple[str, ...]]] = {
    "raises": (raises, ("the game broke", "in raises")),
    "is late": (sleeps(0.5), ("no reply in 0.2 seconds", "environment.seconds")),
    "is late by little": (sleeps(0.3), ("no reply in 0.2 seconds",)),
    "is late and async": (late, ("no reply in 0.2 seconds",)),
    "blocks its loop": (blocks_its_loop, ("TimeoutError",)),
    "returns text": ("7", ("reply returned '7' (str)", "Return a Reply")),
    "returns a reward that is no number": (Reply("7", reward=float("nan")), ("reward = nan",)),
    "says what is no text": (Reply(7), ("the content is 7 (int)",)),
    "says messages without a role": (Reply([{"content": "a"}]), ("role",)),
    "says messages without content": (Reply([{"role": "user"}]), ("message 0 of the reply", "content")),
    "says what the policy says": (Reply([{"role": "assistant", "content": "a"}]), ("role assistant", "Use another")),
    "says a book": (Reply("7" * 1_000_001), ("1000001 characters", "1000000 are allowed")),
    "is done by a word": (Reply("7", done="yes"), ("done = 'yes'",)),
    "has calls of its own": (Reply("7", calls=("look",)), ("ToolCall",)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_reply_that_fails_ends_its_completion_as_failed_with_the_traceback(name: str) -> None:
    fault, says = FAULTS[name]
    rollout = talk(lambda: Scripted(Reply("7"), fault), seconds=0.2)
    assert (rollout.finish, marks(rollout), len(rollout.turns)) == (Finish.FAILED, "sgs", 1)
    assert all(each in rollout.failure for each in says), rollout.failure
    assert rollout.sequence.text_tokens == (STOP, 7)


def makes_nothing() -> object:
    raise OSError("no server")


BEGINNINGS: dict[str, tuple[Callable[[], object], str]] = {
    "cannot be made": (makes_nothing, "no server"),
    "cannot begin": (lambda: Scripted(adds=raises), "the game broke"),
    "adds a number": (lambda: Scripted(adds=7), "the content is 7"),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_an_environment_that_cannot_begin_fails_before_a_token_is_sampled(name: str) -> None:
    make, says = BEGINNINGS[name]
    rollout = talk(make)
    assert (rollout.finish, rollout.tokens, rollout.text) == (Finish.FAILED, (), "")
    assert says in rollout.failure


@pytest.mark.parametrize("forward", [lambda policy: policy, through_its_own_forward])
def test_a_completion_without_a_token_goes_through_a_forward_pass(forward: Callable[[Policy], Policy]) -> None:
    """That of an environment that could not begin: other completions of its group are what they were."""
    count = iter(range(9))

    def every_third() -> Scripted:
        return Scripted(adds=raises if next(count) % 3 == 1 else None)

    made = environments(every_third, max_failures=1.0, workers=1)
    groups = conversations(InProcessEngine(tiny_policy()), some_prompts([4, 6]), request(3, 8), made)
    assert [[len(each.tokens) > 0 for each in group.rollouts] for group in groups] == [[True, False, True]] * 2
    without = [
        replace(group, rollouts=tuple(each for each in group.rollouts if each.finish is not Finish.FAILED))
        for group in groups
    ]
    policy = forward(tiny_policy())
    found, expected = (group_logprobs(policy, each, temperature=1.0, max_tokens=1000) for each in (groups, without))
    assert torch.equal(found, expected)


def test_too_many_failures_stop_the_run_with_their_number_and_the_first_traceback() -> None:
    made = environments(lambda: Scripted(raises), max_failures=0.5, workers=2)
    with refused("test", "4 of 6 completions failed", "max_failures = 0.5", "the game broke", error=RunError):
        conversations(
            InProcessEngine(tiny_policy()), some_prompts([4, 6]), request(3, 8, suppressed=SAYS_NOTHING), made
        )


def test_a_step_whose_completions_all_failed_stops_the_run_whatever_is_allowed() -> None:
    made = environments(lambda: Scripted(raises), max_failures=1.0)
    with refused("test", "all completions failed", "the game broke", error=RunError):
        conversations(
            InProcessEngine(tiny_policy()), some_prompts([4, 6]), request(1, 8, suppressed=SAYS_NOTHING), made
        )


def test_as_many_failures_as_the_recipe_allows_stop_nothing() -> None:
    count = iter(range(6))
    made = environments(lambda: Scripted(raises if next(count) < 3 else None), max_failures=0.5, workers=2)
    asked = request(3, 8, suppressed=SAYS_NOTHING)
    groups = conversations(InProcessEngine(tiny_policy()), some_prompts([4, 6]), asked, made)
    assert sum(each.finish is Finish.FAILED for group in groups for each in group.rollouts) == 3


def test_completions_of_a_prompt_begin_with_the_same_addition() -> None:
    count = iter(range(6))
    made = environments(lambda: Scripted(adds=str(next(count) // 5)), workers=1)
    with refused("environment test", "prompt p1", "'0'", "'1'", "sample 2", "`row` and `seed`"):
        conversations(InProcessEngine(tiny_policy()), some_prompts([4, 6]), request(3, 8), made)


def test_a_reply_that_never_returns_holds_neither_the_run_nor_its_end() -> None:
    never, began = threading.Event(), time.monotonic()
    rollout = talk(lambda: Scripted(lambda said: never.wait()), seconds=0.2, workers=1)
    assert rollout.finish is Finish.FAILED
    assert "never.wait()" in rollout.failure  # where it hangs
    hanging = [each for each in threading.enumerate() if each.name == "environment test"]
    assert all(thread.daemon for thread in hanging)
    assert time.monotonic() - began < 5
    never.set()


def test_every_thread_may_hang_and_others_still_reply() -> None:
    never, count = threading.Event(), iter(range(8))
    made = environments(
        lambda: Scripted((lambda said: never.wait()) if next(count) < 2 else Reply("7", done=True)),
        seconds=0.2,
        workers=2,
        max_failures=1.0,
    )
    asked = request(4, 8, suppressed=SAYS_NOTHING)
    groups = conversations(InProcessEngine(tiny_policy()), some_prompts([4, 6]), asked, made)
    finishes = [each.finish for group in groups for each in group.rollouts]
    assert (finishes.count(Finish.FAILED), finishes.count(Finish.ENVIRONMENT)) == (2, 6)
    never.set()


def test_an_environment_is_closed_once_however_it_ended() -> None:
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Scripted([None, Reply("7", done=True), raises, Reply("7")][len(made) % 4]))
        return made[-1]

    with_all = environments(make, workers=1, max_failures=1.0, max_turns=2)
    conversations(InProcessEngine(tiny_policy()), some_prompts([4]), request(4, 8, suppressed=SAYS_NOTHING), with_all)
    for _ in range(500):  # the end of the workers waits a second for them, which a busy machine may not give
        if all(each.closed for each in made):
            break
        time.sleep(0.01)
    assert [each.closed for each in made] == [1] * 4


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_failures_are_counted_over_all_rounds_of_a_step(share: float) -> None:
    """Of 20 completions in each of four rounds 2, 4, 5 and 5 fail: each round by itself is within a tenth so far."""
    made_of_round = iter([2, 4, 5, 5])

    class Round:
        left = 0
        made = 0

        def make(self) -> Scripted:
            if self.made % 20 == 0:
                self.left = next(made_of_round)
            self.made, self.left = self.made + 1, self.left - 1
            return Scripted(adds=raises if self.left >= 0 else None)

    stages = stages_with(
        {"name": "dapo", "overlong": None, "resample": {"max_rounds": 3}},
        lambda completions, **columns: [1.0] * len(completions),
    )
    with ReplyWorkers(environments(Round().make, workers=1, max_failures=share, max_turns=1)) as workers:
        stages.collector.workers = workers
        if share == 0.3:
            assert sum(each.finish.failed for g in stages.collected().sampled for each in g.rollouts) == 16
        else:
            with refused("16 of 80 completions failed", "max_failures = 0.1", error=RunError):
                stages.collected()
