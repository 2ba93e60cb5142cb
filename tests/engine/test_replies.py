"""Replies beside decoding: what waits for what, what is computed, and what a journal gives back."""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count

import pytest
import torch

from posttrain.environments.protocol import Environments, Reply
from posttrain.environments.workers import Exchange, ReplyWorkers
from posttrain.errors import RunError
from posttrain.generation.conversations import sample_conversations
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import StreamKey
from posttrain.models.loading.saving import ExportedWeights
from posttrain.records import Finish, Group
from tests.engine.test_continuation import Counted
from tests.support.refusals import refused
from tests.support.tiny import VOCAB, request, some_prompts, tiny_policy
from tests.support.turns import Dice, conversations, environments

ASKED = request(4, 20, key=StreamKey(3, "test", 2))
PROMPTS = some_prompts((3, 7, 5))


def engine_of(dtype: torch.dtype = torch.float64) -> InProcessEngine:
    return InProcessEngine(tiny_policy("qwen3", dtype))


def test_quick_and_slow_replies_give_the_same_bits() -> None:
    """In float32 too: a log-prob has the same bits whatever is decoded beside it."""
    quick = partial(Dice, ends=0)
    slow = partial(quick, slow=lambda share: 0.02 * share)
    quickly, slowly = (
        conversations(engine_of(torch.float32), PROMPTS, ASKED, environments(kind)) for kind in (quick, slow)
    )
    assert sum(len(each.turns) for group in quickly for each in group.rollouts) > 8
    assert [[each.sequence for each in group.rollouts] for group in quickly] == [
        [each.sequence for each in group.rollouts] for group in slowly
    ]


class Waits:
    """Replies once it is let, and says nothing."""

    def __init__(self, may_reply: threading.Event) -> None:
        self.may_reply = may_reply

    def reset(self, row: Mapping[str, object], seed: int) -> None:
        return None

    def reply(self, said: str) -> Reply | None:
        self.may_reply.wait(60)
        return None


def test_a_slow_environment_parks_its_row_and_the_others_decode_on() -> None:
    """The first turn that ends is replied to only after all other completions have ended."""
    others, asked = threading.Event(), count()
    engine = engine_of()
    ended: list[int] = []

    class FirstWaits(Waits):
        def reply(self, said: str) -> Reply | None:
            return super().reply(said) if next(asked) == 0 else None

    def advance(number: int) -> None:
        ended.append(number)
        if sum(ended) == 11:
            others.set()

    kinds = environments(lambda: FirstWaits(others), workers=2, seconds=60)
    with ReplyWorkers(kinds) as workers:
        groups = sample_conversations(engine, PROMPTS, request(4, 30), workers, advance=advance)
    assert others.is_set()
    assert sum(ended) == 12
    assert ended[-1] == 1
    assert {each.finish for group in groups for each in group.rollouts} <= {Finish.STOP, Finish.LENGTH}


def test_conversations_that_outlive_their_session_end() -> None:
    """As those of a thread that collects ahead, when another thread has ended the run."""
    never = threading.Event()
    workers = ReplyWorkers(environments(lambda: Waits(never), seconds=60))
    threading.Timer(0.3, workers.close).start()
    with refused("environment test", "its session has ended", error=RunError):
        sample_conversations(engine_of(), PROMPTS, ASKED, workers)
    never.set()


class OnALoop:
    """An environment whose methods are async."""

    loops: list[asyncio.AbstractEventLoop]

    def __init__(self, loops: list[asyncio.AbstractEventLoop]) -> None:
        self.loops = loops

    async def reset(self, row: Mapping[str, object], seed: int) -> str:
        self.loops.append(asyncio.get_running_loop())
        return "7"

    async def reply(self, said: str) -> Reply:
        await asyncio.sleep(0.001)
        self.loops.append(asyncio.get_running_loop())
        return Reply("8", done=True)

    async def close(self) -> None:
        self.loops.append(asyncio.get_running_loop())


def test_async_environments_share_one_loop_and_end_with_the_workers() -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    made = environments(lambda: OnALoop(loops))
    with ReplyWorkers(made) as workers:
        groups = sample_conversations(engine_of(), PROMPTS, ASKED, workers)
        sample_conversations(engine_of(), PROMPTS, ASKED, workers)
    assert all(group.prompt.tokens[-1] == 7 for group in groups)
    assert len(set(map(id, loops))) == 1
    for _ in range(200):
        if not loops[0].is_running():
            break
        time.sleep(0.01)
    assert not loops[0].is_running()


