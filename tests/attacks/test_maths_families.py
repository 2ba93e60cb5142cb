"""Families of answers around a right number: what makes another number of it, and what may stand beside it.

Each family is a list of signs or words times the wrappings they come in; a wrong accept and a wrong reject are both
counted, and both have to be none.  All but the last test are decided without a sandbox.
"""

import warnings
from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import pytest

from posttrain.rewards.exact_match import AnswerOutcome
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.math_reward import MathsReward, quickly
from posttrain.rewards.parsing.exact_numbers import COUNTED, UNITS, exact, unit_of
from posttrain.rewards.parsing.tags import last_number
from tests.support.hostile_texts import built, read
from tests.support.timing import idle_milliseconds, milliseconds

QUICK = MathsReward(symbolic=False)
SENTENCES = ("{}", "The answer is {}.", "So we get {}", "**{}**", "$x$ is found:\n{}", "Therefore it is {}, as asked.")
MARKED = ("{}", "${}$", "**{}**", r"\({}\)")
BEFORE = (
    *["≠", "<", ">", "≤", "≥", "x ≥", "x <", "x>=", "x <=", "!=", "≮", "≫", "∉", r"\ne", r"\neq", r"x \geq", r"\le"],
    *["x \\lt", r"\not=", "√", "∛", "∜", "∑", "α", "¬", "½", "²", "x minus", "3 minus", "3 plus", "3 times", "1 over"],
    *["twice", "double", "half of", "the square of", "the square root of", "the reciprocal of", "the opposite of"],
    *["the factorial of", "a multiple of", "the logarithm of", "at most", "at least", "less than", "more than"],
    *["up to"],
    *["over", "under", "not", "isn't", "never", "other than", "10 divided by", "divisible by", "modulo", "mod", "base"],
    *["3 out of", "3 to", "3 or", "3 in", "3 of", "3 :", "between 3 and", "(3,", "[3,", "{1, 3,", "non-negative"],
    *["nonnegative", "moins", "menos", "负", "マイナス", "max", "10 choose", "3 mod", "three and", "three over"],
)
BEHIND = (
    *["!!", "!!!", "⅓", "½", "²", "₃", "‰", "万", "億", "th", "i", "k", "M", "x", "^2", "π", "θ"],
    *[" i", " k", " M", " B", " x", " n", " y.", " π", " θ", " √2", " squared", " cubed", " factorial", " halves"],
    *[" half", " thirds", " fourths", " fifths", " sixths", " sevenths", " eighths", " ninths", " tenths", " twelfths"],
    *[" fifteenths", " twentieths", " hundredths", " thousandths", " hundred", " thousand", " million", " billions"],
    *[" dozen", " score", " gross", " lakh", " mil", " bn", " millones", " Millionen", " plus x", " minus x"],
    *[" times x"],
    *[" over x", " divided by x", " mod x", " to the power of x", " choose x", " or more", " or less", " or fewer"],
    *[" at most", " at least", " and a half", " and one third", " is wrong", " is not right", " isn't it", " < x"],
    *[" ≤ x"],
    *[" > x", " ≠ x", r" \le x", r" \ne x", " + x", r" \cdot x", " per mille", " doubled", " halved", " inverted"],
    *[" pi", " reciprocal", " below zero", " degrees below zero", "°C below zero", " under zero", " inverse", " tau"],
)
BESIDE_BEFORE = (
    *["", "about ", "x = ", "x ≈ ", "=> ", "-> ", "<b>", "a total of ", "increased by ", "$", "€", "(", "1, 2, "],
)
BESIDE_BEHIND = (
    *["", ".", "!", "°", r"^\circ", " each", " in all", " left", " a day", " p.m.", " is the answer"],
    *[" and that is all"],
    *["<|im_end|>", "</b>", "\n\nOr more simply: yes", " months", " seconds", "cm", "km/h", " cm²", " cm^2", " m/s"],
    *[" €"],
)


