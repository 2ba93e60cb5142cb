"""Answers given to an environment: `posttrain check-task` replays its attacks through the training loop.

The policy here says the same text in every turn.  Its tokens are the text's bytes, so that no model is needed.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from posttrain.environments.chat_turns import ChatTurns
from posttrain.environments.making import made_once, require_one, stop_texts_of, tools_by_text
from posttrain.environments.protocol import Environment, Environments, Said, SaidAndReply
from posttrain.environments.text_turns import TextTurns
from posttrain.environments.tool_calls import CallReader
from posttrain.environments.tool_environments import CalledTools, ToolsInText
from posttrain.environments.tools import Toolbox
from posttrain.environments.workers import ReplyWorkers
from posttrain.generation.conversations import sample_conversations
from posttrain.generation.engine import Sampling
from posttrain.generation.request import Continuation, GroupRequest, Request, Sampled, StreamKey
from posttrain.options.environment import EnvironmentOptions
from posttrain.options.rollout import SamplingParams
from posttrain.records import Finish, Group, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.models.loading.saving import ExportedWeights

STOP = 256
"""The stop token, after all bytes."""
MOST_BYTES = 1 << 30
TIMES = 4
"""How often a text is said if the environment replies."""
MOST_TURNS = 100
"""The limit, with stop texts."""


def text_bytes(text: Said) -> bytes:
    written = text if isinstance(text, str) else "\n".join(str(message.get("content", "")) for message in text)
    return written.encode("utf-8", "surrogatepass")


class ByteTokenizer:
    """Decodes bytes."""

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return bytes(token for token in tokens if token != STOP).decode("utf-8", "surrogatepass")


class ByteTurns(ChatTurns):
    """Turns without a template: a reply follows what was said."""

    def __init__(self, reader: CallReader | None = None) -> None:
        self.reader = reader

    def opened(self, prompt: Prompt, added: Said) -> Prompt:
        text = text_bytes(added).decode("utf-8", "surrogatepass")
        messages = prompt.messages
        if messages is not None:
            *before, last = messages
            messages = (*before, {**last, "content": last["content"] + text})
        return replace(prompt, text=prompt.text + text, messages=messages)

    def said(self, tokens: Sequence[int]) -> str:
        return ByteTokenizer().decode(tokens)

    def reply_tokens(self, prompt: Prompt, turns: Sequence[SaidAndReply]) -> tuple[int, ...]:
        return tuple(text_bytes(turns[-1].reply))


class BytesInPlace(ByteTurns):
    """The same for tools that answer in the text."""

    messages = TextTurns.messages


class SpokenText(Sampling):
    """Says a text up to each stop text in it, whatever came before, then starts again."""

    def __init__(self, text: str, stop_texts: Sequence[str]) -> None:
        said, ends = text_bytes(text), set[int]()
        for stop in map(text_bytes, stop_texts):
            place = said.find(stop)
            while place >= 0:
                ends.add(place + len(stop))
                place = said.find(stop, place + len(stop))
        self.tokens, self.ends, self.waiting = (*said, STOP), sorted(ends), list[Continuation]()

    def put(self, continuations: Sequence[Continuation]) -> None:
        self.waiting += continuations

    def take(self, seconds: float) -> list[Sampled]:
        done, self.waiting = self.waiting, []
        return [self.turn(each) for each in done]

    def turn(self, asked: Continuation) -> Sampled:
        start = asked.first_position % len(self.tokens)
        following = bisect_right(self.ends, start)
        stopped = following == len(self.ends)
        tokens = self.tokens[start : None if stopped else self.ends[following]]
        return Sampled(
            continuation=asked,
            tokens=tokens,
            logprobs=(0.0,) * len(tokens),
            finish=Finish.STOP if stopped else Finish.LENGTH,
            versions=((0, len(tokens)),),
            ended_by_text=not stopped,
        )

    def release(self, sampled: Iterable[Sampled]) -> None:
        """Does nothing: no caches are kept."""

    def close(self) -> None:
        self.waiting.clear()


class SpeakingEngine:
    """An engine whose policy says one text."""

    reproducible, logprob_gap, suppresses, patience_seconds = True, None, False, math.inf
    stop_ids, max_positions, weights_version = (STOP,), MOST_BYTES, 0

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokenizer = cast("PreTrainedTokenizerBase", ByteTokenizer())

    def load(self, weights: "ExportedWeights", version: int) -> None:
        """Does nothing: there are no weights."""

    def open(self, request: Request) -> Sampling:
        return SpokenText(self.text, request.stop_texts)


def environments_for_text(options: EnvironmentOptions, toolbox: Toolbox, tools_at: Mapping[str, str]) -> Environments:
    """What replies to the text: tools, or the environment that the options name."""
    require_one(options, toolbox, None)
    name, stop_texts, turns = f"tools {', '.join(toolbox.tools)}", tuple[str, ...](), ByteTurns()
    make: Callable[[], Environment]
    if tools_at:
        asked = tools_by_text(tools_at, toolbox)
        make, stop_texts, turns = partial(ToolsInText, asked), tuple(asked), BytesInPlace()
    elif toolbox:
        tokenizer = cast("PreTrainedTokenizerBase", ByteTokenizer())
        reader = CallReader(tokenizer, toolbox.descriptions, opening="", end="")
        make, turns = partial(CalledTools, toolbox.tools, reader), ByteTurns(reader)
    else:
        name, make, example = made_once(options)
        stop_texts = stop_texts_of(example, name)
    return Environments(
        name=name,
        make=make,
        options=options,
        renderer=turns,
        max_turns=MOST_TURNS,
        stop_texts=stop_texts,
        only_at_stop_texts=bool(tools_at),
    )


def spoken(prompt: Prompt, text: str, workers: ReplyWorkers) -> Group:
    """The completion of a policy that says the text again and again."""
    request = GroupRequest(
        group_size=1,
        max_completion_tokens=TIMES * (len(text_bytes(text)) + 1),
        sampling=SamplingParams(),
        key=StreamKey(0, "check-task", 0),
    )
    (group,) = sample_conversations(SpeakingEngine(text), [prompt], request, workers)
    return group
