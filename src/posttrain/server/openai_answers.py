"""Completions as OpenAI's clients read them: whole, or chunk by chunk as they are sampled."""

import secrets
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.generation.request import SampledToken
from posttrain.records import Rollout
from posttrain.server.openai_requests import CompletionRequest

Json = dict[str, Any]
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""The text that the bytes of an incomplete character decode to."""
MOST_HELD = 64
"""Maximum number of tokens to wait for the end of a character; more tokens are not one character."""


class TextPieces:
    """The text that each token adds.  A character of several tokens comes with its last token.

    A few tokens are decoded at a time, since some tokenizers omit a space before the first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.context: list[int] = []
        """The tokens of the last piece; the next tokens are decoded after them."""
        self.held: list[int] = []
        """Tokens whose text is still incomplete."""

    def add(self, *tokens: int) -> str:
        self.held += tokens
        piece = self.rest()
        if not piece or (piece.endswith(HALF_CHARACTER) and len(self.held) < MOST_HELD):
            return ""
        self.context, self.held = self.held, []
        return piece

    def rest(self) -> str:
        """The text of tokens that end inside a character."""
        return self._decoded([*self.context, *self.held])[len(self._decoded(self.context)) :] if self.held else ""

    def _decoded(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))


def added_texts(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds to a whole text."""
    pieces = TextPieces(tokenizer)
    texts = [pieces.add(token) for token in tokens]
    if texts:
        texts[-1] += pieces.rest()
    return texts


class Heading:
    """The fields that an answer and all its chunks share."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self.model, self.chat = model, chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def over(self, choices: list[Json], *, chunk: bool = False) -> Json:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def usage(asked: CompletionRequest, num_sampled: int) -> Json:
    num_read = sum(len(prompt.tokens) for prompt in asked.prompts)
    return {"prompt_tokens": num_read, "completion_tokens": num_sampled, "total_tokens": num_read + num_sampled}


def shown_text(rollout: Rollout, asked: CompletionRequest) -> tuple[str, str]:
    """The text before the first stop text, and its finish reason."""
    cuts = [at for at in (rollout.text.find(stop) for stop in asked.stops) if at >= 0]
    reason = "length" if rollout.finish.cut_off and not cuts else "stop"
    return rollout.text[: min(cuts)] if cuts else rollout.text, reason


def whole_choice(rollout: Rollout, asked: CompletionRequest, tokenizer: PreTrainedTokenizerBase) -> Json:
    """A completion that is sent whole."""
    text, reason = shown_text(rollout, asked)
    said = {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
    logprobs = None
    if asked.logprobs is not None:
        tokens, texts = sampled_tokens_of(rollout), added_texts(tokenizer, rollout.sequence.text_tokens)
        shown = num_shown(offsets_of(texts), text, rollout)
        logprobs = answer_logprobs(tokens[:shown], texts[:shown], 0, asked, tokenizer)
    return {**said, "finish_reason": reason, "logprobs": logprobs}


def sampled_tokens_of(rollout: Rollout) -> list[SampledToken]:
    alternatives = rollout.alternatives or ((),) * len(rollout.logprobs)
    return list(map(SampledToken, rollout.sequence.tokens, rollout.logprobs, alternatives))


def offsets_of(texts: Sequence[str], start: int = 0) -> list[int]:
    """Where the text of each token begins."""
    return list(accumulate(map(len, texts[:-1]), initial=start)) if texts else []


def num_shown(offsets: Sequence[int], text: str, rollout: Rollout) -> int:
    """How many tokens begin in a text, which is a whole completion or its part before a stop text."""
    return bisect_left(offsets, len(text)) if len(text) < len(rollout.text) else len(offsets)


def answer_logprobs(
    tokens: Sequence[SampledToken],
    texts: Sequence[str],
    start: int,
    asked: CompletionRequest,
    tokenizer: PreTrainedTokenizerBase,
) -> Json:
    """Log-probs of tokens and of the likeliest alternatives; `start` is the position of the first in its completion.

    They are log μ in nats at the sampling temperature (at 1 for temperature 0), before any cut.
    """
    likeliest = [
        [(str(tokenizer.decode([other])), logprob) for other, logprob in token.alternatives] for token in tokens
    ]
    if asked.chat:
        return {
            "content": [
                {**entry(text, token.logprob), "top_logprobs": [entry(*other) for other in others]}
                for text, token, others in zip(texts, tokens, likeliest, strict=True)
            ],
            "refusal": None,
        }
    top = [
        {**dict(reversed(others)), text: token.logprob}  # of two tokens with one text the likelier stays
        for text, token, others in zip(texts, tokens, likeliest, strict=True)
    ]
    return {
        "tokens": [*texts],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": top if asked.logprobs else None,
        "text_offset": offsets_of(texts, start),
    }


def entry(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}


class StreamedChoice:
    """A completion sent in chunks of whole characters, without text that may become a stop text."""

    def __init__(self, index: int, asked: CompletionRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        self.index, self.asked, self.tokenizer = index, asked, tokenizer
        self.pieces = TextPieces(tokenizer)
        self.text = ""
        """The text so far."""
        self.texts, self.offsets = list[str](), list[int]()
        """What each token added to it, and where; without log-probs, all tokens of a chunk together."""
        self.num_read = self.num_sent = self.num_tokens_sent = 0
        """Number of tokens read, of characters sent, and of tokens whose log-probs were sent."""
        self.begun = self.ended = False

    def grown(self, tokens: Sequence[SampledToken]) -> Json | None:
        """The next chunk of a completion with these tokens so far; None if nothing new can be sent."""
        self._read(tokens)
        sure = self._sure_length()
        return self._chunk(tokens, self.text[:sure], bisect_left(self.offsets, sure)) if sure > self.num_sent else None

    def finished(self, rollout: Rollout) -> Json:
        """The last chunk."""
        self.ended = True
        text, reason = shown_text(rollout, self.asked)
        if self.asked.logprobs is None:
            return self._chunk((), text, 0, reason)
        tokens = sampled_tokens_of(rollout)[: len(rollout.sequence.text_tokens)]
        self._read(tokens)
        if self.texts:
            self.texts[-1] += self.pieces.rest()
        return self._chunk(tokens, text, num_shown(self.offsets, text, rollout), reason)

    def _read(self, tokens: Sequence[SampledToken]) -> None:
        new, self.num_read = [each.token for each in tokens[self.num_read :]], len(tokens)
        for some in [new] if self.asked.logprobs is None else [[token] for token in new]:
            self.offsets.append(len(self.text))
            self.texts.append(self.pieces.add(*some))
            self.text += self.texts[-1]

    def _sure_length(self) -> int:
        """Characters before the first place where a stop text may begin."""
        for start in range(self.num_sent, len(self.text)) if self.asked.stops else ():
            rest = self.text[start:]
            if any(stop.startswith(rest) or rest.startswith(stop) for stop in self.asked.stops):
                return start
        return len(self.text)

    def _chunk(self, tokens: Sequence[SampledToken], text: str, shown: int, reason: str | None = None) -> Json:
        """The chunk with the unsent part of the first `shown` tokens and their text."""
        new, said, logprobs = slice(self.num_tokens_sent, shown), text[self.num_sent :], None
        if self.asked.logprobs is not None:
            start = self.offsets[self.num_tokens_sent] if self.num_tokens_sent < shown else 0
            logprobs = answer_logprobs(tokens[new], self.texts[new], start, self.asked, self.tokenizer)
        role = {} if self.begun else {"role": "assistant"}
        delta = {**role, **({"content": said} if said or role else {})}
        self.begun, self.num_sent, self.num_tokens_sent = True, len(text), shown
        return {
            "index": self.index,
            **({"delta": delta} if self.asked.chat else {"text": said}),
            "finish_reason": reason,
            "logprobs": logprobs,
        }