def number_of(text: str) -> Fraction | None:
    """The value of a text's last number."""
    found = last_number(text)
    value = None if found is None else exact(found)
    return None if value is None else value.numbers[0]


def test_signs_and_words_before_and_behind_a_number_that_make_another_of_it_are_seen() -> None:
    texts = [
        sentence.format(f"{before} {mark.format(5)}")
        for sentence, before, mark in product(SENTENCES, BEFORE, MARKED)
        if not (sentence == "**{}**" and "*" in mark)
    ]
    texts += [sentence.format(f"5{behind}") for sentence, behind in product(SENTENCES, BEHIND)]
    assert [text for text in texts if number_of(text) is not None] == []


def test_what_may_stand_beside_a_number_hides_none() -> None:
    texts = [f"It is {before}5{behind}" for before, behind in product(BESIDE_BEFORE, BESIDE_BEHIND)]
    assert [text for text in texts if number_of(text) != 5] == []


@pytest.mark.parametrize("word", ["negative ", "neg ", "neg. ", "minus ", "Negative ", "-", "− ", r"\text{negative } "])
@pytest.mark.parametrize(("number", "value"), [("5", 5), ("5 1/2", Fraction(11, 2)), ("0.5", Fraction(1, 2))])
def test_a_sign_in_words_is_a_sign_in_prose_and_in_a_box(word: str, number: str, value: Fraction) -> None:
    for sentence in SENTENCES[1:]:
        assert number_of(sentence.format(word + number)) == -value, sentence
    assert paid(rf"\boxed{{{word}{number}}}", str(-value))
    assert not paid(rf"\boxed{{{word}{number}}}", str(value))


def test_a_mixed_number_is_its_sum() -> None:
    for whole, top, bottom in product((1, 5, 12), (1, 2), (3, 7)):
        value, text = whole + Fraction(top, bottom), f"{whole} {top}/{bottom}"
        assert number_of(f"It is {text} inches") == value
        assert paid(rf"\boxed{{{text}}}", str(value))
        assert not paid(rf"\boxed{{{text}}}", f"{top}/{bottom}")
    assert number_of("3 and 1/2") is None
    assert not paid(r"\boxed{5 7/2}", "17/2")  # no mixed number is written so
    assert not paid(r"\boxed{1\frac{-1}{2}}", "1/2")
    # And a sign of subtraction is no sign of the last number.
    for left, minus in product(("3", "x", "(x + 3)", "2}"), ("-", " - ", " -", "−", " minus ")):
        assert number_of(f"so it is {left}{minus}10") is None, (left, minus)


def paid(text: str, gold: object) -> bool:
    """Whether a completion is paid without a sandbox."""
    return grade_quickly([text], [gold]) == [1.0]


def grade_quickly(texts: list[str], golds: list[object]) -> list[float | None]:
    """Scores that no sandbox is needed for."""
    given = QUICK(completions=texts, finish_reasons=["stop"] * len(texts), answer=golds)
    return [each.score for each in given if isinstance(each, Graded)]


def symbolically(rows: list[tuple[str, str]]) -> list[float | None]:
    """Scores of boxed answers to these golds, in a sandbox where one is needed."""
    boxed = [rf"\boxed{{{answer}}}" for _, answer in rows]
    golds = [gold for gold, _ in rows]
    given = MathsReward(cpu_seconds=2.0)(completions=boxed, finish_reasons=["stop"] * len(rows), answer=golds)
    return [each.score if isinstance(each, Graded) else None for each in given]


SET = (" {}", r"\text{{ {}}}", r"~\text{{ {}s}}", r"\,\text{{{}.}}")
NO_UNITS = (
    *["fifths", "twentieths", "doubled", "tripled", "inverse", "reciprocal", "gross", "score", "thirty", "opposite"],
    *["backwards", "nope", "nicht", "million", "dozen", "k", "M", "K", "e", "i", "x", "T", "squared", "more"],
    *["less", "or 6", "wrong", "pi", "half", "to 6", "and", "per", "-", "no cm", "cm or 6", "negative", "halves of cm"],
)


