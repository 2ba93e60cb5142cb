"""Beginnings of texts to continue: a toy on which a policy discovers what a reward pays.

**What the prompt looks like.**  The beginning of a sentence, such as `The weather today is`, without a template.

**What earns what.**  The reward `period_count` with `most: null`: the number of full stops in the completion.

**Known hack.**  It is one.  What is of interest is which: shorter sentences, abbreviations, decimal numbers, lists, or
nothing but full stops.  The probe `periods` reports it for held-out completions.  Every ASCII full stop of a text is of
the first of these kinds that fits:

| kind | the full stop | for instance |
|---|---|---|
| run | has another one next to it, nothing or white space between | `...`, `. . .` |
| decimal | is between two digits | `3.5` |
| list | ends a number that counts on: 1, or one more than the list's last | `1. bread 2. milk` |
| abbreviation | ends a known abbreviation, one capital but I, or single letters with stops | `Dr.`, `U.S.`, `p.m.` |
| sentence | comes after a letter, a digit, a closing quote or bracket | `It rained.` |
| other | has nothing of that before it | `, .` |

At most `NEAR` characters on either side are read, and only their form counts: in `I have 1. Then it rained.` the 1
looks like a list's, and a sentence that ends in `etc.` is not counted.

**Where texts come from.**  posttrain.tasks.sentence_grammar writes those that `posttrain sft` learns; nothing is
downloaded, and a model that was trained on other text does not need them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from posttrain.options.task import SentencesOptions
from posttrain.records import Group, Prompt
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.shaping import PeriodCount
from posttrain.tasks.base import DRAWS_PER_STEP, Probe, PromptRenderer, Reading, Task


class SentencesTask(Task):
    """The beginnings of the options, one after the other, again and again; what differs is what is sampled."""

    name = "sentences"

    def __init__(self, options: SentencesOptions, renderer: PromptRenderer) -> None:
        self.options, self.renderer = options, renderer
        self.reward_functions = (
            RewardFunction(name="period_count", call=PeriodCount(most=None), text_only=True, bounded=True),
        )

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        assert draws.stop <= DRAWS_PER_STEP, draws
        openings = self.options.openings
        return [self.prompt(openings[draw % len(openings)], f"train/{draw % len(openings)}") for draw in draws]

    def held_out(self) -> list[Prompt]:
        openings = self.options.held_out_openings
        numbers = range(self.options.held_out_size)
        return [self.prompt(openings[number % len(openings)], f"held-out/{number}") for number in numbers]

    def prompt(self, opening: str, id: str) -> Prompt:
        return self.renderer.render(opening, id=id, prefill="", columns={})

    def probes(self) -> Mapping[str, Probe]:
        kinds = {f"periods_{use}": Reading(f"full stops: {use}") for use in PeriodUse}
        readings = {"periods": Reading("full stops"), **kinds, "words_per_sentence": Reading("words per sentence")}
        return {"periods": Probe(readings=readings, measure=period_readings)}


def period_readings(groups: Sequence[Group]) -> dict[str, float]:
    found = period_strategies([each.text for group in groups for each in group.rollouts])
    kinds = {f"periods_{use}": count for use, count in found.uses.items()}
    return {"periods": found.periods, **kinds, "words_per_sentence": found.words_per_sentence}


ABBREVIATIONS = frozenset(
    {"dr", "mr", "mrs", "ms", "prof", "st", "mt", "jr", "sr", "vs", "etc", "no", "fig", "vol", "gen", "col", "capt"}
    | {"rev", "hon", "inc", "ltd", "co", "corp", "dept", "approx", "est"}
)
"""What may come before a full stop without ending a sentence, in lower case; `No.` is `no.` too."""
DOTTED = re.compile(r"(?<![A-Za-z])[A-Za-z](?:\.[A-Za-z])+\Z|(?<![A-Za-z.])[A-HJ-Z]\Z")
"""Single letters with stops between them, or one capital but I, before a full stop."""
FIRST_OF_TWO = re.compile(r"(?<![A-Za-z])[A-Za-z]\Z")
LAST_WORD = re.compile(r"[A-Za-z]+\Z")
NUMBER = re.compile(r"(?<![\d.])\d{1,2}\Z")
NEAR = 24
"""Characters, so that the time is linear in the text whatever it is."""
CLOSING = "\"')]”’"
WORD = re.compile(r"[A-Za-z0-9]+(?:['’-][A-Za-z]+)*")


class PeriodUse(StrEnum):
    """What a full stop is for."""

    RUN = "run"
    DECIMAL = "decimal"
    LIST = "list"
    ABBREVIATION = "abbreviation"
    SENTENCE = "sentence"
    OTHER = "other"


def period_uses(text: str) -> list[PeriodUse]:
    found: list[PeriodUse] = []
    listed = 0
    for match in re.finditer(r"\.", text):
        before, after = text[max(0, match.start() - NEAR) : match.start()], text[match.end() : match.end() + NEAR]
        found.append(period_use(before, after, listed))
        listed = list_number(before) if found[-1] is PeriodUse.LIST else listed
    return found


def period_use(before: str, after: str, listed: int) -> PeriodUse:
    """What the full stop between two texts is for, where the last item of a list had a number (0: there was none)."""
    if before.rstrip().endswith(".") or after.lstrip().startswith("."):
        return PeriodUse.RUN
    digit_before, digit_after = before[-1:].isdigit(), after[:1].isdigit()
    if digit_before and digit_after:
        return PeriodUse.DECIMAL
    if list_number(before) in (1, listed + 1):
        return PeriodUse.LIST
    if is_abbreviated(before, after):
        return PeriodUse.ABBREVIATION
    if before and (before[-1].isalnum() or before[-1] in CLOSING):
        return PeriodUse.SENTENCE
    return PeriodUse.OTHER


def list_number(before: str) -> int:
    number = NUMBER.search(before)
    return int(number[0]) if number else 0


def is_abbreviated(before: str, after: str) -> bool:
    """Whether what comes before a full stop is cut short by it."""
    if DOTTED.search(before) or (FIRST_OF_TWO.search(before) and re.match(r"[A-Za-z](?![A-Za-z])", after)):
        return True
    word = LAST_WORD.search(before)
    return word is not None and word[0].lower() in ABBREVIATIONS and word[0] != "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodStrategies:
    """How some texts came to their full stops, each number a mean over the texts."""

    periods: float
    """Full stops of a text."""
    uses: dict[PeriodUse, float]
    """Those of each kind; together they are all."""
    words_per_sentence: float
    """Words per sentence that ended, over all texts together; those of a last one that did not end count too.  Where no
    sentence ended, all words."""


def period_strategies(texts: Sequence[str]) -> PeriodStrategies:
    """Count the full stops of some texts, at least one, by what they are for."""
    uses = [use for text in texts for use in period_uses(text)]
    words = sum(len(WORD.findall(text)) for text in texts)
    ended = uses.count(PeriodUse.SENTENCE)
    return PeriodStrategies(
        periods=len(uses) / len(texts),
        uses={use: uses.count(use) / len(texts) for use in PeriodUse},
        words_per_sentence=words / max(ended, 1),
    )
