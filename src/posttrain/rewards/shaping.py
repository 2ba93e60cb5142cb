"""Rewards that shape: for structure, length, repetition, copying and other behaviour, in addition to the task's reward.

Lengths are counted in tokens of the completion, its stop token included.  Every reward here has a fixed sign and
(except full stops without a limit) bounds, and does nothing to a task's reward: add it with a weight, or gate it
(`gate` in a recipe).

**Known hacks.**  Saying nothing minimises a penalty: pair it with a reward for the task.  A reward for structure is
earned by structure, so without another reward it is learned in place of the task.  A reward for being short within a
group also pays for wrong answers unless it is gated by the task's reward.  Blocklists and refusal phrases are examples,
not a defence: a policy finds other words.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import TypeVar

from posttrain.errors import require
from posttrain.options.bounds import Bounded, PositiveInt
from posttrain.rewards.grading.answers import CUT_OFF, Column, Graded, Texts
from posttrain.rewards.parsing.arithmetic import ALPHABET
from posttrain.rewards.parsing.tags import WHITE_SPACE, answer_lines, answer_text

Ids = Sequence[Sequence[int]]
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class SoftOverlong:
    """In [-1, 0]: 0 up to `max_tokens - cache_tokens`, then linear down to -1 at `max_tokens`, and -1 beyond.

    r(y) = ((L_max - L_cache) - |y|) / L_cache in between.   Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13
    """

    max_tokens: int
    """Length of the full penalty: usually the completion limit."""
    cache_tokens: int
    """Number of tokens before that over which it grows."""

    def __post_init__(self) -> None:
        require(0 < self.cache_tokens <= self.max_tokens, self, "cache_tokens", "must be > 0 and at most max_tokens")

    def __call__(self, /, *, completion_ids: Ids, **_columns: object) -> list[float]:
        start = self.max_tokens - self.cache_tokens
        return [-min(1.0, max(0.0, (len(ids) - start) / self.cache_tokens)) for ids in completion_ids]


@dataclass(frozen=True, kw_only=True)
class CosineLength(Bounded):
    """A correct answer is worth more if it is short, a wrong one loses less if it is long.

        r = w_L + (w_0 - w_L) / 2 · (1 + cos(π · min(|y|, L) / L))     w_0 at length 0, w_L at `max_tokens` and beyond

    Another reward, which the recipe names, decides what is correct: `of: countdown`.
    Yeo et al. 2025, arXiv:2502.03373, eq. 1, with the length clamped.
    """

    max_tokens: PositiveInt
    correct_short: float = 1.0
    correct_long: float = 0.5
    wrong_short: float = -1.0
    wrong_long: float = -0.5
    threshold: float = 0.5
    """A score of the watched reward above this counts as correct."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.correct_short >= self.correct_long, self, "correct_long", "must be at most correct_short")
        require(self.wrong_short <= self.wrong_long, self, "wrong_short", "must be at most wrong_long")

    def value(self, num_tokens: int, correct: bool) -> float:
        at_zero, at_limit = (self.correct_short, self.correct_long) if correct else (self.wrong_short, self.wrong_long)
        share = min(num_tokens, self.max_tokens) / self.max_tokens
        return at_limit + 0.5 * (at_zero - at_limit) * (1 + math.cos(math.pi * share))

    def __call__(
        self, /, *, completion_ids: Ids, base: Sequence[float | None], **_columns: object
    ) -> list[float | None]:
        return [
            None if score is None else self.value(len(ids), score > self.threshold)
            for ids, score in zip(completion_ids, base, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class GroupLength:
    """In [-.5, .5], relative to the group: the shortest correct answer gets .5, the longest -.5, a wrong one at most 0.

        λ = .5 - (|y| - min) / (max - min);   r = λ if correct, else min(0, λ)     0 if all have the same length

    Kimi k1.5, arXiv:2501.12599, section 2.3.3.
    """

    threshold: float = 0.5

    def __call__(
        self, /, *, prompts: Column, completion_ids: Ids, base: Sequence[float | None], **_columns: object
    ) -> list[float | None]:
        keys = [repr(prompt) for prompt in prompts]
        lengths: dict[str, list[int]] = {}
        for key, ids in zip(keys, completion_ids, strict=True):
            lengths.setdefault(key, []).append(len(ids))
        bounds = {key: (min(each), max(each)) for key, each in lengths.items()}
        rows = zip(keys, completion_ids, base, strict=True)
        return [self.value(len(ids), *bounds[key], score) for key, ids, score in rows]

    def value(self, length: int, low: int, high: int, score: float | None) -> float | None:
        if score is None or low == high:
            return None if score is None else 0.0
        share = 0.5 - (length - low) / (high - low)
        return share if score > self.threshold else min(0.0, share)


@dataclass(frozen=True, kw_only=True)
class Repetition(Bounded):
    """In [-1, 0]: minus the share of a completion's n-grams of tokens that occurred in it before.

    r = distinct / all - 1;  0 for completions of fewer than n tokens.
    """

    ngram: PositiveInt = 4

    def __call__(self, /, *, completion_ids: Ids, **_columns: object) -> list[float]:
        grams = [list(ngrams(ids, self.ngram)) for ids in completion_ids]
        return [len(set(each)) / len(each) - 1 if each else 0.0 for each in grams]


def ngrams(items: Sequence[Item], size: int) -> Iterator[tuple[Item, ...]]:
    return zip(*(islice(items, start, None) for start in range(size)), strict=False)


@dataclass(frozen=True, kw_only=True)
class TruncationPenalty:
    """`value` for a completion that the length limit cut off, else 0."""

    value: float = -1.0

    def __call__(self, /, *, finish_reasons: Texts, **_columns: object) -> list[float]:
        return [self.value if finish in CUT_OFF else 0.0 for finish in finish_reasons]


@dataclass(frozen=True, kw_only=True)
class Blocklist:
    """In [-1, 0]: minus 1 if any of the phrases occurs, ignoring case.  An example."""

    phrases: tuple[str, ...]

    def __post_init__(self) -> None:
        require(bool(self.phrases) and all(self.phrases), self, "phrases", "must be one or more non-empty texts")

    def __call__(self, /, *, completions: Texts, **_columns: object) -> list[float]:
        phrases = [phrase.casefold() for phrase in self.phrases]
        return [-float(any(phrase in text.casefold() for phrase in phrases)) for text in completions]


REFUSALS = ("i cannot", "i can't", "i'm sorry", "i am sorry", "as an ai", "i'm unable", "i am unable")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """In [-1, 0]: minus 1 if the first `characters` contain a phrase with which models decline.  An example."""

    characters: int = 200

    def __call__(self, /, *, completions: Texts, **_columns: object) -> list[float]:
        starts = [text[: self.characters].casefold().replace("’", "'") for text in completions]
        return [-float(any(phrase in start for phrase in REFUSALS)) for start in starts]


@dataclass(frozen=True, kw_only=True)
class CopiedPrompt(Bounded):
    """In [-1, 0]: minus the share of a completion's word n-grams that occur in its prompt.  An example."""

    ngram: PositiveInt = 5

    def __call__(self, /, *, prompts: Texts, completions: Texts, **_columns: object) -> list[float]:
        written = [list(ngrams(text.split(), self.ngram)) for text in completions]
        given = [set(ngrams(prompt.split(), self.ngram)) for prompt in prompts]
        rows = zip(written, given, strict=True)
        return [-sum(gram in known for gram in grams) / len(grams) if grams else 0.0 for grams, known in rows]


SCRIPTS = {
    "latin": "A-Za-zªºÀ-ÖØ-öø-ɏḀ-ỿ",
    "greek": "Ͱ-Ͽἀ-῿",
    "cyrillic": "Ѐ-ԯ",
    "arabic": "؀-ۿ",
    "hebrew": "֐-׿",
    "han": "㐀-䶿一-鿿",
    "kana": "぀-ヿ",
    "hangul": "가-힣",
    "devanagari": "ऀ-ॿ",
}
"""Character ranges of scripts; an example, not all of Unicode."""


@dataclass(frozen=True, kw_only=True)
class LanguageDrift:
    """In [-1, 0]: minus the share of letters outside of the wanted scripts.  An example, by Unicode ranges."""

    scripts: tuple[str, ...] = ("latin",)

    def __post_init__(self) -> None:
        known = bool(self.scripts) and all(script in SCRIPTS for script in self.scripts)
        require(known, self, "scripts", f"must be of {', '.join(SCRIPTS)}")

    def __call__(self, /, *, completions: Texts, **_columns: object) -> list[float]:
        wanted = re.compile("[" + "".join(SCRIPTS[script] for script in self.scripts) + "]")
        letters = [[character for character in text if character.isalpha()] for text in completions]
        foreign = [sum(wanted.match(letter) is None for letter in each) for each in letters]
        return [-count / len(each) if each else 0.0 for count, each in zip(foreign, letters, strict=True)]


@dataclass(frozen=True, kw_only=True)
class PeriodCount(Bounded):
    """The number n of ASCII full stops, the course's toy reward.

    r = min(n, most) / most, in [0, 1];  r = n if `most` is null, as in the course.
    """

    most: PositiveInt | None = 10

    def __call__(self, /, *, completions: Texts, **_columns: object) -> list[float]:
        counts = [text.count(".") for text in completions]
        return [float(count) if self.most is None else min(count, self.most) / self.most for count in counts]


class FormatOutcome(StrEnum):
    """Whether the structure is there."""

    FORMATTED = "formatted"
    EXTRA_TEXT = "extra_text"
    """The answer is not purely arithmetic."""
    UNFORMATTED = "unformatted"
    TRUNCATED = "truncated"
    """Unformatted, and the length limit cut the completion off."""


SCORES = dict.fromkeys(FormatOutcome, 0.0) | {FormatOutcome.FORMATTED: 1.0, FormatOutcome.EXTRA_TEXT: 0.5}


def structured(answer: str | None, cut_off: bool, *, arithmetic: bool = False) -> FormatOutcome:
    """Whether there is an answer in the structure and, on request, of arithmetic characters only."""
    if answer is None:
        return FormatOutcome.TRUNCATED if cut_off else FormatOutcome.UNFORMATTED
    plain = not arithmetic or ALPHABET.fullmatch(answer.strip(WHITE_SPACE))
    return FormatOutcome.FORMATTED if plain else FormatOutcome.EXTRA_TEXT


def format_grades(answers: Sequence[str | None], finish_reasons: Texts, *, arithmetic: bool = False) -> list[Graded]:
    rows = zip(answers, finish_reasons, strict=True)
    outcomes = [structured(answer, finish in CUT_OFF, arithmetic=arithmetic) for answer, finish in rows]
    return [Graded(SCORES[each], each) for each in outcomes]


def strict_format(*, completions: Texts, finish_reasons: Texts, **_columns: object) -> list[Graded]:
    """Reward function: 1 if the whole text has the structure of posttrain.rewards.parsing.tags."""
    return format_grades([answer_text(text, "strict") for text in completions], finish_reasons)


def last_format(*, completions: Texts, finish_reasons: Texts, **_columns: object) -> list[Graded]:
    """Reward function: 1 if the text ends in the structure."""
    return format_grades([answer_text(text, "last") for text in completions], finish_reasons)


def line_format(*, completions: Texts, finish_reasons: Texts, **_columns: object) -> list[Graded]:
    """Reward function: 1 if the whole text has the structure with each tag on its own line, as templates show it."""
    return format_grades([answer_lines(text) for text in completions], finish_reasons)


def graded_format(*, completions: Texts, finish_reasons: Texts, **_columns: object) -> list[Graded]:
    """Reward function, the course's: 1 for the structure around arithmetic, 0.5 around other text or none, else 0.

    Arithmetic characters are 0-9, + - * / ( ) and space.  Unlike the widely copied regular expressions for it, it
    allows any white space between the tags and rejects a decimal point, as the Countdown grader does.
    """
    return format_grades([answer_text(text, "strict") for text in completions], finish_reasons, arithmetic=True)
