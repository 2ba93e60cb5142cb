"""Answers that are said to an environment: `posttrain check-task` replays its attacks through the loop of training.

The policy here says the same text in every turn.  Its tokens are the text's bytes, so that no model is needed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from posttrain.environments.protocol import Said, SaidAndReply
from posttrain.environments.workers import ReplyWorkers
from posttrain.generation.conversations import sample_conversations
from posttrain.generation.engine import Sampling
from posttrain.generation.request import Continuation, GroupRequest, Request, Sampled, StreamKey
from posttrain.options.rollout import SamplingParams
from posttrain.records import Finish, Group, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.models.loading.saving import ExportedWeights

STOP = 256
"""The stop token, behind all bytes."""
MOST_BYTES = 1 << 30


def text_bytes(text: Said) -> bytes:
    written = text if isinstance(text, str) else "\n".join(str(message.get("content", "")) for message in text)
    return written.encode("utf-8", "surrogatepass")


class ByteTokenizer:
    """Decodes bytes."""

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return bytes(token for token in tokens if token != STOP).decode("utf-8", "surrogatepass")


class ByteTurns:
    """A `TurnRenderer` without a template: what is replied stands behind what was said."""

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

    def messages(self, turns: Sequence[SaidAndReply], said: str | None) -> tuple[Mapping[str, object], ...]:
        found: list[Mapping[str, object]] = []
        for turn in turns:
            replies = [{"role": "user", "content": turn.reply}] if isinstance(turn.reply, str) else turn.reply
            found += [{"role": "assistant", "content": turn.said}, *replies]
        return tuple(found if said is None else [*found, {"role": "assistant", "content": said}])


class SpokenText(Sampling):
    """Says a text, whatever came before."""

    def __init__(self, text: str) -> None:
        self.tokens, self.waiting = (*text_bytes(text), STOP), list[Continuation]()

    def put(self, continuations: Sequence[Continuation]) -> None:
        self.waiting += continuations

    def take(self, seconds: float) -> list[Sampled]:
        done, self.waiting = self.waiting, []
        count, logprobs = len(self.tokens), (0.0,) * len(self.tokens)
        versions = ((0, count),)
        return [
            Sampled(continuation=each, tokens=self.tokens, logprobs=logprobs, finish=Finish.STOP, versions=versions)
            for each in done
        ]

    def release(self, sampled: Iterable[Sampled]) -> None:
        """Nothing is kept."""

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
        """It has none."""

    def open(self, request: Request) -> Sampling:
        return SpokenText(self.text)


def spoken(prompt: Prompt, text: str, workers: ReplyWorkers) -> Group:
    """The completion of a policy that says the text in every turn."""
    request = GroupRequest(
        group_size=1, max_completion_tokens=MOST_BYTES, sampling=SamplingParams(), key=StreamKey(0, "check-task", 0)
    )
    (group,) = sample_conversations(SpeakingEngine(text), [prompt], request, workers)
    return group
