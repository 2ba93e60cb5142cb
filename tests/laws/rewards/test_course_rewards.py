"""Reward functions as courses write them, called there by position, are called here by the names that they have."""

from threading import Lock
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.rewards.grading.calls import private_copy
from tests.support.refusals import refused
from tests.support.reward_rows import CHAT, graded, group, scores


def test_a_function_of_one_completion_is_given_its_text_and_the_columns_that_it_names() -> None:
    def graded_one(completion: str, nums: list[int], target: int) -> float:
        return float(completion == f"{nums[0]}+{nums[1]}={target}")

    rows = [
        group(["1+2=3", "no"], columns={"nums": [1, 2], "target": 3}),
        group(["2+2=4", "1+2=3"], columns={"nums": [2, 2], "target": 4}),
    ]
    assert scores(rows, graded_one) == [[1, 0], [1, 0]]
    assert scores([group(["1+2=3"], columns={"numbers": (1, 2), "target": 3})], graded_one) == [[1]]
    with refused("'nums'"):
        graded([group(["1"], columns={"target": 3})], graded_one)


def test_its_text_is_the_graded_one_with_the_prefill_and_of_a_conversation_too() -> None:
    def begins(completion: str) -> float:
        return float(completion.startswith("<think>"))

    assert scores([group(["a"], prefill="<think>"), group(["b"], messages=CHAT)], begins) == [[1], [0]]


def test_a_column_of_that_name_does_not_take_the_place_of_what_was_sampled() -> None:
    def same(completion: str) -> float:
        return float(completion == "sampled")

    assert scores([group(["sampled"], columns={"completion": "of the row"})], same) == [[1]]


@pytest.mark.parametrize("name", ["texts", "responses"])
def test_a_function_of_all_texts_may_return_a_tensor(name: str) -> None:
    seen: list[list[str]] = []

    def periods_of_texts(texts: list[str]) -> torch.Tensor:
        seen.append(texts)
        return torch.tensor([text.count(".") for text in texts], dtype=torch.float32)

    def periods_of_responses(responses: list[str]) -> torch.Tensor:
        return periods_of_texts(responses)

    call = periods_of_texts if name == "texts" else periods_of_responses
    rows = [group(["a.", ".."], prefill="."), group(["b", "..."], messages=CHAT)]
    assert scores(rows, call) == [[2, 3], [0, 3]]
    assert seen == [[".a.", "...", "b", "..."]]  # one call


def test_a_column_called_responses_is_that_column() -> None:
    def both(completions: list[str], responses: list[str]) -> list[float]:
        return [float(mine == given) for mine, given in zip(completions, responses, strict=True)]

    assert scores([group(["x", "y"], columns={"responses": "x"})], both) == [[1, 0]]


def test_a_name_of_all_completions_beside_that_of_one_is_a_function_of_lists() -> None:
    def mixed(completions: list[str], completion: str | None = None) -> list[float]:
        assert completion is None
        return [1.0] * len(completions)

    assert scores([group(["x", "y"])], mixed) == [[1, 1]]


class Puzzle:
    """A column's object of the user's own."""

    def __init__(self) -> None:
        self.numbers = [3, 8]


def test_objects_of_a_users_own_are_copied_where_that_works() -> None:
    mine, space, proxy, lock = Puzzle(), SimpleNamespace(numbers=[3, 8]), MappingProxyType({"numbers": [3, 8]}), Lock()
    for given in (mine, space):
        copied: Any = private_copy(given)
        copied.numbers.remove(3)
        assert type(copied) is type(given)
        assert given.numbers == [3, 8]
    seen: Any = private_copy(proxy)
    seen["numbers"].remove(3)
    assert type(seen) is MappingProxyType
    assert proxy["numbers"] == [3, 8]
    assert private_copy(lock) is lock
