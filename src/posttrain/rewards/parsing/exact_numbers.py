r"""Exact values of short mathematical answers: numbers, tuples, sets and lists of numbers, also with units or in words.

**Numbers** are integers (`12`, `-3`, `1,234`), decimals (`.5`, `1.50`), fractions (`3/4`, `\frac{3}{4}`), mixed numbers
(`1\frac{1}{2}`, `1 1/2`), percents (`50%` is 1/2), and these in `(…)`, `[…]`, `{…}` or separated by commas.  Currency
signs, `\left`, `\,` and the like count as blanks, and separate digits unless these come in groups of three.

**With units**: `5 \text{ cm}`, `60 km/h`, `90^\circ`, `\text{5}`, `negative 5` and `5 million`.  A unit must be listed
below; with another word there is no value, unless a gold answer has that word.  `percent` is a percent sign, on either
side: `5 percent` is 1/20, and neither 5 nor the answer to a row whose gold answer is 5.

The list says what is allowed, since words that change a number are endless.  `UNITS` separates units by `|`; the names
of one unit are synonyms, so that `5 centimeters` is `5 cm`.  `COUNTED` is what exercises count.  Plurals are known.
Names of one or two letters are case-sensitive (`M` is a million, not a metre), others are not.  `square` and `cubic`,
powers, `per` and `/` combine units; a digit that is not a power makes no unit, since `5 feet 3 inches` is not 5 feet.
A missing unit costs a right answer: add it.

Everything else is not read here.  Time is linear in the text.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

MAX_CHARACTERS = 1000
MAX_DIGITS = 300
"""Longest number that is read, so that no comparison is costly."""

Shape = Literal["value", "tuple", "set", "list", "closed", "left_open", "right_open"]


@dataclass(frozen=True, slots=True)
class ExactValue:
    """An answer's value: one number, or several in a shape."""

    shape: Shape
    numbers: tuple[Fraction, ...]

    def same(self, other: "ExactValue") -> bool:
        if self.shape != other.shape:
            return False
        if self.shape in ("set", "list"):
            return sorted(self.numbers) == sorted(other.numbers)
        return self.numbers == other.numbers


PASSED_OVER = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|\\[,;!: ]|\\?\$|[~€£¥₹]")
"""Counts as a blank: `1\\quad2` is not 12."""
GAP = r"(?:\\[,;!: ]|~|\{,\}|\\!,|,\\!)"
GROUPED = re.compile(
    rf"(?<![\d.,])\d{{1,3}}(?:{GAP}\d{{3}})+(?!\d)|(?<=\d)\.\d{{3}}(?:{GAP}\d{{3}})*{GAP}\d{{1,3}}(?!\d)", re.ASCII
)
"""Digits in threes, with spaces or `{,}` between them."""
NO_DIGIT = re.compile(r"[^\d.]", re.ASCII)
DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
DECIMAL = rf"(?:{DIGITS}(?:\.\d*)?|\.\d+)"
BRACED = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|(\d)\s*(\d))")
NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)?\s*(?P<frac>\\[dt]?frac\s*(?:\{{\s*-?\d+\s*\}}\s*\{{\s*-?\d+\s*\}}|\d\s*\d))"
    rf"|(?P<ones>\d+)\s+(?P<part>[1-9]\d*)\s*/\s*(?P<of>[1-9]\d*)"
    rf"|(?P<top>{DECIMAL})\s*/\s*(?P<bottom>{DECIMAL})|(?P<decimal>{DECIMAL}))\s*(?P<percent>\\?%)?",
    re.ASCII,
)
BRACKETS: dict[tuple[str, str], Shape] = {
    ("(", ")"): "tuple",
    ("[", "]"): "closed",
    ("(", "]"): "left_open",
    ("[", ")"): "right_open",
    ("{", "}"): "set",
}


def exact(text: str) -> ExactValue | None:
    """The value of an answer, if it is one of these."""
    if len(text) > MAX_CHARACTERS:
        return None
    plain = text
    if "\\" in text or "~" in text or "{" in text:
        plain = GROUPED.sub(lambda group: NO_DIGIT.sub("", group[0]), text)
    plain = PASSED_OVER.sub(" ", plain).strip()
    if plain.endswith(".") and not plain.endswith(".."):
        plain = plain[:-1].strip()
    bare = plain
    while len(bare) >= 2 and bare[0] == "{" and bare[-1] == "}" and bare[-2:] != "\\}":
        bare = bare[1:-1].strip()
    value = exact_number(bare)
    if value is not None:
        return ExactValue("value", (value,))
    plain = plain.replace("\\{", "{").replace("\\}", "}")
    shape = BRACKETS.get((plain[:1], plain[-1:])) if len(plain) >= 2 else None
    inside = plain[1:-1] if shape else plain
    parts = [exact_number(part) for part in separated(inside)]
    if not parts or any(part is None for part in parts):
        return None
    found = tuple(part for part in parts if part is not None)
    if shape is None:
        return ExactValue("list", found)
    if len(found) == 1 and shape == "tuple":
        return ExactValue("value", found)
    return ExactValue(shape, tuple(sorted(set(found))) if shape == "set" else found)


