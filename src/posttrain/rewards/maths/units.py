"""What may stand behind a number as its unit: a list of what is allowed, since words that change a number are endless.

A line of `UNITS` is one unit with all its names, so that `5 centimeters` is `5 cm`; `COUNTED` is what exercises count.
Plurals are understood.  Names of one or two letters are read as they are written (`M` is a million and no metre),
others in any case.  `square` and `cubic`, powers, `per` and `/` put units together; a digit that is no power makes no
unit, since `5 feet 3 inches` is not 5 feet.  What is missing here is refused, and counts as a right answer that was
missed: add it.
"""

import re

UNITS = """
m meter metre
cm centimeter centimetre
mm millimeter millimetre
km kilometer kilometre
nm nanometer nanometre
µm μm micrometer micrometre micron
in inch inches
ft foot feet
yd yard
mi mile
ly lightyear
g gram gramme gm
mg milligram
kg kilogram kilo
t tonne ton
lb lbs pound
oz ounce
mol mole
s sec second
ms millisecond
min mins minute
h hr hrs hour
d day
wk week
mo month
yr yrs year
decade
century centuries
l L liter litre
ml mL milliliter millilitre
dl dL deciliter
gal gallon
qt quart
pt pint
cup
tsp teaspoon
tbsp tablespoon
ha hectare
acre
N newton
J joule
kJ kilojoule
W watt
kW kilowatt
kWh
V volt
A amp ampere
Ω ohm
Hz hertz
kHz
MHz
GHz
Pa pascal
kPa
atm
bar
cal calorie
kcal
kelvin
C °C celsius
F °F fahrenheit
degree deg degrees °
rad radian
byte
kB KB kilobyte
MB megabyte
GB gigabyte
TB terabyte
bit
dollar usd $
cent ¢
euro eur €
£ gbp
rupee rs inr ₹
yen ¥
yuan rmb
peso
ruble
penny pennies pence
nickel
dime
unit
point
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
"""Names of no more letters are read as they are written."""
PIECE = re.compile(
    r"(?P<word>[^\W\d_²³]+|[°$¢€£¥₹][CF]?(?![^\W\d_]))(?:\s*(?:\^\s*\{?\s*(?P<power>[2-4])\s*\}?|(?P<raised>[²³])))?"
    r"|(?P<joint>[/·*.-])|(?P<other>\S)"
)
LONGEST = 100
"""Characters of a phrase that is looked at."""


def names() -> dict[str, str]:
    """Every name as it may be written, with the one that stands for its unit."""
    found = {"mph": "mi /h", "kmph": "km /h", "kph": "km /h", "kmh": "km /h"}
    for line in UNITS.strip().splitlines():
        first, *others = line.split()
        found |= {name if len(name) <= SHORT else name.casefold(): first for name in (first, *others)}
    return {word: word for word in COUNTED.split()} | found


NAMES = names()


def unit_of(phrase: str) -> str | None:
    """A unit in its plainest form, nothing for nothing, and None for words that are not known as one."""
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
    """What a single word stands for: as it is written, and longer ones in any case and without a plural's ending."""
    if len(word) <= SHORT:
        return NAMES.get(word)
    plain = word.casefold()
    shorter = (plain, plain.removesuffix("s"), plain.removesuffix("es"), plain.removesuffix("ies") + "y")
    return next((NAMES[name] for name in shorter if name in NAMES), None)
