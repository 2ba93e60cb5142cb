"""How reward functions are called, and what they may return."""

import asyncio
import functools
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from threading import Lock
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.errors import RunError
from posttrain.records import Group
from posttrain.rewards.grading.answers import DetailedGrade, Graded
from posttrain.rewards.grading.calls import private_copy
from posttrain.rewards.grading.function import TrainerState
from posttrain.rewards.grading.grade import grade, reward_function
from tests.support.refusals import refused
from tests.support.reward_rows import CHAT, Outcome, graded, group, scores


def test_a_function_with_kwargs_is_given_everything_by_keyword_and_in_lists() -> None:
    seen = {}

    def everything(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0] * 4

    graded([group(["a", "b"], columns={"answer": 2}), group(["c", "d"], columns={"answer": 3})], everything)
    of_the_call = {name: seen.pop(name) for name in ("trainer_state", "log_extra", "log_metric")}
    assert of_the_call["trainer_state"] == TrainerState(global_step=0)
    assert seen == {
        "prompts": ["1 + 1?"] * 4,
        "completions": ["a", "b", "c", "d"],
        "completion_ids": [[0, 9], [1, 9], [0, 9], [1, 9]],
        "finish_reasons": ["length", "stop", "length", "stop"],
        "answer": [2, 2, 3, 3],
    }


TEXT = {"role": "assistant", "content": "<think>two"}
"""What a function of messages gets for the completion `two`."""
GIVEN: dict[str, tuple[Callable[..., object], list[Group], list[list[float]]]] = {
    "only what its signature names": (
        lambda completions, answer, strict=True: [
            float(strict and text == right) for text, right in zip(completions, answer, strict=True)
        ],
        [group(["2", "3"], columns={"answer": "2", "unused": 0})],
        [[1, 0]],
    ),
    "None where a row lacks a column": (
        lambda completions, hint: [float(hint == ["x", None])] * 2,
        [group(["a"], columns={"hint": "x"}), group(["b"])],
        [[1], [1]],
    ),
    "what was sampled and not the columns prompt, completion and completions": (
        lambda **given: [float(given["completions"] == ["a"] and not {"prompt", "completion"} & given.keys())],
        [group(["a"], columns={"prompt": "x", "completion": "y", "completions": "z"})],
        [[1]],
    ),
    "a conversation as messages": (
        lambda prompts, completions: [float((prompts, completions) == ([[*CHAT]], [[TEXT]]))],
        [group(["two"], prefill="<think>", messages=CHAT)],
        [[1]],
    ),
    "a prompt and a completion that join to the whole text": (
        lambda prompts, completions: [float(prompts[0] + completions[0] == "1 + 1?<think>two")],
        [group(["two"], prefill="<think>")],
        [[1]],
    ),
    **{
        f"one response and the {column} as its ground truth": (
            lambda response, ground_truth: float(response == ground_truth),
            [group(["2", "3"], columns={column: "2"}), group(["2", "3"], columns={column: "3"})],
            [[1, 0], [0, 1]],
        )
        for column in ("ground_truth", "answer")
    },
    "one response, columns and the finish reason, of a conversation too": (
        lambda response, numbers, finish_reason: len(response) + sum(numbers) + 100 * (finish_reason == "stop"),
        [group(["abc", "abc"], columns={"numbers": [1, 2]}, messages=CHAT)],
        [[6, 106]],  # 3 letters + (1 + 2), and 100 for the one that stopped
    ),
    "one completion and the columns that it names, as a course writes them": (
        lambda completion, nums, target: float(completion == f"{nums[0]}+{nums[1]}={target}"),
        [
            group(["1+2=3", "no"], columns={"nums": [1, 2], "target": 3}),
            group(["2+2=4", "1+2=3"], columns={"nums": [2, 2], "target": 4}),
        ],
        [[1, 0], [1, 0]],
    ),
    "numbers for nums": (
        lambda completion, nums, target: float(completion == f"{nums[0]}+{nums[1]}={target}"),
        [group(["1+2=3"], columns={"numbers": (1, 2), "target": 3})],
        [[1]],
    ),
    "one graded text with the prefill, of a conversation too": (
        lambda completion: float(completion.startswith("<think>")),
        [group(["a"], prefill="<think>"), group(["b"], messages=CHAT)],
        [[1], [0]],
    ),
    "one completion that was sampled and not the column of that name": (
        lambda completion: float(completion == "sampled"),
        [group(["sampled"], columns={"completion": "of the row"})],
        [[1]],
    ),
    **{
        f"all texts as {name}, for which it may return a tensor": (
            function,
            [group(["a.", ".."], prefill="."), group(["b", "..."], messages=CHAT)],
            [[2, 3], [0, 3]],
        )
        for name, function in {
            "texts": lambda texts: torch.tensor([text.count(".") for text in texts]).float() * (len(texts) == 4),
            "responses": lambda responses: (
                torch.tensor([text.count(".") for text in responses]) * (len(responses) == 4)
            ),
        }.items()
    },
    "a column called responses": (
        lambda completions, responses: [float(a == b) for a, b in zip(completions, responses, strict=True)],
        [group(["x", "y"], columns={"responses": "x"})],
        [[1, 0]],
    ),
    "a copy of its columns for each row": (
        lambda completions, numbers: [given.remove(1) or len(given) for given in numbers],
        [group(["a", "b"], columns={"numbers": [1, 1, 2]})],
        [[2, 2]],
    ),
    "lists where it names all completions and one": (
        lambda completions, completion=None: [float(completion is None)] * len(completions),
        [group(["x", "y"])],
        [[1, 1]],
    ),
}


