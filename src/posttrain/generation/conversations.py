"""Completions of several turns: the policy says something, its environment replies, and the policy continues.

A turn ends with a stop token or a stop text.  Its environment is then asked on another thread, and the row is parked
while the others continue.  A reply's tokens are appended to the existing ones, and no text is ever tokenised again.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from posttrain.environments.reply_checks import checked_addition, checked_reply
from posttrain.environments.workers import Asking, Exchange, ReplyWorkers
from posttrain.errors import RunError
from posttrain.generation.engine import (
    Advance,
    Engine,
    Sampling,
    SamplingTimeout,
    engine_name,
    named,
    opened,
    require_alternatives,
    require_room_for,
    sample_groups,
    take_checked,
)
from posttrain.generation.open_rollout import OpenGroup, OpenRollout, seed_of
from posttrain.generation.request import Continuation, GroupRequest, Sampled, StreamKey
from posttrain.records import Finish, Group, Prompt

LOOK_SECONDS = 0.005
"""Longest single wait for completions while replies are open."""
PARKED_SECONDS = 1.0
"""The same for replies when no row is being decoded."""


def sample_conversations(
    engine: Engine,
    prompts: Sequence[Prompt],
    request: GroupRequest,
    workers: ReplyWorkers | None = None,
    *,
    advance: Advance = lambda count: None,
    look_seconds: float | None = None,
) -> list[Group]:
    """`sample_groups` for completions of several turns, each with its own environment, if there is one.

    Raises RunError above `max_failures`, and UserError if `reset` adds different things to the prompt of a group.
    """
    if workers is None:
        return sample_groups(engine, prompts, request, advance=advance, look_seconds=look_seconds)
    whole = replace(request, keep=True, stop_texts=workers.environments.stop_texts)
    with opened(engine, whole) as sampling, closing(Conversations(engine, sampling, request, workers)) as under_way:
        under_way.begin(prompts)
        while under_way.num_open:
            advance(under_way.take(look_seconds))
        return under_way.groups


class Conversations:
    """The conversations of one request, over an open sampling."""

    def __init__(self, engine: Engine, sampling: Sampling, request: GroupRequest, workers: ReplyWorkers) -> None:
        self.engine, self.sampling, self.request, self.workers = engine, sampling, request, workers
        self.environments = workers.environments
        self.journal = None if self.environments.reproducible else workers.journal
        self.num_open = 0
        self._groups: list[OpenGroup] = []
        self._failures: dict[str, str] = {}
        self._asking: Asking[OpenRollout] = Asking(workers)
        self._known: list[tuple[OpenRollout, Exchange]] = []  # answers from the journal
        self._sampled: dict[tuple[int, int], OpenRollout] = {}  # those that are being sampled, by draw and sample
        self._next: list[Continuation] = []
        self._oldest, self._waited = engine.weights_version, 0.0

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Ask for the environments of all completions."""
        request = self.request
        for draw, prompt in enumerate(prompts, start=request.first_draw):
            group = OpenGroup(prompt=prompt, draw=draw, request=request)
            known = None if self.journal is None else self.journal.get(request.key.purpose, request.key.step, draw)
            self._groups.append(group)
            for number in range(request.group_size):
                group.members.append(OpenRollout(group=group, sample=request.first_sample + number))
                self.num_open += 1
                self._begin(group.members[-1], () if known is None else known[number])

    def take(self, seconds: float | None = None) -> int:
        """Continue until completions have ended, and return how many; 0 if none has ended in `seconds`.

        Without `seconds` each completion may take as long as the engine's patience, and each reply its own seconds.
        """
        until, before = math.inf if seconds is None else time.monotonic() + seconds, self.num_open
        while self.num_open == before and time.monotonic() <= until:
            self._read_answers(min(PARKED_SECONDS, until - time.monotonic()))
            if self._sampled:
                self._read_sampled(LOOK_SECONDS if self._asking.num_open else seconds)
        return before - self.num_open

    @property
    def groups(self) -> list[Group]:
        return [group.ended() for group in self._groups]

    def close(self) -> None:
        """Close the environments of all completions if some have not ended, as after an error: no caller gets them."""
        if self.num_open:
            self.workers.end([member.live for group in self._groups for member in group.members])

    def _begin(self, conversation: OpenRollout, known: Sequence[Exchange] = ()) -> None:
        """Ask for the environment and its addition, if no journal knows it."""
        conversation.known.extend(known)
        row, seed = conversation.group.prompt.columns, seed_of(self.request.key, conversation.group.draw)

        def begun() -> object:
            return self.workers.made(conversation.live).reset(row, seed)

        if not self._answer_is_known(conversation, ""):
            self._asking.ask(conversation, conversation.live, begun, read=checked_addition)

    def _answer_is_known(self, conversation: OpenRollout, said: str) -> bool:
        known = bool(conversation.known) and conversation.known[0].said == said
        if known:
            self._known.append((conversation, conversation.known.popleft()))
        return known

    def _read_answers(self, seconds: float) -> None:
        """Continue conversations whose replies have arrived; wait for a reply only if nothing is being sampled."""
        known, self._known = self._known, []
        replies = self._asking.answered(0 if self._sampled or known else seconds)
        for conversation, exchange in known + replies:
            self._answered(conversation, exchange)
        if self._next:
            self.sampling.put(self._next)
            self._next = []

    def _read_sampled(self, seconds: float | None) -> None:
        began, patience = time.monotonic(), self.engine.patience_seconds
        done = take_checked(self.sampling, self.engine, seconds, self._oldest)
        self._waited = 0.0 if done else self._waited + time.monotonic() - began
        if self._waited > patience:
            raise SamplingTimeout(engine_name(self.engine), patience, len(self._sampled))
        for sampled in done:
            one = sampled.continuation
            conversation = self._sampled.get((one.draw, one.sample))
            if conversation is None or conversation.asked != one:
                raise RunError(f"{named(self.engine, sampled)}: this continuation was not put, or was returned before.")
            del self._sampled[conversation.place]
            require_alternatives(self.engine, sampled, self.request)
            conversation.add_sampled(sampled)
            self._turn_ended(conversation, sampled)

    def _turn_ended(self, conversation: OpenRollout, sampled: Sampled) -> None:
        if not conversation.stopped and not sampled.ended_by_text:
            return self._end(conversation, Finish.LENGTH)
        if self.environments.only_at_stop_texts and conversation.stopped:
            return self._end(conversation, Finish.STOP)
        said = self._said(conversation)
        if self._answer_is_known(conversation, said):
            return None
        if conversation.environment is None:  # the journal has other turns: start again
            self.sampling.release([sampled])
            group, place = conversation.group, conversation.group.members.index(conversation)
            group.members[place] = OpenRollout(group=group, sample=conversation.sample)
            return self._begin(group.members[place])
        ask = partial(conversation.environment.reply, said)
        return self._asking.ask(conversation, conversation.live, ask, said=said, read=checked_reply)

    def _said(self, conversation: OpenRollout) -> str:
        """The latest turn as text; the first one begins with the prefill."""
        text = self.environments.renderer.said(conversation.pieces[-1].tokens)
        return text if len(conversation.pieces) > 1 else conversation.group.prompt.prefill + text

    def _answered(self, conversation: OpenRollout, exchange: Exchange) -> None:
        conversation.exchanges.append(exchange)
        if conversation.pieces:
            self._replied(conversation, exchange)
        elif all(member.exchanges for member in conversation.group.members):
            self._open(conversation.group)

    def _open(self, group: OpenGroup) -> None:
        """All environments of a group have begun, so what they add to the prompt is known."""
        group.open(self.environments)
        room = require_room_for(group.prompt, self.engine)
        for member in group.members:
            if member.asked is not None or member.rollout is not None:
                continue  # only one that starts again has to be opened
            if member.failure:
                self._end(member, Finish.FAILED)
            else:
                self._sample(member, group.prompt.tokens, min(self.request.max_completion_tokens, room))

    def _replied(self, conversation: OpenRollout, exchange: Exchange) -> None:
        """Continue after the reply, or end."""
        reply, prompt = exchange.reply, conversation.group.prompt
        if exchange.failure:
            return self._end(conversation, Finish.FAILED)
        if reply is None:
            return self._end(conversation, Finish.STOP if conversation.stopped else Finish.ENVIRONMENT)
        conversation.add_reply(self.environments.renderer.said(conversation.pieces[-1].tokens), exchange)
        if reply.done:
            return self._end(conversation, Finish.ENVIRONMENT)
        if len(conversation.turns) >= self.environments.max_turns:
            return self._end(conversation, Finish.TURNS)
        given = self.environments.renderer.reply_tokens(prompt, conversation.said)
        prefix = (*prompt.tokens, *conversation.tokens, *given)
        left = self.request.max_completion_tokens - conversation.num_sampled
        limit = min(left, self.engine.max_positions - len(prefix))
        if limit < 1:
            return self._end(conversation, Finish.LENGTH)
        conversation.add_given(given)
        return self._sample(conversation, prefix, limit)

    def _sample(self, conversation: OpenRollout, prefix: tuple[int, ...], limit: int) -> None:
        draw, sample = conversation.place
        conversation.asked = Continuation(
            prefix=prefix,
            draw=draw,
            sample=sample,
            first_position=conversation.num_sampled,
            limit=limit,
            name=f"prompt {conversation.group.prompt.id}",
        )
        self._sampled[conversation.place] = conversation
        self._next.append(conversation.asked)

    def _end(self, conversation: OpenRollout, finish: Finish) -> None:
        conversation.end(finish, self.engine.tokenizer, self.environments.renderer, self.engine.weights_version)
        self.sampling.release(conversation.pieces[-1:])
        group, key = conversation.group, self.request.key
        if finish.failed:
            self.workers.end([conversation.live])  # it will not be graded
            self._failures[failure_name(key, group.prompt, *conversation.place)] = conversation.failure
            asked_so_far = (self.request.first_draw + len(self._groups)) * self.request.group_size
            require_few_failures(self.workers, self._failures, asked_so_far)
        if self.journal is not None and group.has_ended:
            self.journal.put(key.purpose, key.step, group.draw, [tuple(each.exchanges) for each in group.members])
        self.num_open -= 1  # last: `close` must know that an error above leaves completions that no caller gets


def require_few_failures(workers: ReplyWorkers, failures: Mapping[str, str], num_completions: int) -> None:
    """Raise RunError if more completions failed than the recipe allows, or all; a run keeps the tracebacks.

    `failures` has a traceback by the name of each completion that failed.
    """
    allowed, count = workers.environments.options.max_failures, len(failures)
    if not failures or (count <= allowed * num_completions and count < num_completions):
        return
    limit = f"{count} of {num_completions} completions failed, environment.max_failures = {allowed:g}"
    fault = "all completions failed" if count == num_completions else limit
    remedy = "Correct the environment" + ("" if count == num_completions else ", or raise environment.max_failures")
    text = "\n".join(f"{name}\n{traceback}" for name, traceback in failures.items())
    kept = "" if workers.journal is None else f"  Tracebacks are in {workers.journal.keep_failures(text)}."
    raise RunError(
        f"environment {workers.environments.name}: {fault}.  {remedy}.{kept}  The first failure:\n"
        f"{next(iter(failures.values()))}"
    )


def failure_name(key: StreamKey, prompt: Prompt, draw: int, sample: int) -> str:
    """Names a completion that failed."""
    return f"{key.purpose}, step {key.step}, draw {draw}, sample {sample}, prompt {prompt.id}"
