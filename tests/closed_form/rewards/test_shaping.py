"""Shaping rewards by hand: values, signs, ranges, and what is refused."""

import pytest

from posttrain.errors import UserError
from posttrain.rewards.shaping import (
    Blocklist,
    CopiedPrompt,
    CosineLength,
    GroupLength,
    LanguageDrift,
    PeriodCount,
    Refusal,
    Repetition,
    SoftOverlong,
    TruncationPenalty,
)


def ids(*lengths: int) -> list[list[int]]:
    return [list(range(length)) for length in lengths]


def test_soft_overlong_is_nothing_then_a_line_then_minus_one() -> None:
    reward = SoftOverlong(max_tokens=100, cache_tokens=20)
    assert reward(completion_ids=ids(0, 80, 85, 90, 100, 500)) == pytest.approx([0, 0, -0.25, -0.5, -1, -1])


def test_cosine_length_runs_between_its_four_ends_and_stays_there() -> None:
    reward = CosineLength(max_tokens=100, correct_short=1, correct_long=0.5, wrong_short=-1, wrong_long=-0.5)
    right = reward(completion_ids=ids(0, 50, 100, 400), base=[1.0] * 4)
    wrong = reward(completion_ids=ids(0, 50, 100, 400), base=[0.0] * 4)
    assert right == pytest.approx([1, 0.75, 0.5, 0.5])
    assert wrong == pytest.approx([-1, -0.75, -0.5, -0.5])
    assert reward(completion_ids=ids(5), base=[None]) == [None]


def test_group_length_favours_the_short_among_the_correct_and_never_pays_for_wrong_ones() -> None:
    reward = GroupLength()
    given = {"prompts": ["a", "a", "a", "b", "b"], "completion_ids": ids(10, 20, 30, 7, 7)}
    assert reward(**given, base=[1, 1, 1, 1, 1]) == pytest.approx([0.5, 0, -0.5, 0, 0])
    assert reward(**given, base=[0, 0, 0, 0, None]) == [0, 0, -0.5, 0, None]


def test_repetition_counts_ngrams_that_were_there_before() -> None:
    reward = Repetition(ngram=2)
    assert reward(completion_ids=[[1, 2, 3], [1, 2, 1, 2, 1], [5], []]) == pytest.approx([0, 2 / 4 - 1, 0, 0])
    assert Repetition(ngram=1)(completion_ids=[[7] * 10]) == pytest.approx([-0.9])


def test_truncated_and_period_count() -> None:
    assert TruncationPenalty(value=-0.5)(finish_reasons=["stop", "length"]) == [0, -0.5]
    assert PeriodCount(most=4)(completions=["", "a.", "....", "......", "。"]) == [0, 0.25, 1, 1, 0]
    assert PeriodCount(most=None)(completions=["", "a.", "......", "。"]) == [0, 1, 6, 0]


def test_unwanted_words_refusals_copies_and_scripts() -> None:
    assert Blocklist(phrases=("As An AI",))(completions=["as an ai, no", "fine"]) == [-1, 0]
    assert Refusal()(completions=["I’m sorry, but", "x" * 300 + "I'm sorry", "Sure"]) == [-1, 0, 0]
    prompt = "one two three four"
    copied = CopiedPrompt(ngram=2)(prompts=[prompt] * 3, completions=["one two three", "one two x", "x"])
    assert copied == pytest.approx([-1, -0.5, 0])
    drift = LanguageDrift(scripts=("latin", "greek"))
    assert drift(completions=["αβγ abc 123", "abяя", "", "中文"]) == pytest.approx([0, -0.5, 0, -1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: SoftOverlong(max_tokens=10, cache_tokens=0),
        lambda: SoftOverlong(max_tokens=10, cache_tokens=11),
        lambda: CosineLength(max_tokens=0),
        lambda: CosineLength(max_tokens=10, correct_short=0, correct_long=1),
        lambda: CosineLength(max_tokens=10, wrong_short=0, wrong_long=-1),
        lambda: Repetition(ngram=0),
        lambda: Blocklist(phrases=()),
        lambda: Blocklist(phrases=("",)),
        lambda: CopiedPrompt(ngram=0),
        lambda: LanguageDrift(scripts=("klingon",)),
        lambda: PeriodCount(most=0),
    ],
)
def test_options_without_sense_are_refused(make) -> None:
    with pytest.raises(UserError):
        make()