def test_words_beside_a_boxed_number_are_a_unit_of_the_list_or_are_not_paid() -> None:
    texts = [rf"\boxed{{5{shape.format(word)}}}" for shape, word in product(SET, NO_UNITS)]
    assert [text for text in texts if paid(text, "5")] == []


def test_every_unit_of_the_list_is_paid_in_every_way_it_is_written() -> None:
    names = [*UNITS.replace("|", " ").split(), *(set(COUNTED.split()) - {"square"})]
    names += ["square feet", "cm^2", "miles per hour", "km/h", "ft-lb", "boxes of pencils"]
    texts = [rf"\boxed{{5\text{{ {name}}}}}" for name in names]
    missed = [text for text, score in zip(texts, grade_quickly(texts, ["5"] * len(texts)), strict=True) if score != 1.0]
    assert missed == []
    assert not paid(r"\boxed{6\text{ cm}}", "5")


PERCENTS = ("5 percent", r"5 \text{ percent}", r"5\text{ per cent}", "5 pct", r"5\%", "5%", r"$5$\%")


def test_percent_in_words_is_a_percent_sign_a_hundredth_on_both_sides() -> None:
    for percent in PERCENTS:
        for other in (*PERCENTS, "0.05", "1/20"):
            assert paid(rf"\boxed{{{percent}}}", other), (percent, other)
            assert paid(rf"\boxed{{{other}}}", percent), (percent, other)
        assert not paid(rf"\boxed{{{percent}}}", "5")
        assert not paid(r"\boxed{5}", percent)
        assert number_of(f"So it is {percent} of all") == Fraction(1, 20), percent
    assert number_of("So it is **5** percent.") == Fraction(1, 20)


@pytest.mark.parametrize("unit", ["sq. ft", "sq. ft.", "sq.ft.", "Sq. feet", "ft^2", "square ft."])
def test_abbreviations_may_have_a_dot(unit: str) -> None:
    for gold in ("12", r"12 \text{ square feet}"):
        assert paid(rf"\boxed{{12 \text{{ {unit}}}}}", gold)
        assert paid(rf"\boxed{{12 {unit}}}", gold)
    assert paid(r"\boxed{12 \text{ cu. in.}}", "12 cubic inches")


def test_units_are_compared_by_what_they_mean() -> None:
    assert unit_of("square centimeters") == unit_of("cm^2") == unit_of("cm²") == "cm^2"
    assert unit_of("miles per hour") == unit_of("mi/h") == unit_of("mph")
    for gold, answer, right in (
        (r"5 \text{ cm}", "5 centimeters", True),
        ("5 cm", r"5\text{ m}", False),
        (r"12 \text{ cm}^2", r"12 \text{ cm}^3", False),
        (r"12 \text{ cm}^2", r"12\text{ square cm}", True),
        ("5 widgets", "5", True),
        ("5 widgets", r"5\text{ widgets}", True),
        ("5 million", "5000000", True),
        ("5 million", "5", False),
        ("5 dozen", "5", False),
        ("5 dozen", "60", True),
        (r"\text{5 cm}", "5", True),
        ("3m", "3", False),
    ):
        assert paid(rf"\boxed{{{answer}}}", gold) == right, (gold, answer)


COMPOUND = (
    *["{} point 3", "{} feet 3 inches", r"{}\text{{ minutes }}3\text{{ seconds}}", "{} dollars 3 cents", "{} feet 4"],
    *[r"{} \text{{minutes}} 30 \text{{seconds}}", r"\text{{{} ft 3 in}}", "{} ft. 3 in.", "{} m 3 cm", "{} hr 30 min"],
    *["{} feet3", "{} feet - 3 inches", "{} feet + 3 inches", "{} feet (3 inches)", r"{}\text{{ feet }}3", "{} cm 2"],
)


