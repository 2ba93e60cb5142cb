"""The exact test of two runs on the same problems, against enumeration and against McNemar's exact test."""

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import binomtest

from posttrain.viewer.paired_test import Right, sign_flip_p_value

RIGHTS = st.integers(1, 4).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count)))


@given(st.lists(st.tuples(RIGHTS, RIGHTS), min_size=1, max_size=7))
@settings(max_examples=60)
def test_it_is_the_share_of_all_swaps_that_differ_as_much(pairs: list[tuple[Right, Right]]) -> None:
    differences = [Fraction(*a) - Fraction(*b) for a, b in pairs]
    swaps = [*product((1, -1), repeat=len(pairs))]
    sums = [sum(sign * each for sign, each in zip(signs, differences, strict=True)) for signs in swaps]
    expected = sum(abs(each) >= abs(sum(differences)) for each in sums) / len(swaps)
    assert sign_flip_p_value([a for a, _ in pairs], [b for _, b in pairs]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("only_a", "only_b", "same"), [(8, 2, 5), (3, 3, 0), (0, 6, 10), (30, 12, 100)])
def test_with_one_answer_to_each_problem_it_is_mcnemars_exact_test(only_a: int, only_b: int, same: int) -> None:
    a = [(1, 1)] * only_a + [(0, 1)] * only_b + [(1, 1)] * same
    b = [(0, 1)] * only_a + [(1, 1)] * only_b + [(1, 1)] * same
    expected = binomtest(only_a, only_a + only_b).pvalue
    assert sign_flip_p_value(a, b) == pytest.approx(expected, rel=1e-9)


def test_runs_that_do_not_differ_have_a_p_value_of_one_and_huge_ones_none() -> None:
    assert sign_flip_p_value([(1, 2)] * 3, [(1, 2)] * 3) == 1
    assert sign_flip_p_value([(1, 2), (0, 2)], [(0, 2), (1, 2)]) == 1
    assert sign_flip_p_value([(0, 9973)] * 200, [(9967, 9967)] * 200) is None