def separated(text: str) -> list[str]:
    """The parts between commas with spaces or semicolons, else between any commas."""
    spaced = [part.strip() for part in re.split(r",\s+|;", text)]
    return spaced if len(spaced) > 1 else [part.strip() for part in text.split(",")]


def exact_number(text: str) -> Fraction | None:
    """The value of one number, if the text is one."""
    if len(text) > MAX_DIGITS:
        return None
    found = NUMBER.fullmatch(text.strip())
    if found is None:
        return None
    if found["frac"]:
        braced = BRACED.fullmatch(found["frac"])
        assert braced is not None, text
        top, bottom = int(braced[1] or braced[3]), int(braced[2] or braced[4])
        if bottom == 0 or (found["whole"] and (top < 0 or bottom < 0)):
            return None
        value = Fraction(int(found["whole"] or 0)) + Fraction(top, bottom)
    elif found["ones"]:
        if int(found["part"]) >= int(found["of"]):
            return None
        value = int(found["ones"]) + Fraction(int(found["part"]), int(found["of"]))
    elif found["top"]:
        bottom_value = decimal(found["bottom"])
        if bottom_value == 0:
            return None
        value = decimal(found["top"]) / bottom_value
    else:
        value = decimal(found["decimal"])
    if found["percent"]:
        value /= 100
    return -value if found["sign"] == "-" else value


def decimal(text: str) -> Fraction:
    digits = text.replace(",", "").rstrip(".") or "0"
    return Fraction(int(digits) if digits.isdecimal() else digits)  # from text it is slow


UNITS = """
m meter metre | cm centimeter centimetre | mm millimeter millimetre | km kilometer kilometre |
nm nanometer nanometre | µm μm micrometer micrometre micron | in inch inches | ft foot feet | yd yard | mi mile |
ly lightyear | g gram gramme gm | mg milligram | kg kilogram kilo | t tonne ton | lb lbs pound | oz ounce |
mol mole | s sec second | ms millisecond | min mins minute | h hr hrs hour | d day | wk week | mo month |
yr yrs year | decade | century centuries | l L liter litre | ml mL milliliter millilitre | dl dL deciliter |
gal gallon | qt quart | pt pint | cup | tsp teaspoon | tbsp tablespoon | ha hectare | acre | N newton | J joule |
kJ kilojoule | W watt | kW kilowatt | kWh | V volt | A amp ampere | Ω ohm | Hz hertz | kHz | MHz | GHz |
Pa pascal | kPa | atm | bar | cal calorie | kcal | kelvin | C °C celsius | F °F fahrenheit |
degree deg degrees ° | rad radian | byte | kB KB kilobyte | MB megabyte | GB gigabyte | TB terabyte | bit |
dollar usd $ | cent ¢ | euro eur € | £ gbp | rupee rs inr ₹ | yen ¥ | yuan rmb | peso | ruble |
penny pennies pence | nickel | dime | unit | point
"""
COUNTED = """
adult animal apple apartment arrangement article attempt bag ball balloon banana basket bead bean bear bed bee
beetle bicycle big bike bill bird black block blouse blue boat bone book bottle bouquet bowl box boy bracelet branch
brick bright brother brown brownie bucket bug building bulb bus butterfly button cabinet cage cake calf camera camp can
candle candy car card carrot carton cat cell chair chapter cherry chicken child children chip chocolate choice circle
city class classmate classroom clean clip closed coat coin cold color colour combination cone container cookie corner
country course cow crab crate crayon crew cupcake customer cycle dark deck deer desk diagonal diamond different digit
dirty distinct dog doll donut door doughnut dress drink duck ear edge egg element elephant employee empty engineer
envelope episode event exam face family farm farmer fence figure file finger fish flag flight floor flower fly folder
fork fresh friend frog fruit full function game gift girl glass goal goat good grade grape graph gray green grey group
guest guitar hat head healthy heart heavy hen hole home horse house item jar jelly job joke key kid king kitten knife
label lamb lamp lap large leaf leaves leg lemon lesson letter level light lily line lion list little lizard loaf loaves
lollipop long lost machine magazine magnet man mango map marble mark marker match mask meal medal meeting member men
message method mice mirror mistake molecule monkey mouse mouth movie muffin mug nail napkin neighbor new nice night note
notebook number nut object old open orange other outcome outfit owl ox oxen pack package packet page painting pair pan
panda panel paper part passenger patient pattern peach pear pen pencil penguin people permutation person phone photo
picture pie piece pig pigeon pill pillow pin pink pizza place plane planet plant plate platter player plum pocket poem
pole pool position possible post pot potato present prize problem program puppy purple puzzle queen question rabbit race
rat rectangle red remaining report ribbon ring ripe road rock roll room rope rose round row ruler sandwich scarf school
seashell seat seed segment sentence sequence set shape sheep sheet shelf shell shelves ship shirt shoe shop short sick
side similar sister skirt slice small snack snail snake sock soldier solid solution song special spider spoon spot
square squirrel stage stair stamp star state station step stick sticker stone store story strawberry string student
subject subset subscriber sweater symbol table tablet tail tall tank task taxi teacher team teeth tent test thing
ticket tie tile time tin tip tomato tool tooth total toy track train tray tree triangle trip trophy truck tub tulip
turkey turn turtle umbrella unique used valid value van vase vegetable vehicle vertex vertices video violet visit
visitor volunteer vote wall watch watermelon way weapon wheel white whole window wing wolf wolves woman women word
worker yarn yellow young zebra
"""
BEFORE = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
BEHIND = {"squared": "^2", "cubed": "^3"}
POWER = {"²": "2", "³": "3"}
SHORT = 2
"""Names up to this length are case-sensitive."""
PIECE = re.compile(
    r"(?P<word>[^\W\d_²³]+|[°$¢€£¥₹][CF]?(?![^\W\d_]))(?:\s*(?:\^\s*\{?\s*(?P<power>[2-4])\s*\}?|(?P<raised>[²³])))?"
    r"|(?P<joint>[/·*.-])|(?P<other>\S)"
)
LONGEST = 100
NAMES = {word: word for word in COUNTED.split()}
NAMES |= {"mph": "mi /h", "kmph": "km /h", "kph": "km /h", "kmh": "km /h"}
NAMES |= {
    name if len(name) <= SHORT else name.casefold(): synonyms.split()[0]
    for synonyms in UNITS.split("|")
    for name in synonyms.split()
}