@pytest.mark.parametrize("what", GIVEN)
def test_a_function_is_given(what: str) -> None:
    function, groups, expected = GIVEN[what]
    assert scores(groups, function) == expected


def test_a_function_of_text_only_is_given_text_for_a_conversation_too() -> None:
    def text(prompts: list[str], completions: list[str]) -> list[float]:
        return [float((prompts, completions) == (["1 + 1?"], ["<think>two"]))]

    groups = [group(["two"], prefill="<think>", messages=CHAT)]
    assert grade(groups, [reward_function(text, text_only=True)]).rewards.tolist() == [[1.0]]


def written_over(given: Any) -> None:
    """Change a value in the way that its kind allows."""
    match given:
        case tuple():
            given[0].append(9)
        case dict():
            given["x"] = 9
        case deque() | list():
            given.append(9)
        case torch.Tensor():
            given += 9
        case _:
            given[0] = 9


MAKERS: list[Callable[[], Any]] = [
    lambda: np.array([3, 8]),
    lambda: torch.tensor([3, 8]),
    lambda: torch.ones(2, requires_grad=True) * 3,
    lambda: bytearray(b"ab"),
    lambda: memoryview(bytearray(b"ab")),
    lambda: ([3], [8]),
    lambda: [[3], [8]],
    lambda: [3, 8],
    lambda: deque([3, 8]),
    lambda: OrderedDict(a=1),
    lambda: np.ma.array([3.0, 8.0], mask=[0, 1]),
]


@pytest.mark.parametrize(("make", "one_by_one"), [*itertools.product(MAKERS, [False, True])])
def test_no_function_can_change_a_problem(make: Callable[[], Any], one_by_one: bool) -> None:
    def of_lists(completions: list[str], numbers: list[Any]) -> list[float]:
        return [written_over(given) or 1.0 for given in numbers]

    def of_one(response: str, numbers: Any) -> float:
        return written_over(numbers) or 1.0

    mine, untouched = make(), make()
    graded([group(["a", "b"], columns={"numbers": mine})], of_one if one_by_one else of_lists)
    assert type(mine) is type(untouched)
    views = [value.detach().numpy() if isinstance(value, torch.Tensor) else value for value in (mine, untouched)]
    assert bool(np.all(np.asarray(views[0] == views[1])))


