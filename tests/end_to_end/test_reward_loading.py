"""Reward functions by name and from files, as a recipe gives them."""

from pathlib import Path

import pytest

from posttrain.options.reward import RewardOptions
from posttrain.rewards.cheap_attacks import made_problem
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.reward_registry import BUILT_IN, load_reward
from tests.support.refusals import refused
from tests.support.reward_rows import CHAT, group


def from_file(tmp_path: Path, source: str, name: str, file: str = "my_rewards.py") -> RewardOptions:
    (tmp_path / file).write_text(source)
    return RewardOptions(path=f"{tmp_path / file}:{name}", weight=0.5)


SOLVED = "<think>easy</think> <answer>1 + 2</answer>"
PUZZLE = {"numbers": [1, 2], "target": 3, "rule": "all"}
PRINTS = {"tests": {"kind": "stdio", "cases": [{"input": "", "output": "3"}]}}
PROGRAM = "```python\nprint(1 + 2)\n```"

# For every name: its options, two completions, the row's columns, and what the two are worth.
WORTH: dict[str, tuple[dict[str, object], list[str], dict[str, object], list[float]]] = {
    "countdown": ({}, [SOLVED, "no"], PUZZLE, [1.0, 0.0]),
    "countdown_last": ({}, [SOLVED, "no"], PUZZLE, [1.0, 0.0]),
    "countdown_credit": ({}, [SOLVED, SOLVED.replace("+", "*")], PUZZLE, [1.0, 0.1 * 2 / 3]),
    "countdown_steps": ({}, [SOLVED, "no"], PUZZLE, [0.0, 0.0]),
    "line_format": ({}, ["<think>\na\n</think>\n<answer>\n1\n</answer>", SOLVED], {}, [1.0, 0.0]),
    "strict_format": ({}, [SOLVED, "no"], {}, [1.0, 0.0]),
    "last_format": ({}, [SOLVED, "no"], {}, [1.0, 0.0]),
    "graded_format": ({}, [SOLVED, "no"], {}, [1.0, 0.0]),
    "code": ({"cpu_seconds": 1.0}, [PROGRAM, "no"], PRINTS, [1.0, 0.0]),
    "code_course": ({}, ["<code>1 + 2</code>", "<code>1 +</code>"], {}, [1.0, 0.3]),
    "exact_match": ({}, ["<answer>(b)</answer>", "C"], {"answer": "B"}, [1.0, 0.0]),
    "generated": (
        {},
        ["<answer>10*(8 - 5) - 6</answer>", "<answer>6*4*1*1</answer>"],
        made_problem("puzzle24", "arithmetic", "10*(8 - 5) - 6", numbers=[5, 6, 8, 10]),
        [1.0, 0.0],
    ),
    "judge": ({"endpoint": "http://127.0.0.1:9/v1", "model": "j"}, ["", "Solution:"], {}, [0.0, 0.0]),
    "math": ({"symbolic": False}, [r"it is \boxed{3.0}", "4"], {"answer": "3"}, [1.0, 0.0]),
    "maths": ({"symbolic": False}, [r"it is \boxed{3.0}", "4"], {"answer": "3"}, [1.0, 0.0]),
    "soft_overlong": ({"max_tokens": 2, "cache_tokens": 2}, ["a", "b"], {}, [-1.0, -1.0]),
    "cosine_length": ({"max_tokens": 4}, ["a", "b"], PUZZLE, [-0.75, -0.75]),
    "group_length": ({}, ["a", "b"], PUZZLE, [0.0, 0.0]),
    "repetition": ({"ngram": 2}, ["a", "b"], {}, [0.0, 0.0]),
    "truncated": ({"value": -0.5}, ["a", "b"], {}, [-0.5, 0.0]),
    "blocklist": ({"phrases": ["bad"]}, ["fine", "so BAD"], {}, [0.0, -1.0]),
    "refusal": ({}, ["Sure.", "I’m sorry, no."], {}, [0.0, -1.0]),
    "copied_prompt": ({}, ["a", "b"], {}, [0.0, 0.0]),
    "language_drift": ({"scripts": ["latin"]}, ["abc", "abγδ"], {}, [0.0, -0.5]),
    "period_count": ({"most": 4}, ["a. b.", "a"], {}, [0.5, 0.0]),
}


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("messages", [None, CHAT], ids=["plain", "chat"])
def test_every_built_in_name_grades_plain_text_and_conversations(name: str, messages: object) -> None:
    options, completions, columns, worth = WORTH[name]
    watched = {"of": "countdown"} if name.endswith("_length") else {}
    functions = [load_reward(RewardOptions(name=name, weight=2.0, options=options, **watched))]
    if watched:
        functions.append(load_reward(RewardOptions(name="countdown", weight=0.0)))
    grades = grade([group(completions, columns=columns, messages=messages)], functions)
    assert grades.rewards[0].tolist() == pytest.approx([2.0 * each for each in worth])


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ({"name": "repetition", "options": {"n_gram": 3}}, "repetition.n_gram … `ngram`"),
        ({"name": "repetition", "options": {"ngram": "3"}}, "ngram = '3' should be a whole number"),
        ({"name": "soft_overlong"}, "soft_overlong.max_tokens is missing"),
        ({"name": "blocklist", "options": {"phrases": "bad"}}, "phrases = 'bad' should be a list"),
        ({"name": "countdown", "options": {"mode": "last"}}, "countdown has no options"),
        ({"path": "mine.py:solved", "options": {"a": 1}}, "mine.py:solved"),
    ],
)
def test_options_that_a_reward_does_not_take_are_refused(reward: dict[str, object], says: str) -> None:
    with refused(says):
        load_reward(RewardOptions(**reward))


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
        ("def solved(completions): return []\n", "solve", "`solve` … `solved`"),
        ("x = 1\n", "solved", "There are: none"),
        ("def solved(:\n", "solved", "cannot be imported: SyntaxError"),
    ],
)
def test_a_file_without_the_function_is_one_message(tmp_path: Path, source: str, name: str, complaint: str) -> None:
    with refused(complaint):
        load_reward(from_file(tmp_path, source, name))


def test_math_and_maths_are_one_reward_whose_scores_have_the_name_that_was_used() -> None:
    functions = [load_reward(RewardOptions(name=name)) for name in ("math", "maths")]
    assert functions[0].call == functions[1].call
    grades = grade([group([r"\boxed{3}", r"\boxed{4}"], columns={"answer": "3"})], functions)
    assert grades.names == ("math", "maths")
    assert grades.scores.tolist() == [[[1.0, 0.0]], [[1.0, 0.0]]]
    assert set(grades.outcomes) == {"math", "maths"}
    with refused("`mth`", "`math`"):
        load_reward(RewardOptions(name="mth"))
    with refused("no such file"):
        load_reward(RewardOptions(path="none.py:solved"))
