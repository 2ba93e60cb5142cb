"""Laws of the Countdown grader, over random expressions, random texts, and columns of any library's numbers."""

from collections import Counter
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from posttrain.rewards.countdown import Countdown, Outcome, countdown, countdown_outcome, puzzle
from posttrain.rewards.parsing.arithmetic import literals, postfix, value
from posttrain.rewards.parsing.tags import ANSWER, END_ANSWER, END_THINK, THINK, answer_text
from tests.support.refusals import refused

# An expression tree: a number, a signed tree, or two trees and an operator.
NUMBERS = st.integers(0, 60)
TREES: st.SearchStrategy[Any] = st.recursive(
    NUMBERS,
    lambda trees: st.tuples(st.sampled_from("+-"), trees) | st.tuples(trees, st.sampled_from("+-*/"), trees),
    max_leaves=8,
)

LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2}


def exact(tree: Any) -> Fraction | None:
    """The tree's value in Fractions, by its definition; None where it divides by zero."""
    match tree:
        case int():
            return Fraction(tree)
        case (sign, inner):
            inside = exact(inner)
            return None if inside is None else -inside if sign == "-" else inside
    left, right = exact(tree[0]), exact(tree[2])
    if left is None or right is None or (tree[1] == "/" and right == 0):
        return None
    return {"+": left + right, "-": left - right, "*": left * right}[tree[1]] if tree[1] != "/" else left / right


def leaves(tree: Any) -> list[int]:
    if isinstance(tree, int):
        return [tree]
    return leaves(tree[1]) if len(tree) == 2 else leaves(tree[0]) + leaves(tree[2])


def written(tree: Any, rng: Random, level: int = 0) -> str:
    """The tree with the parentheses it needs and some it does not, zeros and spaces strewn in."""
    match tree:
        case int():
            text, own = "0" * rng.choice([0, 0, 1, 3]) + str(tree), 3
        case (sign, inner):
            text, own = sign + " " * rng.choice([0, 0, 1]) + written(inner, rng, 3), 3
        case (left, operator, right):
            own = LEVEL[operator]
            space = " " * rng.choice([0, 0, 2])
            text = written(left, rng, own) + space + operator + space + written(right, rng, own + 1)
    return f"({text})" if own < level or rng.random() < 0.1 else text


def completion(expression: str) -> str:
    return f"{THINK}{END_THINK}{ANSWER}{expression}{END_ANSWER}"


@given(tree=TREES, seed=st.integers(0, 10**6))
def test_a_written_tree_has_the_value_and_the_numbers_of_the_tree(tree: Any, seed: int) -> None:
    tokens = postfix(written(tree, Random(seed)))
    assert list(map(int, literals(tokens))) == leaves(tree)
    result = value(tokens)
    assert (None if result is None else Fraction(*result)) == exact(tree)


@given(tree=TREES, seed=st.integers(0, 10**6), off=st.integers(-1, 1))
def test_the_verdict_on_the_right_numbers_is_that_of_exact_arithmetic(tree: Any, seed: int, off: int) -> None:
    result = exact(tree)
    target = (0 if result is None else int(result)) + off
    verdict = countdown_outcome(Countdown(tuple(leaves(tree)), target), completion(written(tree, Random(seed))))
    assert verdict == (Outcome.CORRECT if result == target else Outcome.WRONG_VALUE)


@given(tree=TREES, data=st.data())
def test_numbers_are_compared_as_multisets(tree: Any, data: st.DataObject) -> None:
    given_numbers = data.draw(st.lists(st.sampled_from([*leaves(tree), 61]), max_size=10))
    used, available = Counter(leaves(tree)), Counter(given_numbers)
    text = completion(written(tree, Random(0)))
    may = {"all": used == available, "subset": used <= available}
    for rule, legal in may.items():
        wrong = countdown_outcome(Countdown(tuple(given_numbers), 7, rule), text) is Outcome.WRONG_NUMBERS
        assert wrong == (not legal)


@given(tree=TREES, data=st.data(), target=st.integers(-5, 80), rule=st.sampled_from(["all", "subset"]))
def test_the_order_of_the_given_numbers_does_not_matter(tree: Any, data: st.DataObject, target: int, rule: Any) -> None:
    numbers = [*leaves(tree), *data.draw(st.lists(NUMBERS, max_size=1))]
    shuffled = data.draw(st.permutations(numbers))
    text = completion(written(tree, Random(1)))
    verdicts = [countdown_outcome(Countdown(tuple(each), target, rule), text) for each in (numbers, shuffled)]
    assert verdicts[0] == verdicts[1]


PIECES = st.sampled_from([THINK, END_THINK, ANSWER, END_ANSWER, " ", "\n", "x", "1"])


@given(pieces=st.lists(PIECES, max_size=12))
def test_tags_are_read_as_the_definition_says(pieces: list[str]) -> None:
    # The definition on a list of pieces, where tags need no finding.
    tags = [index for index, piece in enumerate(pieces) if piece.startswith("<")]
    expected = None
    if [pieces[index] for index in tags[-4:]] == [THINK, END_THINK, ANSWER, END_ANSWER]:
        _, close, start, end = tags[-4:]
        if not "".join(pieces[close + 1 : start]).strip():
            expected = "".join(pieces[start + 1 : end])
    text = "".join(pieces)
    assert answer_text(text, "last") == expected
    alone = len(tags) == 4 and not "".join(pieces[: tags[0]] + pieces[tags[-1] + 1 :]).strip()
    assert answer_text(text, "strict") == (expected if alone else None)


@given(text=st.text(alphabet=st.characters(), max_size=60), cut_off=st.booleans())
def test_any_text_at_all_gets_some_verdict(text: str, cut_off: bool) -> None:
    puzzle = Countdown((17, 5, 3), 36)
    assert countdown_outcome(puzzle, text, cut_off=cut_off) in Outcome
    assert countdown_outcome(puzzle, completion(text), cut_off=cut_off) in Outcome


@pytest.mark.parametrize(
    "numbers", [np.array([3, 8]), [np.int64(3), np.uint8(8)], (3, torch.tensor(8)), torch.tensor([3, 8])]
)
@pytest.mark.parametrize("target", [11, np.int64(11), torch.tensor(11)])
def test_whole_numbers_of_any_library_make_a_puzzle(numbers: Any, target: Any) -> None:
    made = puzzle(numbers, target, "all")
    assert made == Countdown((3, 8), 11)
    assert {type(each) for each in (*made.numbers, made.target)} == {int}
    text = "<think>3</think>\n<answer>3 + 8</answer>"
    told = countdown(completions=[text], finish_reasons=["stop"], numbers=[numbers], target=[target])
    assert told[0].score == 1.0


NO_NUMBERS: list[Any] = [[True, 8], [np.True_, 8], np.array([True, False]), [torch.tensor(True)], [1.5]]
NO_NUMBERS += [[np.float64(3)], [-1], ["3"], "38", np.array([[3, 8]]), np.array(3), {3, 8}, None]


@pytest.mark.parametrize(
    ("numbers", "target", "says"),
    [
        *((numbers, 11, "numbers = ") for numbers in NO_NUMBERS),
        *(([3, 8], target, "target = ") for target in (True, np.True_, "11", 11.0, np.array([11, 12]), None)),
    ],
)
def test_what_no_answer_could_write_is_no_puzzle(numbers: Any, target: Any, says: str) -> None:
    with refused(says):
        puzzle(numbers, target, "all")