def test_what_nobody_can_change_is_not_copied() -> None:
    pair, text, fixed = (1, "a"), "x" * 10, memoryview(b"ab")
    assert all(private_copy(value) is value for value in (pair, text, fixed, None, 1.5))
    numbers = [3, 8]
    assert private_copy(numbers) == numbers
    assert private_copy(numbers) is not numbers


class Automatic(dict[str, Any]):
    """A mapping whose missing attributes are new mappings."""

    def __getattr__(self, name: str) -> "Automatic":
        if name.startswith("__"):
            raise AttributeError(name)
        return Automatic()


def test_a_mapping_with_any_attribute_is_copied_as_a_mapping() -> None:
    given = Automatic(numbers=[3, 8])
    copied: Any = private_copy(given)
    copied["numbers"].remove(3)
    assert given == {"numbers": [3, 8]}


@dataclass
class Puzzle:
    """A column's object of the user's own."""

    numbers: list[int]


def test_objects_of_a_users_own_are_copied_where_that_works() -> None:
    for given in (Puzzle(numbers=[3, 8]), SimpleNamespace(numbers=[3, 8])):
        copied: Any = private_copy(given)
        copied.numbers.remove(3)
        assert type(copied) is type(given)
        assert given.numbers == [3, 8]
    proxy, lock = MappingProxyType({"numbers": [3, 8]}), Lock()
    seen: Any = private_copy(proxy)
    seen["numbers"].remove(3)
    assert type(seen) is MappingProxyType
    assert proxy["numbers"] == [3, 8]
    assert private_copy(lock) is lock


def test_partials_and_objects_are_functions_too_and_have_names() -> None:
    class Judge:
        def __call__(self, completions: list[str]) -> list[float]:
            return [3.0 for _ in completions]

    def power(completions: list[str], base: int) -> list[float]:
        return [base ** len(text) for text in completions]

    result = graded([group(["abc"])], functools.partial(power, base=2), Judge())
    assert result.names == ("power", "Judge")
    assert result.rewards.item() == 11.0  # 2³ + 3


def test_every_kind_of_number_is_a_score_and_none_is_none() -> None:
    values = [1, True, 0.5, np.float32(0.25), np.bool_(True), torch.tensor(2.0), np.array([3]), Fraction(1, 4), None]
    assert scores([group(["x"] * 9)], lambda completions: values) == [[1, 1, 0.5, 0.25, 1, 2, 3, 0.25, None]]


def test_arrays_tensors_tuples_and_generators_are_lists_of_scores() -> None:
    for returned in (np.array([1.0, 2.0]), torch.tensor([[1.0], [2.0]]), (1, 2), (n for n in (1, 2))):
        assert scores([group(["a", "b"])], lambda completions, returned=returned: returned) == [[1, 2]]


def test_outcomes_are_kept_by_prompt_and_rollout() -> None:
    def verdicts(completions: list[str]) -> list[Graded]:
        return [Graded(1.0, Outcome.RIGHT) if text == "2" else Graded(None, Outcome.WRONG) for text in completions]

    result = graded([group(["2", "3"]), group(["4", "2"])], verdicts)
    assert result.outcomes == {"verdicts": (("right", "wrong"), ("wrong", "right"))}
    assert result.scores.isnan().tolist() == [[[False, True], [True, False]]]


def test_the_reward_is_the_weighted_sum_of_the_scores_that_exist() -> None:
    functions = [
        reward_function(lambda completions: [1.0, 1.0, None, None], name="a", weight=2.0),
        reward_function(lambda completions: [3.0, None, 4.0, None], name="b", weight=-0.5),
        reward_function(lambda completions: [7.0, 7.0, 7.0, 7.0], name="watched", weight=0.0),
    ]
    rewards = grade([group(["w", "x", "y", "z"])], functions).rewards[0]
    # 2·1 - 0.5·3, 2·1, -0.5·4; the last is unscored, for a function of weight 0 only watches.
    torch.testing.assert_close(rewards, torch.tensor([0.5, 2.0, -2.0, math.nan], dtype=torch.float64), equal_nan=True)


