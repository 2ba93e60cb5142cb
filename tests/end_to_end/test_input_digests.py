"""What tells the rows and functions of a run from others, as inputs.json keeps it."""

import copy
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import posttrain
from posttrain.training.caller.caller_inputs import inputs_of
from posttrain.training.caller.caller_objects import CallerObjects
from tests.end_to_end.test_python_api import ROWS
from tests.end_to_end.test_resume_inputs import inputs


def test_rows_of_a_generator_are_taken_once_and_are_those_of_a_list() -> None:
    own = CallerObjects(rows=(row for row in ROWS))
    assert inputs_of(posttrain.Config(), own) == inputs_of(posttrain.Config(), own) == inputs(rows=ROWS)


FACTOR, NUM_CALLS = 1.0, 0


def with_globals(completions: Sequence[str], **columns: object) -> list[float]:
    global NUM_CALLS
    NUM_CALLS += 1
    return [(lambda: FACTOR)() for _ in completions]


def test_plain_settings_of_its_module_belong_to_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    began = inputs(rewards=[with_globals])
    with_globals(["a"])
    assert inputs(rewards=[with_globals]) == began
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    now = inputs(rewards=[with_globals])
    assert now.objects["rewards[0]"].differs(began.objects["rewards[0]"])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([1]), np.array([2])),
        (np.array([1]), np.array([1.0])),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
        (np.int64(3), np.int64(4)),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)),
        (torch.tensor(True), torch.tensor(False)),
        (torch.tensor([1.0], requires_grad=True), torch.tensor([1.5], requires_grad=True)),
        (b"ab", b"ac"),
    ],
    ids=str,
)
def test_arrays_and_tensors_in_rows_are_known_by_their_content(one: Any, other: Any) -> None:
    known = [inputs(rows=[{"prompt": "a", "x": each}]) for each in (one, copy.deepcopy(one), other)]
    assert known[0] == known[1]
    assert known[2].objects["rows"].differs(known[0].objects["rows"])
