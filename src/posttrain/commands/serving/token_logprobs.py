"""The log-probs of sampled tokens as OpenAI's clients read them, each beside the text that its token adds."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.records import Rollout

HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of a character that is not complete are decoded to."""


def openai_logprobs(rollout: Rollout, length: int, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> dict[str, Any]:
    """Tokens and log-probs of the first `length` characters of a completion; its stop token is none of its text.

    They are log μ in nats at the temperature that was sampled with (at 1 for temperature 0), before any cut.
    """
    tokens = rollout.sequence.text_tokens
    texts = added_texts(tokenizer, tokens)
    offsets = list(accumulate(map(len, texts[:-1]), initial=0)) if texts else []
    shown = sum(offset < length for offset in offsets) if length < len(rollout.text) else len(texts)
    kept = list(zip(texts[:shown], rollout.logprobs[:shown], strict=True))
    if not chat:
        return {
            "tokens": [text for text, _ in kept],
            "token_logprobs": [logprob for _, logprob in kept],
            "top_logprobs": None,
            "text_offset": offsets[:shown],
        }
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8")), "top_logprobs": []}
        for text, logprob in kept
    ]
    return {"content": content, "refusal": None}


def added_texts(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens comes with its last.

    A few tokens are decoded at a time, since some tokenizers leave out a space before the first.
    """
    texts: list[str] = []
    start = read = 0
    for end in range(1, len(tokens) + 1):
        before, now = decoded_token(tokenizer, tokens[start:read]), decoded_token(tokenizer, tokens[start:end])
        whole = len(now) > len(before) and not now.endswith(HALF_CHARACTER)
        texts.append(now[len(before) :] if whole or end == len(tokens) else "")
        if whole:
            start, read = read, end
    return texts


def decoded_token(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False))
