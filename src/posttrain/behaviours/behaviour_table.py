"""The table of behaviours: names, descriptions and signs.

Rows of kind `prose` are words of models that write English: the five behaviours that a course on GRPO reports of its
runs (self-verification, backtracking, several attempts, explanation, meta-reasoning), words of reflection, and stated
uncertainty.  Rows of kind `search` read the bundled model's notation.  Users add patterns in a recipe or in a YAML file
(`behaviours.patterns`, `behaviours.file`).

Words are not deeds: "let me check" may be followed by no check.  The table measures how often they are written.

The bundled model writes no prose: its tries, steps and verdicts are read as posttrain.rewards.countdown
defines, in linear time; tries beyond the first `MOST_TRIES` are ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import regex

from posttrain.binding import bind
from posttrain.config.recipes import parse_yaml
from posttrain.errors import UserError
from posttrain.options.training import BehaviourOptions, PatternOptions, Within
from posttrain.rewards.countdown import HIT, MISS, MOST_TRIES, Countdown, Try, lines_of_tries, read_try
from posttrain.rewards.parsing.tags import END_THINK
from posttrain.schemas import did_you_mean


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of one behaviour in one completion."""

    count: int
    shown: bool
    """Whether the count is enough to show the behaviour."""


@dataclass(frozen=True, slots=True)
class SearchReading:
    """The tries of a completion, each with the verdict after it, and whether the thinking ends."""

    tries: tuple[Try, ...]
    verdicts: tuple[str, ...]
    """`!`, `.` or nothing, for each try."""
    closed: bool


def read_search(puzzle: Countdown, text: str) -> SearchReading:
    lines = [line for _, line in islice(lines_of_tries(text), MOST_TRIES)]
    verdicts = tuple(line[-1] if line[-1] in HIT + MISS else "" for line in lines)
    return SearchReading(tuple(read_try(puzzle, line) for line in lines), verdicts, END_THINK in text)


def several_tries(search: SearchReading) -> Signs:
    """Tries; shown by two or more."""
    return Signs(len(search.tries), len(search.tries) >= 2)


def right_steps(search: SearchReading) -> Signs:
    """Right steps; shown if there are tries and all of them are right to their end."""
    right = sum(step.right for each in search.tries for step in each.steps)
    return Signs(right, bool(search.tries) and all(each.complete for each in search.tries))


def right_verdicts(search: SearchReading) -> Signs:
    """Verdicts that agree with their try's result; shown if every try has such a verdict."""
    right = sum(
        each.complete and verdict == (HIT if each.hits else MISS)
        for each, verdict in zip(search.tries, search.verdicts, strict=True)
    )
    return Signs(right, 0 < right == len(search.tries))


def checked_again(search: SearchReading) -> Signs:
    """Complete tries that repeat an earlier one; the order of their steps is ignored."""
    made = [frozenset(key(each)) for each in search.tries if each.complete]
    return shown_by_one(len(made) - len(set(made)))


def went_back(search: SearchReading) -> Signs:
    """Tries that keep the first step of the try before and change the rest: a branch is explored again."""
    keys = [key(each) for each in search.tries]
    return shown_by_one(sum(bool(a) and a[:1] == b[:1] and a != b for a, b in pairwise(keys)))


def gave_up(search: SearchReading) -> Signs:
    """Thinking that ends although no try hit the target."""
    return shown_by_one(int(search.closed and bool(search.tries) and not any(each.hits for each in search.tries)))


def key(attempt: Try) -> tuple[tuple[str, int, int], ...]:
    return tuple(step.key for step in attempt.steps)


