"""Completions of several turns: the policy says something, its environment replies, and the policy goes on.

A turn ends with a stop token or a stop text.  Its environment is then asked on another thread, and the row is parked:
the others decode on.  A reply's tokens are appended to those that are there, and no token is ever made anew.

Which rows are decoded side by side moves the last bits of float32 log-probs.  So replies are waited for as long as that
costs little (`STALL_SECONDS`, `STALL_SHARE`): where they are quick, a step has the same bits every time.
"""

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from posttrain.environments.protocol import Environment, Reply
from posttrain.environments.workers import Asking, Exchange, ReplyWorkers, checked_addition, checked_reply
from posttrain.errors import RunError, UserError
from posttrain.generation.conversation import Conversation, OpenGroup, seed_of
from posttrain.generation.engine import (
    Advance,
    Engine,
    Sampling,
    SamplingTimeout,
    opened,
    require_alternatives,
    require_room_for,
    sample_groups,
    take_checked,
)
from posttrain.generation.request import Continuation, GroupRequest, Sampled, StreamKey
from posttrain.records import Finish, Group, Prompt

LOOK_SECONDS = 0.005
"""How long completions are waited for at a time while replies are open."""
PARKED_SECONDS = 1.0
"""The same for replies where nothing is left to decode."""
STALL_SECONDS, STALL_SHARE = 0.5, 0.1
"""Decoding waits for replies during this share of all time, and these seconds before."""
LONGEST_STALL = 0.25
"""Most seconds that decoding waits at a time."""


class ReplyJournal(Protocol):
    """Keeps the replies of environments that are not reproducible; a resumed step reads them."""

    def get(self, key: StreamKey, draw: int) -> Sequence[tuple[Exchange, ...]] | None:
        """The exchanges of each completion of a draw, `reset` first; None if that group was not finished."""

    def put(self, key: StreamKey, draw: int, exchanges: Sequence[tuple[Exchange, ...]]) -> None:
        """Keep those of a group that is done, before anything reads it."""


def sample_conversations(
    engine: Engine,
    prompts: Sequence[Prompt],
    request: GroupRequest,
    workers: ReplyWorkers | None = None,
    *,
    journal: ReplyJournal | None = None,
    advance: Advance = lambda count: None,
    look_seconds: float | None = None,
) -> list[Group]:
    """`sample_groups` whose completions have several turns, each with an environment of its own; without, the same.

    Raises RunError above `max_failures`, and UserError where `reset` adds different things to the prompt of a group.
    """
    if workers is None:
        return sample_groups(engine, prompts, request, advance=advance, look_seconds=look_seconds)
    whole = replace(request, keep=True, stop_texts=workers.environments.stop_texts)
    done: dict[int, Group] = {}
    with opened(engine, whole) as sampling:
        conversations = Conversations(engine, sampling, workers, journal)
        conversations.put(prompts, request)
        while len(done) < len(prompts):
            for _, group in conversations.take(look_seconds):
                done[group.draw] = group
            advance(conversations.count_ended())
    return [done[draw] for draw in sorted(done)]


