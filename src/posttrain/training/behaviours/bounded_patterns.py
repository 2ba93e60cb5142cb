"""Regular expressions that no text can make slow: every repeat has a bound, and the ways through them are counted.

Python tries the ways to match a pattern one after the other, so that `(a+)+b` takes 2^n of them on n times `a`.  What a
model wrote is hostile: a pattern is refused unless the number of ways to go through it from one place of the text,

    ways(character) = 1      ways(xy) = ways(x) · ways(y)      ways(x|y) = ways(x) + ways(y)
    ways(x{m,n}) = Σ_{k=m..n} ways(x)^k                        ways of a look around = ways of what it looks for

is at most `MOST_WAYS`, whatever the text.  Searching is then linear in the text.  An unbounded repeat has no such
number, nor has a reference to an earlier group; both are refused.
"""

import re

from posttrain.errors import UserError

MOST_WAYS = 1_000
"""Ways through one pattern from one place, at most."""
MOST_CHARACTERS = 20_000
"""Characters of a completion that are searched; 400 tokens of the bundled model are about 600."""
QUANTIFIER = re.compile(r"(?:([*+?])|\{([0-9]*)(,?)([0-9]*)\})[?+]?", re.ASCII)
GROUP = re.compile(r"\?(?::|=|!|<=|<!|>|P<\w{1,60}>)")


def bounded_pattern(text: str, *, where: str) -> re.Pattern[str]:
    """The compiled pattern, indifferent to capitals.  Raises UserError where it is none, or may take too long."""
    try:
        compiled = re.compile(text, re.IGNORECASE)
    except (re.error, OverflowError) as error:
        raise UserError(f"{where}: {text!r} is not a regular expression: {error}") from None
    reader = PatternReader(text, where)
    ways = reader.alternatives()
    if ways > MOST_WAYS:
        raise UserError(
            f"{where}: {text!r} can be gone through in {ways} ways from one place of a text, and at most {MOST_WAYS}"
            " are allowed, lest a completion takes minutes.  Make its repeats shorter, or two patterns of it."
        )
    if compiled.match("") is not None:
        raise UserError(f"{where}: {text!r} matches where there is nothing, so that every text is full of it.")
    return compiled


class PatternReader:
    """Counts the ways through a regular expression that compiles, from left to right."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.at = text, where, 0

    def alternatives(self) -> int:
        """Ways through what stands up to the next `)` or the end."""
        ways = self.sequence()
        while self.peek() == "|":
            self.at += 1
            ways += self.sequence()
        return ways

    def sequence(self) -> int:
        """Ways through items one after the other."""
        ways = 1
        while self.peek() not in ("", "|", ")"):
            item = self.item()
            ways = capped(ways * self.repeated(item))
        return ways

    def item(self) -> int:
        """Ways through one character, class or group."""
        character = self.peek()
        self.at += 1
        if character == "\\":
            self.escape()
        elif character == "[":
            self.skip_class()
        elif character == "(":
            return self.group()
        return 1

    def escape(self) -> None:
        """Skip what a backslash escapes; a reference to an earlier group is refused."""
        if self.peek() in "123456789":
            raise self.refused("refers to an earlier group")
        self.at += 1

    def skip_class(self) -> None:
        """Skip a class such as `[^.\\n]`; a `]` that comes first is a character of it."""
        self.at += self.peek() == "^"
        first = self.at
        while self.peek() != "]" or self.at == first:
            self.at += 2 if self.peek() == "\\" else 1
        self.at += 1

    def group(self) -> int:
        """Ways through a group, whose parenthesis is read."""
        if self.peek() == "?":
            kind = GROUP.match(self.text, self.at)
            if kind is None:
                raise self.refused("has a group with flags, a condition, a comment or a reference")
            self.at = kind.end()
        ways = self.alternatives()
        self.at += 1
        return ways

    def repeated(self, ways: int) -> int:
        """Ways through an item and the repeat behind it, if there is one."""
        found = QUANTIFIER.match(self.text, self.at)
        if found is None or found.group(0).startswith("{}"):  # those are characters
            return ways
        self.at = found.end()
        mark, least, comma, most = found.groups()
        if mark == "?":
            return 1 + ways
        if mark is not None or (comma and not most):
            raise self.refused("has a repeat without a bound")
        low, high = int(least or 0), int(most or least)
        if ways == 1:
            return capped(high - low + 1)
        return capped(sum(capped(ways ** min(count, 20)) for count in range(low, min(high, low + 20) + 1)))

    def peek(self) -> str:
        """The next character; nothing at the end."""
        return self.text[self.at : self.at + 1]

    def refused(self, why: str) -> UserError:
        """What is wrong with the pattern, with its remedy."""
        return UserError(
            f"{self.where}: {self.text!r} {why}, which a completion can make slow.  Write repeats with a bound, such as"
            " \\w{1,20} for \\w+ and [^.\\n]{0,60} for .*, and groups as (?:…)."
        )


def capped(ways: int) -> int:
    """A number of ways, without digits that nobody needs."""
    return min(ways, 10 * MOST_WAYS)