def shown_by_one(count: int) -> Signs:
    return Signs(count, count >= 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternRow:
    """A behaviour that is found by words."""

    says: str
    patterns: tuple[str, ...]
    at_least: int = 1
    within: Within = "completion"
    kind: str = "prose"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRow:
    """A behaviour that is found in the notation of a Countdown search."""

    says: str
    read: Callable[[SearchReading], Signs]
    kind: str = "search"


Row = PatternRow | SearchRow

TABLE: Mapping[str, Row] = {
    "verification": PatternRow(
        says="checks its own work",
        patterns=(
            r"\b(?:let me|let's|i'll|i will|to|should) (?:just |now )?(?:re|double[- ]?)?(?:check|verify|confirm)\b",
            r"\bdouble[- ]check(?:ing|ed)?\b",
            r"\b(?:checking|verifying|verification|check):",
            r"\b(?:that|this|which|it) (?:checks out|is (?:indeed )?(?:correct|right)|matches|works)\b",
            r"✓",
        ),
    ),
    "backtracking": PatternRow(
        says="goes back on what it wrote",
        patterns=(
            r"\b(?:wait|no|hmm), (?:no|that|this|it)\b",
            r"\boops\b",
            r"\bactually,",
            r"\b(?:that|this|it)(?: is|'s| was) (?:not right|not correct|wrong|incorrect|too (?:big|small|low|high))\b",
            r"\b(?:doesn't|does not|didn't|did not|won't) (?:work|match|add up|equal)\b",
            r"\b(?:start over|go back|scratch that|i made a mistake|on second thought)\b",
        ),
    ),
    "several_attempts": PatternRow(
        says="makes several attempts",
        patterns=(
            r"\b(?:first|second|third|another|next|new|one more) (?:attempt|try|idea|approach|option|way)\b",
            r"\b(?:let me|let's|i'll|i can|could|now) (?:also )?try\b",
            r"\btry(?:ing)? (?:again|another|something else)\b",
            r"\balternatively\b",
            r"\b(?:what if|how about|instead of)\b",
        ),
        at_least=2,
    ),
    "explanation": PatternRow(
        says="gives reasons",
        patterns=(
            r"\b(?:because|therefore|thus|hence|consequently)\b",
            r"\b(?:so that|this means|that means|which means|it follows|the reason|as a result)\b",
            r"\bsince (?:the|we|i|it|this|that|all|both|there|\d{1,9})\b",
        ),
    ),
    "meta_reasoning": PatternRow(
        says="reasons about the problem's own terms",
        patterns=(
            r"\bthe (?:problem|question|task|rules?) (?:says?|states?|asks?|requires?|wants?|gives?|is)\b",
            r"\b(?:i|we) (?:need to|have to|must|(?:am|are) asked to|can only|should) (?:use|make|get|reach|find)\b",
            r"\b(?:each|every|all) (?:of the )?numbers? (?:can|may|must|should|exactly|only|at most|once)\b",
            r"\b(?:the|my) (?:goal|aim|target|constraint|strategy|plan) (?:is|says|here)\b",
        ),
    ),
    "reflection": PatternRow(
        says="words of reflection",
        patterns=(
            r"\bh{1,9}m{1,9}\b",
            r"\b(?:aha|wait|let me think|let me see|let's see|on second thought|i see|i realize|i realise)\b",
            r"\b(?:rethink|reconsider|reflect(?:ing)? on|thinking about (?:it|this))\b",
        ),
    ),
    "uncertainty": PatternRow(
        says="states uncertainty",
        patterns=(
            r"\b(?:maybe|perhaps|possibly|probably)\b",
            r"\b(?:i am|i'm) (?:not (?:sure|certain)|unsure)\b",
            r"\b(?:i think|i guess|i don't know|it seems|it might|it may|could be)\b",
        ),
    ),
    "several_tries": SearchRow(says="two or more tries", read=several_tries),
    "right_steps": SearchRow(says="all steps of all tries right", read=right_steps),
    "right_verdicts": SearchRow(says="every try judged correctly", read=right_verdicts),
    "checked_again": SearchRow(says="a try repeated", read=checked_again),
    "went_back": SearchRow(says="continues from the last try's first step", read=went_back),
    "gave_up": SearchRow(says="answers without a hit", read=gave_up),
}
"""Name -> row.  Names are unique over kinds, because metrics use them."""

KINDS = tuple(dict.fromkeys(row.kind for row in TABLE.values()))


def chosen_rows(options: BehaviourOptions) -> dict[str, Row]:
    """The rows that a recipe measures: the table's in its order, the recipe's patterns, those of `behaviours.file`."""
    unknown = [name for name in options.measure if name not in (*KINDS, *TABLE)]
    if unknown:
        hint = f"{did_you_mean(unknown[0], (*KINDS, *TABLE))} To add one, use behaviours.patterns or behaviours.file."
        raise UserError(f"behaviours.measure: no behaviour `{unknown[0]}`. {hint}")
    rows = {name: row for name, row in TABLE.items() if name in options.measure or row.kind in options.measure}
    places = {"behaviours.patterns": options.patterns}
    if options.file:
        places[options.file] = patterns_in(Path(options.file))
    for where, patterns in places.items():
        for name, content in patterns.items():
            if not name.isidentifier():
                rule = "is not a valid name of a metric.  Use letters, digits and _, such as says_hmm."
                raise UserError(f"{where}: {name}: {rule}")
            if not isinstance(content, Mapping):
                rule = "should be a mapping, such as {any: ['\\bhmm\\b']}."
                raise UserError(f"{where}: {name} = {content!r:.60} {rule}")
            given = bind(PatternOptions, content, where=f"{where}: {name}")
            for text in given.any:  # a wrong one fails here, not in the first step
                try:
                    found = regex.compile(text, regex.IGNORECASE).match("")
                except (regex.error, OverflowError) as error:
                    raise UserError(f"behaviours: {name}: {text!r} is not a regular expression: {error}") from None
                if found is not None:
                    told = "matches an empty text, so it matches everywhere.  Require a character."
                    raise UserError(f"behaviours: {name}: {text!r} {told}")
            if name in TABLE or name in KINDS:
                raise UserError(f"behaviours: `{name}` is already in the table.  Choose another name.")
            if name in rows:
                raise UserError(f"behaviours: `{name}` is in the recipe and in {options.file}.  Remove one of them.")
            says, least, within = given.says or name.replace("_", " "), given.at_least, given.within
            rows[name] = PatternRow(says=says, patterns=given.any, at_least=least, within=within, kind="custom")
    return rows


def patterns_in(file: Path) -> Mapping[str, object]:
    """The patterns of a YAML file.  Raises UserError if it is not one."""
    import yaml

    try:
        found = parse_yaml(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"behaviours.file = {file}: the file does not exist.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"behaviours.file = {file}: is not YAML ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise UserError(f"behaviours.file = {file}: should be a mapping, such as says_hmm: {{any: ['\\bhmm\\b']}}.")
    return found