def unit_of(phrase: str) -> str | None:
    """A unit in its plainest form, "" for an empty phrase, None for words that are not a known unit."""
    parts: list[str] = []
    pending, below = "", False
    if len(phrase) > LONGEST:
        return None
    phrase = phrase.strip(" .()")
    for piece in PIECE.finditer(phrase):
        word = piece["word"]
        if word is None:
            abbreviated = bool(pending) and piece["joint"] == "."  # `sq. ft`
            if piece["other"] or not (parts or abbreviated or piece["joint"] == "/"):
                return None
            below = below or piece["joint"] == "/"
        elif word.casefold() in BEFORE:
            pending = BEFORE[word.casefold()]
        elif word.casefold() in BEHIND and parts:
            parts[-1] += BEHIND[word.casefold()]
        elif word.casefold() == "per":
            below = True
        elif word.casefold() != "of" or not parts:
            name = one_unit(word)
            if name is None:
                return None
            power = piece["power"] or POWER.get(piece["raised"] or "", "")
            parts.append(f"{'/' if below else ''}{name}{pending or (f'^{power}' if power else '')}")
            pending, below = "", False
    return None if pending or below or (phrase and not parts) else " ".join(parts)


def one_unit(word: str) -> str | None:
    if len(word) <= SHORT:
        return NAMES.get(word)
    plain = word.casefold()
    shorter = (plain, plain.removesuffix("s"), plain.removesuffix("es"), plain.removesuffix("ies") + "y")
    return next((NAMES[name] for name in shorter if name in NAMES), None)


