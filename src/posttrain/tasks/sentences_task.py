"""Beginnings of texts to continue: a toy on which a policy discovers what a reward pays.

**What the prompt looks like.**  The beginning of a sentence, such as `The weather today is`, without a template.

**What earns what.**  The reward `period_count` with `most: null`: the number of full stops in the completion.

**Known hack.**  The reward itself is a hack.  The question is which way the policy finds: shorter sentences,
abbreviations, decimal numbers, lists, or only full stops.  The probe `periods` reports it for held-out completions.
Every ASCII full stop of a text is of the first of these kinds that fits:

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

**Where texts come from.**  Those that `posttrain sft` learns are from a small seeded grammar: the weather, opinions,
stories, errands, science.  A text is a few sentences on one subject, of two words to some thirty; its place and its
hero stay the same.  Most full stops end a sentence.  Now and then one belongs to an abbreviation (Dr., U.S., 5 p.m.),
to a decimal number (3.5 miles), to a numbered list (1. bread 2. milk) or to three dots, so a model of such texts has
seen every other use of a full stop, and rarely writes it.  Nothing is read or downloaded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from posttrain.options.task import SentencesOptions
from posttrain.records import Group, Prompt
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.shaping import PeriodCount
from posttrain.tasks.base import DRAWS_PER_STEP, Probe, PromptRenderer, Reading, Task


class SentencesTask(Task):
    """The beginnings in the options, one after the other, repeated; only the sampled completions differ."""

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
    word = LAST_WORD.search(before)
    one_of_two = FIRST_OF_TWO.search(before) and re.match(r"[A-Za-z](?![A-Za-z])", after)
    if DOTTED.search(before) or one_of_two or (word and word[0].lower() in ABBREVIATIONS and word[0] != "no"):
        return PeriodUse.ABBREVIATION
    if before and (before[-1].isalnum() or before[-1] in CLOSING):
        return PeriodUse.SENTENCE
    return PeriodUse.OTHER


def list_number(before: str) -> int:
    number = NUMBER.search(before)
    return int(number[0]) if number else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodStrategies:
    """How some texts came to their full stops, each number a mean over the texts."""

    periods: float
    """Full stops of a text."""
    uses: dict[PeriodUse, float]
    """Full stops of each kind; together they are all."""
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


MIN_SENTENCES, MAX_SENTENCES = 3, 6
SYMBOL = re.compile(r"\{(\w+)\}")
LASTING = frozenset({"hero", "place", "doctor", "thing"})
"""Symbols that stand for the same words throughout a text."""

Alternatives = tuple[str, ...] | Mapping[str, float]
"""What a symbol may become: texts that are equally likely, or texts with weights."""

SUBJECTS: Mapping[str, tuple[Alternatives, Alternatives]] = {
    "weather": (
        (
            "The weather today is {weather}{why}.",
            "The weather today is {weather}, and {forecast}.",
            "The weather today is {weather}.",
            "The weather in {place} is {weather}{why}.",
        ),
        {
            "{When} it will be {weather}{why}.": 3,
            "{Short_weather}": 2,
            "We had {decimal} inches of rain {ago}, and {forecast}.": 0.4,
            "The rain should stop at {hour} {half}, so we can {walk}.": 0.5,
            "People here like it when it is {weather}, because then they can {walk}.": 2,
            "{Title} {name} said that {forecast}.": 0.6,
            "{general}": 2,
        },
    ),
    "opinion": (
        (
            "I think that {claim}.",
            "I think that {claim}, because {reason}.",
            "In my opinion {claim}.",
            "In my opinion {claim}, and {reason}.",
            "In my opinion, {claim}.",
        ),
        {
            "Some people say that {claim}, but I do not agree with them.": 2,
            "I know that {reason}.": 2,
            "{Title} {name} thinks that {claim}.": 0.6,
            "It costs {decimal} dollars more, and {reason}.": 0.4,
            "In the {country} most people believe that {claim}.": 0.4,
            "There are two reasons: 1. {reason} 2. {reason}.": 0.3,
            "{Short_opinion}": 2,
            "{general}": 2,
        },
    ),
    "story": (
        (
            "Once upon a time there was a {hero} who lived near the {place}.",
            "Once upon a time a {hero} went to the {place} to look for a {thing}.",
            "Once upon a time, in a {place} far away, there lived a {hero}.",
        ),
        {
            "The {hero} {deed}, and then the {hero} {deed}.": 3,
            "The {hero} {deed}.": 3,
            "One day the {hero} met {doctor}, who {deed}.": 1,
            "It was {decimal} miles to the {place}, but the {hero} did not stop.": 0.4,
            "The {hero} waited... and nothing happened.": 0.3,
            "When the {hero} came back to the {place}, everyone wanted to see the {thing}.": 2,
            "{Short_story}": 2,
            "{general}": 1,
        },
    ),
    "errand": (
        (
            "I went to the {shop} and bought {goods}, {goods} and {goods}.",
            "I went to the {shop} and bought {goods} for {decimal} dollars.",
            "I went to the {shop} and saw {doctor} there.",
        ),
        {
            "We need three things: 1. {goods} 2. {goods} 3. {goods}.": 0.5,
            "The {shop} opens at {hour} {half} and closes late.": 0.5,
            "I paid {decimal} dollars for {goods}.": 0.6,
            "Then I took {goods} home and made something to eat.": 2,
            "They had no {goods} left, so I bought {goods}, {goods}, etc. for the week.": 0.3,
            "My friend likes {goods} very much, because {reason}.": 2,
            "{Short_errand}": 2,
            "{general}": 1,
        },
    ),
    "science": (
        (
            "The most important thing about {field} is that {reason}.",
            "The most important thing about {field} is {virtue}.",
        ),
        {
            "{doctor} found that {reason}, and wrote a book about it.": 1,
            "The {thing} weighs {decimal} pounds and is {digit}{digit} years old.": 0.5,
            "We learn from {field} that {claim}.": 2,
            "Some ideas, e.g. those of {doctor}, are hard to prove.": 0.3,
            "Nobody knows why{trail}": 0.5,
            "{general}": 3,
        },
    ),
}
"""For each subject, what a text begins with, and what follows."""

RULES: Mapping[str, Alternatives] = {
    "weather": ("cold", "warm", "very warm", "wet and windy", "sunny", "cloudy", "bright and clear", "grey"),
    "why": {"": 3, " because of the wind from the {place}": 1, " for this time of the year": 1},
    "When": ("Tomorrow", "Later in the week", "On Sunday", "By the evening"),
    "ago": ("last night", "this morning", "two days ago"),
    "forecast": ("it may rain later", "the sun will be out soon", "we expect snow in the hills", "the wind will drop"),
    "walk": ("go out for a walk", "work in the garden", "sit by the river"),
    "Short_weather": ("It rained.", "It is dry.", "Take a coat.", "The sky is blue."),
    "Short_opinion": ("I am sure.", "That is true.", "We will see.", "Time will tell."),
    "Short_story": ("Night came.", "It was late.", "The {hero} smiled.", "All was well."),
    "Short_errand": ("It was good.", "I paid.", "The bag was heavy.", "Then I went home."),
    "general": (
        "It is always good to know what others think about it before you say something.",
        "After that there was not much to say, and we talked about other things.",
        "Nobody could have known how it would turn out in the end.",
        "That is how it has been for as long as anyone can remember.",
    ),
    "trail": {".": 4, "...": 1},
    "claim": (
        "the world is better with music",
        "children should read more books",
        "old houses are nicer than new ones",
        "people work too much",
        "a good friend is worth more than gold",
        "the {place} is the best place to live",
        "we should take care of the {place}",
    ),
    "reason": (
        "it makes people happy",
        "everything takes time",
        "nothing is as simple as it looks",
        "it helps us to understand the world",
        "most of us want to live in peace",
        "the truth comes out in the end",
    ),
    "hero": ("fox", "king", "farmer", "little girl", "poor man", "young bird", "wise woman"),
    "place": ("river", "village", "forest", "sea", "mountain", "old town", "lake"),
    "thing": ("ring", "stone", "map", "book", "clock", "silver bell"),
    "deed": (
        "sang a song about the {thing}",
        "found the {thing} under a tree",
        "walked all night through the rain",
        "asked for something to eat",
        "fell asleep by the fire",
        "told a long story about the {place}",
        "gave the {thing} away",
    ),
    "doctor": {"{Title} {name}": 1, "an old friend": 2, "a man from the {place}": 2},
    "Title": ("Dr.", "Mr.", "Mrs.", "Prof."),
    "name": ("Hill", "Brown", "Lee", "Stone", "Green"),
    "country": ("U.S.", "U.K."),
    "shop": ("store", "market", "shop"),
    "goods": ("bread", "milk", "eggs", "apples", "rice", "some cheese", "tea", "a cake"),
    "hour": ("5", "6", "7", "8", "9"),
    "half": ("a.m.", "p.m."),
    "decimal": ("{digit}.{digit}", "{digit}.{digit}", "{digit}.{digit}{digit}"),
    "digit": ("1", "2", "3", "4", "5", "6", "7", "8", "9"),
    "field": ("science", "history", "music", "nature", "mathematics"),
    "virtue": ("to ask good questions", "to look closely and think again", "to tell the truth", "patience"),
}


def grammar_text(rng: Random) -> str:
    """A text on one subject."""
    beginnings, others = SUBJECTS[rng.choice(tuple(SUBJECTS))]
    lasting: dict[str, str] = {}
    sentences = [expanded(beginnings, rng, lasting)]
    for _ in range(rng.randint(MIN_SENTENCES, MAX_SENTENCES) - 1):
        following = expanded(others, rng, lasting)
        if following not in sentences:
            sentences.append(following)
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def expanded(alternatives: Alternatives, rng: Random, lasting: dict[str, str]) -> str:
    """One of the alternatives, its symbols replaced; `lasting` remembers those that stay the same."""

    def replaced(match: re.Match[str]) -> str:
        symbol = match[1]
        if symbol not in LASTING:
            return expanded(RULES[symbol], rng, lasting)
        if symbol not in lasting:
            lasting[symbol] = expanded(RULES[symbol], rng, lasting)
        return lasting[symbol]

    if isinstance(alternatives, tuple):
        return SYMBOL.sub(replaced, rng.choice(alternatives))
    return SYMBOL.sub(replaced, rng.choices(list(alternatives), weights=list(alternatives.values()))[0])
