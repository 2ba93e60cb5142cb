"""What full stops are for: every kind by an example, each full stop of one kind, and the numbers of several texts."""

import pytest

from posttrain.tasks.sentences_task import PeriodUse, period_strategies, period_uses

RUN, DECIMAL, LIST = PeriodUse.RUN, PeriodUse.DECIMAL, PeriodUse.LIST
ABBREVIATION, SENTENCE, OTHER = PeriodUse.ABBREVIATION, PeriodUse.SENTENCE, PeriodUse.OTHER


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("It rained. It was late.", [SENTENCE, SENTENCE]),
        ('he said (or so). "No one." It is 5.', [SENTENCE, SENTENCE, SENTENCE]),
        ("I know that I was I.", [SENTENCE]),
        ("Dr. Lee and Prof. Hill, etc. met", [ABBREVIATION] * 3),
        ("in the U.S. at 5 p.m. sharp", [ABBREVIATION] * 4),
        ("J. Brown, e.g. a man", [ABBREVIATION] * 3),
        # `no` is a word that ends sentences, `No` is cut short.
        ("No. 4 said no.", [ABBREVIATION, SENTENCE]),
        ("a vitamin. A kilogram. Adrift.", [SENTENCE] * 3),
        ("3.5 miles, 0.25 inches", [DECIMAL, DECIMAL]),
        ("We need: 1. bread 2. milk 3. eggs", [LIST, LIST, LIST]),
        # 7 follows no 6: it ends the sentence.
        ("He is 7. It costs 2. Then 3.", [SENTENCE] * 3),
        # A second list begins anew.
        ("1. a 2. b, and 1. c 2. d", [LIST] * 4),
        ("Well... no", [RUN] * 3),
        ("so . . and 3..5", [RUN] * 4),
        (", . and", [OTHER]),
        (".", [OTHER]),
        ("", []),
        ("full stop of another script。", []),
    ],
)
def test_every_full_stop_is_told_by_what_stands_around_it(text: str, uses: list[PeriodUse]) -> None:
    assert period_uses(text) == uses


def test_several_texts_are_counted_together_and_each_full_stop_once() -> None:
    found = period_strategies(["It rained. We ran", "No one came. 3.5 miles. Well..."])
    # Full stops: 1 and 1 + 1 + 1 + 3.  Words: 2 + 2, and 3 + (`3`, `5`, `miles`) + 1.  Sentences that ended: 1 and 2.
    assert found.periods == 7 / 2
    assert found.uses == {RUN: 1.5, DECIMAL: 0.5, LIST: 0.0, ABBREVIATION: 0.0, SENTENCE: 1.5, OTHER: 0.0}
    assert found.words_per_sentence == pytest.approx(11 / 3)
    assert sum(found.uses.values()) == found.periods


def test_without_a_sentence_that_ends_all_words_are_one() -> None:
    assert period_strategies(["three words here"]).words_per_sentence == 3