SET_AS_TEXT = r"\\(?:text|mathrm|textrm|mbox|textbf|mathbf|textit|mathit|textsf|texttt|emph)\s*\{"
WORDS = re.compile(SET_AS_TEXT + r"([^{}]*)\}")
DEGREE = re.compile(r"\^?\s*\\degree(?![a-zA-Z])|\^\s*(?:\\circ|\{\s*\\circ\s*\})")
SIGN_IN_WORDS = re.compile(r"\s*(?:negative|minus|neg\b\.?)\s+(?=[\d.\\$(])", re.IGNORECASE)
SPACES = re.compile(r"\\[,;:! ]|~")
UNIT_START = re.compile(rf"(?P<unit>{SET_AS_TEXT}|(?<!\\)[°¢])|\\[a-zA-Z]+|(?P<letter>[^\W\d_])")
COEFFICIENT = re.compile(r"[\d)}][a-zA-Z]\s*$", re.ASCII)
"""`3m`: as a gold answer three times a letter."""
UNKNOWN_UNIT = re.compile(
    rf"[\d)}}%]\$?(?:\s+[a-zA-Z]{{3,}}[a-zA-Z ]*\}}?|(?:(?:\s|~|\\[,;:! ])*{SET_AS_TEXT}[^{{}}\d]*\}})+)[\s.$]*$",
    re.ASCII,
)
"""Words after a gold answer's number that may be an unlisted unit; `3x + \\sqrt{y}` has none."""
ANOTHER_NUMBER = re.compile(r"(?<![\^_{\d])\d")
"""A digit after words that is not a power: `5 feet 3 inches`."""
PERCENT = re.compile(r"(?:per\s?cent\b|pct\b\.?|\\?%)\s*", re.IGNORECASE)
NUMBERS = re.compile(r"\d[\d.,/]*")
MULTIPLIERS = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
NO_UNIT = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|quadrillion|dozen|lakh|crore|score|gross|half|halve|third|quarter"
    r"|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|twentie|hundred|thousand|million)th|over|times"
    r"|more|less|fewer|least|most|or|and|not|plus|minus|root|mod|base|factorial|k|bn|mil|mio)s?\b",
    re.IGNORECASE,
)
"""Words of a gold answer that change the number before them, which is then not the answer without them."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An exact value and its unit."""

    value: ExactValue
    unit: str = ""
    known: bool = True
    """Whether the unit is listed, so that an answer may add it."""

    @property
    def has_another_number(self) -> bool:
        return not self.known and ANOTHER_NUMBER.search(self.unit) is not None

    def same(self, answer: "Measured") -> bool | None:
        """Whether an answer says the same; None if its words are unknown and not these."""
        if answer.unit and answer.unit != self.unit:
            if not answer.known:
                return None
            if self.unit:
                return False
        return self.value.same(answer.value)


def measured_value(text: str) -> Measured | None:
    """The value of an answer with its unit, if it is one of these."""
    value = exact(text)
    if value is not None:
        return Measured(value)
    if len(text) > MAX_CHARACTERS:
        return None
    plain = text.strip().strip("$").strip()
    whole = WORDS.fullmatch(plain)
    plain = SIGN_IN_WORDS.sub("-", whole[1] if whole else WORDS.sub(sign_as_text, plain, count=1), count=1)
    return value_with_unit(DEGREE.sub(" ° ", plain))


def sign_as_text(found: "re.Match[str]") -> str:
    return f"{found[1]} " if found[1].strip().casefold() in ("negative", "minus", "neg", "neg.") else found[0]


def value_with_unit(plain: str) -> Measured | None:
    """The value before the first letter outside of a command, and the unit after it."""
    at = next((found.start() for found in UNIT_START.finditer(plain) if found.lastgroup), len(plain))
    value = exact(plain[:at])
    if value is None:
        return None
    phrase = SPACES.sub(" ", WORDS.sub(r" \1 ", plain[at:])).strip()
    percent = PERCENT.match(phrase)
    if percent is not None and value.shape == "value" and "%" not in plain[:at]:
        value, phrase = ExactValue("value", (value.numbers[0] / 100,)), phrase[percent.end() :]
    if phrase.casefold() in MULTIPLIERS and value.shape == "value":
        return Measured(ExactValue("value", (value.numbers[0] * MULTIPLIERS[phrase.casefold()],)))
    unit = unit_of(phrase)
    if unit is not None:
        return Measured(value, unit)
    return Measured(value, " ".join(phrase.casefold().split()), known=False)


@lru_cache(maxsize=4096)
def gold_value(gold: str) -> Measured | None:
    """A gold answer's value.  Its unit need not be listed, but words that change the number are not a unit."""
    found = measured_value(gold)
    if found is None or not found.unit:
        return found
    if NO_UNIT.search(found.unit) or COEFFICIENT.search(gold) or found.has_another_number:
        return None
    return found if found.known or UNKNOWN_UNIT.search(gold) else None


def plain_words(text: str) -> str:
    return " ".join(SPACES.sub(" ", WORDS.sub(r" \1 ", text.strip().strip("$"))).split())


def is_compound(text: str) -> bool:
    """Whether a text is several numbers with listed units between them: `1 hour 30 minutes`, `5 feet 4`."""
    sign, *phrases = NUMBERS.split(plain_words(text))
    return (
        len(phrases) > 1
        and sign in ("", "-")
        and all(unit_of(phrase) for phrase in phrases[:-1])
        and (unit_of(phrases[-1]) is not None)
    )