def test_tokens_through_the_model_are_the_prompts_once_and_what_is_sampled_and_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a call for each turn they were six times as many; here at most the last token of each is none of them."""
    engine = engine_of()
    counted = Counted(engine, monkeypatch)
    groups = conversations(engine, some_prompts((9, 12, 15)), ASKED, environments(Dice))
    held = sum(len(group.prompt.tokens) + sum(len(each.tokens) for each in group.rollouts) for group in groups)
    through = sum(map(sum, counted.prefilled)) + counted.steps
    assert through <= 1.1 * held
    assert through >= held - 12  # the last token of each completion predicts nothing


class Memory:
    """A journal that keeps its groups in memory."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, int, int], Sequence[Sequence[Exchange]]] = {}

    def get(self, purpose: str, step: int, draw: int) -> Sequence[Sequence[Exchange]] | None:
        return self.groups.get((purpose, step, draw))

    def put(self, purpose: str, step: int, draw: int, exchanges: Sequence[Sequence[Exchange]]) -> None:
        self.groups[purpose, step, draw] = exchanges


@pytest.fixture
def fresh() -> Environments:
    """Environments that never reply in the same way twice."""
    numbers = count()

    class Fresh:
        def reset(self, row: Mapping[str, object], seed: int) -> str:
            return "9"

        def reply(self, said: str) -> Reply | None:
            number = next(numbers)
            return Reply(str(number % VOCAB), reward=number, done=number % 7 == 0) if number % 11 else None

    return environments(Fresh, reproducible=False)


def told(groups: Sequence[Group]) -> list[object]:
    return [
        (each.tokens, each.sequence.sampled, each.text, each.turns, each.failure, each.sample, group.draw, group.prompt)
        for group in groups
        for each in group.rollouts
    ]


def talk(made: Environments, journal: Memory) -> list[object]:
    with ReplyWorkers(made, journal) as workers:
        return told(sample_conversations(engine_of(), PROMPTS, ASKED, workers))


def test_a_journal_gives_back_the_replies_of_an_environment_that_is_not_reproducible(fresh: Environments) -> None:
    journal = Memory()
    first = talk(fresh, journal)
    assert set(journal.groups) == {("test", 2, draw) for draw in range(3)}
    assert talk(fresh, journal) == first
    assert talk(fresh, Memory()) != first


def test_a_group_that_a_journal_does_not_hold_whole_begins_anew(fresh: Environments) -> None:
    journal = Memory()
    first = talk(fresh, journal)
    del journal.groups["test", 2, 1]
    again = talk(fresh, journal)
    assert again[:4] + again[8:] == first[:4] + first[8:]
    assert again[4:8] != first[4:8]


def test_a_journal_of_other_turns_is_not_read(fresh: Environments) -> None:
    """As after a resume on another device: what the policy said differs, so its environment is asked anew."""
    journal = Memory()
    talk(fresh, journal)
    key = "test", 2, 0
    journal.groups[key] = [
        [exchange if place != 1 else Exchange(said="other", reply=Reply("3")) for place, exchange in enumerate(each)]
        for each in journal.groups[key]
    ]
    again = talk(fresh, journal)
    assert len(again) == 12
    assert not any(exchange.said == "other" for each in journal.groups[key] for exchange in each)


def test_a_journal_is_neither_read_nor_written_where_replies_are_reproducible() -> None:
    journal = Memory()
    with ReplyWorkers(environments(Dice), journal) as workers:
        sample_conversations(engine_of(), PROMPTS, ASKED, workers)
    assert not journal.groups


def test_without_environments_it_is_sample_groups_and_starts_no_thread() -> None:
    from posttrain.generation.engine import sample_groups

    before = set(threading.enumerate())
    assert sample_conversations(engine_of(), PROMPTS, ASKED) == sample_groups(engine_of(), PROMPTS, ASKED)
    assert not set(threading.enumerate()) - before


def test_weights_that_are_loaded_amid_conversations_are_spans_of_sampled_tokens() -> None:
    """As in a step that is collected ahead; the second turn of one may have been sampled by later weights."""
    engine = engine_of()
    loads = count(1)

    def advance(number: int) -> None:
        if number and (version := next(loads)) <= 3:
            engine.load(ExportedWeights(engine.policy), version)

    kind = environments(lambda: Dice(ends=0), max_turns=4)
    with ReplyWorkers(kind) as workers:
        groups = sample_conversations(engine, PROMPTS, ASKED, workers, advance=advance)
    sequences = [each.sequence for group in groups for each in group.rollouts]
    assert any(len(each.versions) > 1 for each in sequences)
    for each in sequences:
        starts, versions = zip(*each.versions, strict=True)
        assert starts[0] == 0
        assert list(starts) == sorted(set(starts))
        assert list(versions) == sorted(set(versions))
        assert starts[-1] < each.num_sampled