@pytest.mark.filterwarnings("ignore:reward maths")  # of rows that are not scored
def test_units_with_numbers_between_them_are_none() -> None:
    """What stands behind the first number is no unit of it, neither in an answer nor in the row's own."""
    assert [each for each in COMPOUND if paid(rf"\boxed{{{each.format(5)}}}", "5")] == []
    assert [each for each in COMPOUND if paid(r"\boxed{5}", each.format(5))] == []
    rows = [("5", each.format(5)) for each in COMPOUND] + [(each.format(5), "5") for each in COMPOUND]
    assert [row for row, score in zip(rows, symbolically(rows), strict=True) if score == 1.0] == []


@pytest.mark.filterwarnings("ignore:reward maths")  # of rows that are not scored
def test_a_compound_of_units_is_compared_as_text() -> None:
    gold = "1 hour 30 minutes"
    assert paid(r"\boxed{1 \text{ hour } 30 \text{ minutes}}", gold)
    assert paid(r"\boxed{\text{1 hour 30 minutes}}", gold)
    assert paid(r"\boxed{1 Hour 30 minutes}", r"1\text{ hour }30\text{ minutes}")
    assert not paid(r"\boxed{1 hour 31 minutes}", gold)
    assert not paid(r"\boxed{3 x}", r"3x + 2\sqrt{2}")
    assert not paid(r"\boxed{3}", r"3x + 2\sqrt{2}")
    assert not paid(r"\boxed{3}", r"3x + \sqrt{y}")


APART = (r"\quad", r"\qquad", "~", "$", r"\ ", r"\,", r"\;", r"\!", r"\:", " ", r"\left", r"\displaystyle", r"\$")


def test_digits_that_are_set_apart_are_no_number_but_in_groups_of_three() -> None:
    for left, right in (("1", "2"), ("12", "34"), ("1", "2345"), ("1234", "567"), ("0.1", "2")):
        for between in APART:
            assert not paid(rf"\boxed{{{left}{between}{right}}}", left + right), (left, between, right)
    for between in (r"\,", r"\ ", "~", r"\;", "{,}", r"\!,", ","):
        assert paid(rf"\boxed{{1{between}234}}", "1234")
        assert paid(rf"\boxed{{12{between}345{between}678.5}}", "12345678.5")


def test_names_are_read_in_order() -> None:
    for name in ("cat", "ABC", "New York", "abc", r"\text{stop}", "listen", "Paris"):
        bare = name.removeprefix(r"\text{").removesuffix("}")
        for shape in ("{}", r"\text{{{}}}", r"\textbf{{{}}}", "${}$", "({})"):
            assert paid(rf"\boxed{{{shape.format(bare)}}}", name), (name, shape)
            assert not paid(rf"\boxed{{{shape.format(bare[::-1])}}}", name), (name, shape)
            assert not paid(rf"\boxed{{{shape.format(bare[1:] + bare[:1])}}}", name), (name, shape)


