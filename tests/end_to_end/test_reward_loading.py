"""Reward functions by name and from files, as a recipe gives them."""

import importlib
from pathlib import Path

import pytest

from posttrain.errors import UserError
from posttrain.rewards.loading import BUILT_IN, load_reward
from posttrain.rewards.options import RewardOptions
from posttrain.rewards.protocol import grade
from tests.laws.reward_rows import CHAT, group


def from_file(tmp_path: Path, source: str, name: str, file: str = "my_rewards.py") -> RewardOptions:
    (tmp_path / file).write_text(source)
    return RewardOptions(path=f"{tmp_path / file}:{name}", weight=0.5)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_name_is_a_function_that_grades_plain_text_and_conversations(name: str) -> None:
    function = load_reward(RewardOptions(name=name, weight=2.0))
    module, _, attribute = BUILT_IN[name].partition(":")
    assert function.call is getattr(importlib.import_module(module), attribute)
    columns = {"numbers": [1, 2], "target": 3, "rule": "all"}
    solved = "<think>easy</think> <answer>1 + 2</answer>"
    for messages in (None, CHAT):
        grades = grade([group([solved, "no"], columns=columns, messages=messages)], [function])
        assert grades.rewards.tolist() == [[2.0, 0.0]]


def test_a_function_of_a_file_has_its_own_name_and_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "my_neighbour.py").write_text("WANTED = 'yes'\n")
    source = """
from dataclasses import dataclass
from my_neighbour import WANTED

@dataclass
class Verdict:
    right: bool

def solved(completions, **kwargs):
    return [float(Verdict(text == WANTED).right) for text in completions]
"""
    function = load_reward(from_file(tmp_path, source, "solved"))
    assert function.name == "solved"
    assert grade([group(["yes", "no"])], [function]).rewards.tolist() == [[0.5, 0.0]]


def test_two_functions_of_one_file_share_its_module_and_a_changed_file_is_read_again(tmp_path: Path) -> None:
    source = "seen = []\n\ndef first(completions):\n    return seen\n\ndef second(completions):\n    return seen\n"
    options = from_file(tmp_path, source, "first")
    again = RewardOptions(path=options.path.replace("first", "second"))
    first, second = load_reward(options), load_reward(again)
    assert first.call([]) is second.call([])
    changed = from_file(tmp_path, source.replace("return seen", "return 'new'"), "first")
    assert load_reward(changed).call([]) == "new"


@pytest.mark.parametrize(
    ("source", "name", "complaint"),
    [
        ("def solved(completions): return []\n", "solve", r"has no function `solve`. Did you mean `solved`\?"),
        ("x = 1\n", "solved", "It defines no function"),
        ("solved = 3\n", "solved", "is a int and cannot score"),
        ("class solved: pass\n", "solved", "is a type and cannot score"),
        ("def solved(:\n", "solved", "cannot be imported: SyntaxError"),
        ("import no_such_module_anywhere\n", "solved", "ModuleNotFoundError: No module named"),
    ],
)
def test_a_file_that_gives_no_function_is_one_clear_message(
    tmp_path: Path, source: str, name: str, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        load_reward(from_file(tmp_path, source, name))


def test_what_does_not_exist_is_one_clear_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_reward(RewardOptions(path=f"{tmp_path}/none.py:solved"))
    with pytest.raises(UserError, match=r"no reward function `countdwn`. Did you mean `countdown`\?"):
        load_reward(RewardOptions(name="countdwn"))