def test_the_journal_gets_the_scores() -> None:
    groups, seen = [group(["a", "b"])], []
    graded(groups, lambda completions: [1.0, 2.0], journal=lambda groups, grades: seen.append((groups, grades)))
    assert seen[0][0] is groups
    assert seen[0][1].scores.tolist() == [[[1.0, 2.0]]]


def test_no_groups_make_no_scores() -> None:
    assert graded([], lambda completions: []).scores.shape == (1, 0, 0)


def meeting(parties: int) -> Callable[..., Any]:
    """An async function that returns only when as many calls of it as there are parties are under way."""
    arrived: list[str] = []

    async def meet(response: str) -> float:
        arrived.append(response)
        for _ in range(1_000):
            if len(arrived) == parties:
                return float(len(response))
            await asyncio.sleep(0.001)
        raise TimeoutError("alone")

    return meet


def test_async_functions_run_at_the_same_time() -> None:
    assert scores([group(["a", "bb", "ccc"])], meeting(3)) == [[1.0, 2.0, 3.0]]


def test_an_async_call_method_and_a_plain_function_that_returns_an_awaitable_are_awaited() -> None:
    class Judge:
        async def __call__(self, completions: list[str]) -> list[float]:
            await asyncio.sleep(0)
            return [1.0] * len(completions)

    result = graded([group(["a", "b"])], Judge(), lambda completions: Judge()(completions))
    assert result.rewards.tolist() == [[2.0, 2.0]]


def test_async_functions_of_all_steps_share_one_event_loop() -> None:
    loops = []

    async def remember(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0]

    for _ in range(2):
        graded([group(["a"])], remember)
    assert loops[0] is loops[1]


def test_scoring_works_inside_a_running_event_loop_and_a_function_may_start_one_itself() -> None:
    async def score(completions: list[str]) -> list[float]:
        return [1.0]

    async def notebook() -> list[list[float | None]]:
        return scores([group(["a"])], score)

    def blocking(completions: list[str]) -> list[float]:
        return asyncio.run(score(completions))

    assert asyncio.run(notebook()) == [[1.0]]
    assert scores([group(["a"])], blocking) == [[1.0]]


def test_what_a_function_tells_of_some_groups_only_survives_joining_and_choosing() -> None:
    def some(*, completions: Sequence[str], **_: object) -> list[Graded | None]:
        return [DetailedGrade(1.0, Outcome.RIGHT, {"n": 1}) if "x" in text else None for text in completions]

    told, silent = graded([group(["x", "x"])], some), graded([group(["a", "b"]), group(["c", "d"])], some)
    for both in (told.joined(silent), silent.joined(told).select([2, 0, 1])):
        assert both.outcomes == {"some": (("right", "right"), ("", ""), ("", ""))}
        assert both.details == {"some": (({"n": 1}, {"n": 1}), (None, None), (None, None))}
    assert silent.joined(silent).outcomes == {}
    many = graded([group(["a", "b"])] * 3, some)
    assert told.joined(many).outcomes == {"some": (("right", "right"), *((("", ""),) * 3))}
    cached = replace(told, num_cached=2, num_failures=1).joined(replace(silent, num_cached=5, num_failures=3))
    assert (cached.num_cached, cached.num_failures) == (7, 4)


def test_details_that_are_no_json_are_refused() -> None:
    def bad(*, completions: Sequence[str], **_: object) -> list[Graded]:
        return [DetailedGrade(1.0, Outcome.RIGHT, {"n": object()}) for _ in completions]

    with refused("details", error=RunError):
        graded([group(["x", "x"])], bad)