class Conversations:
    """Conversations over one open sampling, which needs `keep` and the environments' stop texts."""

    def __init__(
        self, engine: Engine, sampling: Sampling, workers: ReplyWorkers, journal: ReplyJournal | None = None
    ) -> None:
        self.engine, self.sampling, self.workers = engine, sampling, workers
        self.environments = workers.environments
        self.journal = None if self.environments.reproducible else journal
        self._asking: Asking[Conversation | None] = Asking(workers)
        self._known: list[tuple[Conversation, Exchange]] = []  # answers from the journal
        self._sampled: dict[tuple[StreamKey, int, int], Conversation] = {}
        self._next: list[Continuation] = []
        self._done: list[tuple[StreamKey, Group]] = []
        self._opened, self._stalled, self._waited, self._ended = time.monotonic(), 0.0, 0.0, 0

    def put(self, prompts: Sequence[Prompt], request: GroupRequest) -> None:
        """Begin groups of conversations; requests may differ in all that a sampling does not fix."""
        failures = math.floor(self.environments.options.max_failures * _up_to(prompts, request))
        for draw, prompt in enumerate(prompts, start=request.first_draw):
            group = OpenGroup(prompt=prompt, draw=draw, request=request, failures_left=failures)
            known = None if self.journal is None else self.journal.get(request.key, draw)
            for number in range(request.group_size):
                conversation = Conversation(group=group, sample=request.first_sample + number)
                group.members.append(conversation)
                self._begin(conversation, None if known is None else known[number])

    def take(self, seconds: float | None = None) -> list[tuple[StreamKey, Group]]:
        """Groups that are done, with the key of their request; none if none was done in `seconds`.

        Without `seconds` it waits as long as it takes, each completion as long as the engine's patience.
        """
        until = math.inf if seconds is None else time.monotonic() + seconds
        while not self._done and (time.monotonic() <= until):
            self._read_answers()
            if self._sampled:
                self._read_sampled(LOOK_SECONDS if self._asking.num_open else seconds)
        done, self._done = self._done, []
        return done

    def count_ended(self) -> int:
        """Completions that ended since the last call."""
        ended, self._ended = self._ended, 0
        return ended

    def _begin(self, conversation: Conversation, known: Sequence[Exchange] | None) -> None:
        """Ask for the environment and its addition, from the beginning."""
        group = conversation.group
        conversation.begin(known)
        row, seed = group.prompt.columns, seed_of(group.request.key, group.draw)

        def begun() -> object:
            conversation.environment = self.environments.make()
            return conversation.environment.reset(row, seed)

        if not self._answer_is_known(conversation, ""):
            self._asking.ask(conversation, begun, read=checked_addition)

    def _answer_is_known(self, conversation: Conversation, said: str) -> bool:
        if not conversation.known:
            return False
        self._known.append((conversation, conversation.known.popleft()))
        return True

    def _read_answers(self) -> None:
        """Wait for replies, as long as that costs little, and let their conversations go on."""
        answers: list[tuple[Conversation | None, Exchange]] = [*self._known]
        self._known = []
        if self._asking.num_open and not self._sampled and not answers:
            answers += self._asking.answered(PARKED_SECONDS)
        began = time.monotonic()
        allowed = STALL_SECONDS + STALL_SHARE * (began - self._opened) - self._stalled
        until = began + min(LONGEST_STALL, max(allowed, 0))
        while self._asking.num_open:
            more = self._asking.answered(max(until - time.monotonic(), 0))
            if not more:
                break
            answers += more
        self._stalled += time.monotonic() - began
        for conversation, exchange in sorted(answers, key=_order):
            if conversation is not None:
                self._answered(conversation, exchange)
            elif exchange.failure:  # of `close`, whose result nobody needs
                warnings.warn(f"environment {self.environments.name}: close failed: {exchange.failure}", stacklevel=2)
        if self._next:
            self.sampling.put(self._next)
            self._next = []

    def _read_sampled(self, seconds: float | None) -> None:
        began, patience = time.monotonic(), self.engine.patience_seconds
        done = take_checked(self.sampling, self.engine, seconds)
        self._waited = 0.0 if done else self._waited + time.monotonic() - began
        if self._waited > patience:
            raise SamplingTimeout(type(self.engine).__name__, patience, len(self._sampled))
        for sampled in done:
            one = sampled.continuation
            conversation = self._sampled.pop((_key(one), one.draw, one.sample), None)
            if conversation is None or conversation.asked != one:
                raise RunError(f"engine {type(self.engine).__name__}, {one.label}: this continuation was not put.")
            require_alternatives(self.engine, sampled, conversation.group.request)
            self._turn_ended(conversation, sampled)
