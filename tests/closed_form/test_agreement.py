"""Raw agreement and Cohen's kappa, worked out by hand."""

import pytest

from posttrain.commands.collection.verdicts import agreement


def test_kappa_is_what_is_left_of_agreement_beyond_chance() -> None:
    # 20 pairs: both first 8, both second 6, one first and other second 4, the other way round 2.
    one = ["first"] * 8 + ["second"] * 6 + ["first"] * 4 + ["second"] * 2
    other = ["first"] * 8 + ["second"] * 6 + ["second"] * 4 + ["first"] * 2
    found = agreement(one, other)
    # p_o = 14/20 = .7; the first says `first` 12 of 20 times, the other 10: p_e = .6·.5 + .4·.5 = .5; κ = .2/.5 = .4
    assert found.num_common == 20
    assert found.raw == pytest.approx(0.7)
    assert found.kappa == pytest.approx(0.4)


def test_three_verdicts_count_as_three() -> None:
    found = agreement(["first", "first", "second", "tie"], ["first", "second", "tie", "second"])
    # equal in one place of four; p_e = (2·1 + 1·2 + 1·1)/16 = 5/16; κ = (4/16 - 5/16)/(11/16) = -1/11
    assert found.raw == pytest.approx(0.25)
    assert found.kappa == pytest.approx(-1 / 11)


def test_full_agreement_is_one_and_full_disagreement_of_two_verdicts_is_minus_one() -> None:
    assert agreement(["first", "second"], ["first", "second"]).kappa == pytest.approx(1.0)
    assert agreement(["first", "second"], ["second", "first"]).kappa == pytest.approx(-1.0)


def test_kappa_is_undefined_where_chance_explains_all_and_where_nothing_is_common() -> None:
    same = agreement(["tie", "tie"], ["tie", "tie"])
    assert (same.raw, same.kappa) == (1.0, None)
    nothing = agreement([], [])
    assert (nothing.num_common, nothing.raw, nothing.kappa) == (0, None, None)
    # One always says first and the other always second: p_e = 0, so chance explains nothing, and κ = 0.
    assert agreement(["first"] * 3, ["second"] * 3).kappa == pytest.approx(0.0)
