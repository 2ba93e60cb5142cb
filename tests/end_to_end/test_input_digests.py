"""What tells the rows and functions of a run from others, as inputs.json keeps it."""

import copy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import posttrain
from posttrain.runs.run_inputs import code_input
from posttrain.training.caller_objects import CallerObjects, inputs_of
from tests.end_to_end.test_resume_inputs import inputs
from tests.support.own_objects import ROWS


def test_rows_of_a_generator_are_taken_once_and_are_those_of_a_list() -> None:
    own = CallerObjects(rows=(row for row in ROWS))
    assert inputs_of(posttrain.Config(), own) == inputs_of(posttrain.Config(), own) == inputs(rows=ROWS)


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


CODE = """import functools
import re
import digested_helper as hh
from digested_helper import inner

FOUND = re.compile("a+")
FACTOR, NUM_CALLS = 1.0, 0


def helper(text):
    return float(len(text))


def repeated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return [1 * each for each in function(*args, **kwargs)]

    return wrapper


class Base:
    def scored(self, text):
        return 1.0 + len(text)


class Scorer(Base):
    def __call__(self, completions, **columns):
        return [self.scored(each) + helper(each) for each in completions]

    def method(self, completions, **columns):
        return [0 * helper(each) for each in completions] and self(completions)


def plain(completions, **columns):
    return [helper(each) for each in completions]


def through(completions, **columns):
    return [outer(each) + len(FOUND.findall(each)) for each in completions]


def counted(completions, **columns):
    global NUM_CALLS
    NUM_CALLS += 1
    return [(lambda: FACTOR)() for each in completions]


def outer(text):
    return [helper(each) for each in text] and through and 0.0


def imported(completions, **columns):
    return [hh.inner(each) for each in completions]


def by_name(completions, **columns):
    return [inner(each) for each in completions]


@repeated
def wrapped(completions, **columns):
    return [0.0 for each in completions]


@functools.cache
def cached(completions, **columns):
    return [helper(each) for each in completions]


instance, method = Scorer(), Scorer().method
"""
CHANGES = {
    "instance": [("float(len", "2 * (len"), ("1.0 + len", "2.0 + len")],
    "method": [("float(len", "2 * (len"), ("1.0 + len", "2.0 + len")],
    "plain": [("float(len", "2 * (len")],
    "through": [("float(len", "2 * (len"), ('"a+"', '"b+"'), ("and 0.0", "and 1.0")],
    "counted": [("FACTOR, NUM_CALLS = 1.0", "FACTOR, NUM_CALLS = 2.0")],
    "wrapped": [("1 * each", "2 * each")],
    "cached": [("float(len", "2 * (len")],
    "imported": [("LIMIT = 1", "LIMIT = 2"), ("text) + ", "text) - ")],
    "by_name": [("LIMIT = 1", "LIMIT = 2"), ("text) + ", "text) - ")],
}
HELPER = "LIMIT = 1\n\n\ndef inner(text):\n    return len(text) + LIMIT\n"


@pytest.mark.parametrize("main", [False, True], ids=["imported", "__main__"])
@pytest.mark.parametrize("name", CHANGES)
def test_code_that_a_reward_reads_by_name_belongs_to_it(
    name: str, main: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest_with(was: str, now: str, number: int) -> str:
        """Of the reward in a module of its own, after a change to it or to its helper."""
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "digested_helper.py").write_text(HELPER.replace(was, now))
        (folder / "digested.py").write_text(CODE.replace(was, now))
        monkeypatch.syspath_prepend(str(folder))
        for each in ("digested", "digested_helper"):
            monkeypatch.delitem(sys.modules, each, raising=False)
        spec = spec_from_file_location("__main__" if main else "digested", folder / "digested.py")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        found = code_input(name, getattr(module, name)).digest
        assert code_input(name, getattr(module, name)).digest == found  # which a call leaves as it is
        getattr(module, name)(("a",))
        assert code_input(name, getattr(module, name)).digest == found
        return found

    same = digest_with("", "", 0)
    assert same == digest_with("", "", 1) != ""
    unread = digest_with("instance, method", "other = 1\ninstance, method", 2)
    assert (unread == same) == main  # the file of `__main__` may change where the reward does not read it
    assert all(digest_with(*change, 3 + n) not in (same, "") for n, change in enumerate(CHANGES[name]))