STRANGE = "≃≄≐⇒→∘⊕∨∧¬∼∝∴†″∆∇∫∏∀∃∥⊥⊂…•¿§©éßøñ中かд\u200b\u2060\u00ad"
HIDING = (
    *[r"5\mathrm{e}", "5^{T}", "5^T", r"5^{\top}", r"\phantom{5}", r"5\phantom{6}", r"\vspace{5}", "5 more", "5 less"],
    *["5 pure", "5 prime", "5 multiple", "5 gain", "5 loss", "5th", "5 bc", "5 cube", "5 per", "5c", "5o", "5 square"],
)
NEAR = (
    *[(r"\sqrt2", r"\sqrt2+10^{-30}"), (r"\pi", r"\frac{\ln(640320^3+744)}{\sqrt{163}}"), ("x+1", "x+1+10^{-30}")],
    *[(r"(\sqrt2,1)", r"(\sqrt2+10^{-30},1)"), (r"\{\sqrt2,1\}", r"\{\sqrt2+10^{-30},1\}")],
    ("5", r"\sqrt{25+10^{-40}}"),
    *[(r"\begin{pmatrix}\sqrt2\\1\end{pmatrix}", r"\begin{pmatrix}\sqrt2+10^{-30}\\1\end{pmatrix}")],
)
HONEST = (
    *[(r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"), (r"\sin(1)", r"\cos(\frac{\pi}{2}-1)"), ("e^2", r"\mathrm{e}^2")],
    *[(r"\sqrt{2}", r"\sqrt{2}\text{ cm}"), (r"\sqrt{2}", r"\sqrt{2}\;"), (r"\{\sqrt2,1\}", r"\{1,\sqrt2\}")],
    *[("xy", "yx"), (r"\sin x", r"\operatorname{sin} x"), (r"10^{40}\pi", r"\pi 10^{40}")],
)


def test_what_math_verify_passes_over_is_not_paid_and_nearly_equal_is_not_equal() -> None:
    strange = [
        (gold, form.format(gold, sign)) for gold in ("5", r"\sqrt2") for sign in STRANGE for form in ("{}{} 6", "{}{}")
    ]
    wrong = [*strange, *(("5", answer) for answer in HIDING), (r"\sqrt2", r"\sqrt2^{T}"), *NEAR]
    rows = [*wrong, *HONEST]
    assert [row for row, score in zip(rows, symbolically(rows), strict=True) if score != float(row in HONEST)] == []


ITEMS = read("maths.jsonl")
PAID = {"right": 1.0, "wrong": 0.0, "unscored": None}


def text_of(item: dict[str, Any]) -> str:
    return built(item["text"]) if "text" in item else rf"\boxed{{{built(item['answer'])}}}"


def shown(item: dict[str, Any], graded: object) -> str:
    return f"{item['kind']}: gold {item['gold']!r}, {text_of(item)[:100]!r} should be {item['verdict']}, is {graded}"


def test_what_deserves_pay_is_paid_and_nothing_else_is() -> None:
    golds = [item["gold"] or None for item in ITEMS]
    finish = [item.get("finish", "stop") for item in ITEMS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the row that is not scored
        grades = MathsReward(cpu_seconds=1.0)(
            completions=[text_of(item) for item in ITEMS], finish_reasons=finish, answer=golds
        )
    assert all(isinstance(graded, Graded) for graded in grades)  # the sandbox lost nothing
    rows = [(item, graded) for item, graded in zip(ITEMS, grades, strict=True) if isinstance(graded, Graded)]
    # A right answer that is known to be missed has a reason in its line; when it is found the line has to go.
    wanted = [0.0 if "missed" in item else PAID[item["verdict"]] for item in ITEMS]
    mistaken = [shown(*row) for row, paid in zip(rows, wanted, strict=True) if row[1].score != paid]
    assert mistaken == []
    refused = {AnswerOutcome.REFUSED, AnswerOutcome.TIME_LIMIT, AnswerOutcome.UNREADABLE}
    honest = [item for item, graded in rows if item["verdict"] == "right" and graded.outcome in refused]
    assert all("missed" in item for item in honest)


def test_what_is_read_outside_of_the_sandbox_is_read_in_two_milliseconds_per_kilobyte() -> None:
    for item in ITEMS:
        text = text_of(item)
        kilobytes = len(text.encode("utf-8", "surrogatepass")) / 1000
        read = partial(quickly, text, item.get("finish") == "length", item["gold"])
        allowed = 2 * max(1.0, kilobytes)
        in_time = milliseconds(read) < allowed or any(idle_milliseconds(read) < allowed for _ in range(20))
        assert in_time, shown(item, "slow")  # once is enough: something else may have come between


def test_the_corpus_has_many_answers_of_every_kind() -> None:
    verdicts = Counter(item["verdict"] for item in ITEMS)
    assert verdicts["right"] >= 250
    assert verdicts["wrong"] >= 400
    assert sum("missed" in item for item in ITEMS) <= 22
    keys = [(item["gold"], text_of(item), item.get("finish")) for item in ITEMS]
    assert len(set(keys)) == len(keys)
