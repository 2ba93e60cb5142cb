"""Rewards for what a completion looks like: its tags, its repetitions and its length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import UserError
from posttrain.rewards.shaping import Repetition, SoftOverlong

OPENING, CLOSING = "<think>", "</think>"
Ids = Sequence[Sequence[int]]


def content_of_completion(completion: Any) -> str:
    """The text of a completion, which may be a list of one message."""
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def think_format_reward(completions: Sequence[Any], **_columns: object) -> list[float]:
    """1 for a completion that begins with `<think>`, has no second one and closes it with `</think>`; else 0."""
    texts = [content_of_completion(each) for each in completions]
    return [
        float(text.startswith(OPENING) and OPENING not in text[len(OPENING) :] and CLOSING in text) for text in texts
    ]


@dataclass(frozen=True)
class RepetitionPenalty:
    """`max_penalty` times the share of a completion's n-grams of tokens that occurred in it before."""

    ngram_size: int
    max_penalty: float
    __name__ = "repetition_penalty_reward"

    def __post_init__(self) -> None:
        if self.max_penalty > 0:
            raise UserError(f"get_repetition_penalty_reward: max_penalty = {self.max_penalty}: must be 0 or below.")

    def __call__(self, completion_ids: Ids, **_columns: object) -> list[float]:
        shares = Repetition(ngram=self.ngram_size)(completion_ids=completion_ids)
        return [-share * self.max_penalty if share else 0.0 for share in shares]


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RepetitionPenalty:
    """A penalty for repeated n-grams; completions of fewer than `ngram_size` tokens get 0."""
    return RepetitionPenalty(ngram_size, max_penalty)


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """0 up to `max_completion_len - soft_punish_cache` tokens, then falling in a line to -1 at the limit, -1 beyond."""

    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Ids, **_columns: object) -> list[float]:
        if self.soft_punish_cache == 0:
            return [-1.0 if len(ids) > self.max_completion_len else 0.0 for ids in completion_ids]
        punish = SoftOverlong(max_tokens=self.max_completion_len, cache_tokens=self.soft_punish_cache)
        return [value or 0.0 for value in punish(completion_ids=completion_ids)]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlongPunishment:
    """DAPO's punishment of completions near their limit; with a cache of 0 only those beyond it."""
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)
