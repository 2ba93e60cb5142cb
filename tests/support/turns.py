"""Environments for tiny models: what is said and replied are token ids, written as numbers."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from posttrain.environments.protocol import Environment, Environments, Reply, Said, SaidAndReply
from posttrain.environments.workers import ReplyWorkers
from posttrain.generation.conversations import sample_conversations
from posttrain.generation.engine import Engine
from posttrain.generation.request import GroupRequest
from posttrain.options.environment import EnvironmentOptions
from posttrain.records import Group, Prompt
from tests.support.tiny import STOP_IDS, VOCAB


def ids(text: Said) -> tuple[int, ...]:
    assert isinstance(text, str)
    return tuple(map(int, text.split()))


class NumbersAsText:
    """Renders token ids as numbers."""

    def opened(self, prompt: Prompt, added: Said) -> Prompt:
        return replace(prompt, tokens=prompt.tokens + ids(added))

    def said(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens[:-1] if tokens[-1] in STOP_IDS else tokens))

    def reply_tokens(self, prompt: Prompt, turns: Sequence[SaidAndReply]) -> tuple[int, ...]:
        return ids(turns[-1].reply)

    def messages(self, turns: Sequence[SaidAndReply], said: str | None) -> tuple[Mapping[str, object], ...]:
        told = [message for turn in turns for message in (("assistant", turn.said), ("user", turn.reply))]
        last = [] if said is None else [("assistant", said)]
        return tuple({"role": role, "content": content} for role, content in (*told, *last))


@dataclass
class Dice:
    """Replies with up to `most` tokens, a function of seed and what was said; sometimes lets the answer stand."""

    most: int = 3
    ends: float = 0.1
    slow: Callable[[float], float] = lambda share: 0.0
    """From a number in [0, 1) to the seconds of a reply."""
    adds: bool = True
    heard: list[str] = field(default_factory=list)

    def reset(self, row: Mapping[str, object], seed: int) -> str | None:
        self.seed = seed
        return str(6 + seed % 4) if self.adds else None

    def reply(self, said: str) -> Reply | None:
        self.heard.append(said)
        dice = random.Random(f"{self.seed} {self.heard}")
        wait = self.slow(random.random())
        if wait:
            time.sleep(wait)
        if dice.random() < self.ends:
            return None
        content = " ".join(str(dice.randrange(VOCAB)) for _ in range(dice.randrange(self.most + 1)))
        return Reply(content, reward=dice.random(), done=dice.random() < self.ends)


def environments(
    make: Callable[[], Environment],
    *,
    max_turns: int = 6,
    stop_texts: tuple[str, ...] = (),
    reproducible: bool = True,
    only_at_stop_texts: bool = False,
    **options: float,
) -> Environments:
    return Environments(
        name="test",
        make=make,
        options=EnvironmentOptions(**{"seconds": 5.0, "workers": 4, **options}),
        renderer=NumbersAsText(),
        max_turns=max_turns,
        stop_texts=stop_texts,
        reproducible=reproducible,
        only_at_stop_texts=only_at_stop_texts,
    )


def conversations(
    engine: Engine, prompts: Sequence[Prompt], request: GroupRequest, made: Environments, **more: object
) -> list[Group]:
    with ReplyWorkers(made) as workers:
        return sample_conversations(engine, prompts, request, workers, **more)
