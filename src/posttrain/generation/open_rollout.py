"""A completion of several turns that is in progress, and the group that it belongs to."""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from posttrain.environments.protocol import Environment, Environments, Reply, SaidAndReply, TurnRenderer
from posttrain.environments.workers import Exchange, LiveEnvironment
from posttrain.errors import UserError
from posttrain.generation.request import Continuation, GroupRequest, Sampled, StreamKey
from posttrain.records import Finish, Group, Prompt, Rollout, TokenSequence
from posttrain.turns import Turn

SEED_BITS = 31
"""Bits of an environment's seed: every library accepts this many."""


def seed_of(key: StreamKey, draw: int) -> int:
    """The seed of a prompt's environments, a hash of the run's seed, the purpose, the step and the draw."""
    name = repr(("environment", key.seed, key.purpose, key.step, draw)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> (64 - SEED_BITS)


@dataclass(slots=True, eq=False, kw_only=True)
class OpenGroup:
    """The completions of a prompt, not all of which have ended."""

    prompt: Prompt
    """With what `reset` added, once all environments have begun."""
    draw: int
    request: GroupRequest
    members: "list[OpenRollout]" = field(default_factory=list)
    added: Reply | None = None
    is_open: bool = False

    def open(self, environments: Environments) -> None:
        """The prompt with what `reset` added, the same for all.  Raises UserError if it is not."""
        begun = [(member.sample, member.exchanges[0].reply) for member in self.members if not member.failure]
        expected = self.added if self.is_open else (begun[0][1] if begun else None)
        other = next((each for each in begun if each[1] != expected), None)
        if other is not None:
            first, then = (None if each is None else each.content for each in (expected, other[1]))
            fault = f"reset added {first!r:.60} to prompt {self.prompt.id}, and {then!r:.60} in sample {other[0]}"
            remedy = "Completions of a prompt are compared, so add the same: a function of `row` and `seed`"
            raise UserError(f"environment {environments.name}: {fault}.  {remedy}.")
        if not self.is_open and expected is not None and expected.content:
            self.prompt = environments.renderer.opened(self.prompt, expected.content)
        self.added, self.is_open = expected, True

    @property
    def has_ended(self) -> bool:
        return all(member.rollout is not None for member in self.members)

    def ended(self) -> Group:
        """The group, once all of its completions have ended."""
        rollouts = tuple(member.rollout for member in self.members if member.rollout is not None)
        assert len(rollouts) == len(self.members), "all have ended"
        return Group(prompt=self.prompt, draw=self.draw, rollouts=rollouts)


@dataclass(slots=True, eq=False, kw_only=True)
class OpenRollout:
    """One completion, turn by turn."""

    group: OpenGroup
    sample: int
    live: LiveEnvironment = field(default_factory=LiveEnvironment)
    known: deque[Exchange] = field(default_factory=deque)
    """What a journal has of it."""
    exchanges: list[Exchange] = field(default_factory=list)
    asked: Continuation | None = None
    """What is being sampled of it."""
    tokens: list[int] = field(default_factory=list)
    marks: list[bool] = field(default_factory=list)
    """Whether each was sampled."""
    pieces: list[Sampled] = field(default_factory=list)
    """Turn by turn."""
    said: list[SaidAndReply] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    rollout: Rollout | None = None
    """Once it has ended."""

    @property
    def place(self) -> tuple[int, int]:
        return self.group.draw, self.sample

    @property
    def environment(self) -> Environment | None:
        """None before it was made, and where all replies are from a journal."""
        return self.live.made

    @property
    def failure(self) -> str:
        return self.exchanges[-1].failure if self.exchanges else ""

    @property
    def num_sampled(self) -> int:
        return sum(len(piece.tokens) for piece in self.pieces)

    @property
    def stopped(self) -> bool:
        """Whether a stop token ended the latest turn."""
        return bool(self.pieces) and self.pieces[-1].finish.has_stop_token

    def add_sampled(self, sampled: Sampled) -> None:
        self.pieces.append(sampled)
        self.tokens += sampled.tokens
        self.marks += (True,) * len(sampled.tokens)

    def add_reply(self, said: str, exchange: Exchange) -> None:
        reply = exchange.reply
        assert reply is not None
        self.said.append(SaidAndReply(said, reply.content, self.stopped))
        self.turns.append(Turn(end=len(self.tokens), reward=reply.reward, seconds=exchange.seconds, calls=reply.calls))

    def add_given(self, tokens: Sequence[int]) -> None:
        self.turns[-1] = replace(self.turns[-1], num_given=len(tokens))
        self.tokens += tokens
        self.marks += (False,) * len(tokens)

    def end(self, finish: Finish, tokenizer: PreTrainedTokenizerBase, renderer: TurnRenderer, version: int) -> None:
        """Make its rollout; `version` is that of the weights where nothing was sampled."""
        sequence = self._sequence(finish, version)
        if self.group.prompt.messages is not None:
            unanswered = self.pieces and len(self.turns) < len(self.pieces)
            said = renderer.said(self.pieces[-1].tokens) if unanswered else None
            sequence = replace(sequence, messages=renderer.messages(self.said, said))
        kept = [each for piece in self.pieces for each in piece.alternatives or ()]
        self.rollout = Rollout(
            sample=self.sample,
            sequence=sequence,
            text=str(tokenizer.decode(list(sequence.text_tokens), skip_special_tokens=False)),
            alternatives=tuple(kept) if self.group.request.keep_alternatives else None,
            turns=tuple(self.turns),
            failure=self.failure,
            in_conversation=True,
            environment=self.environment,
        )

    def _sequence(self, finish: Finish, version: int) -> TokenSequence:
        cut = self.pieces[0].cut_logprobs if self.pieces else None
        spans: list[tuple[int, int]] = []
        start = 0
        for piece in self.pieces:
            for own, count in piece.versions:
                if not spans or spans[-1][1] != own:
                    spans.append((start, own))
                start += count
        return TokenSequence(
            tokens=tuple(self.tokens),
            sampled=tuple(self.marks),
            logprobs=tuple(each for piece in self.pieces for each in piece.logprobs),
            cut_logprobs=None if cut is None else tuple(x for piece in self.pieces for x in piece.cut_logprobs or ()),
            versions=tuple(spans) or ((0, version),),
            finish=finish,
            ends_in_stop_token=self.stopped and not finish.has_stop_token,
        )
