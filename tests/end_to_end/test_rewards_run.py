"""Rewards by name, from files and in whole runs: they log, mark steps of the way, and are asked in workers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain import ProcessReward, Span
from posttrain.generation.engine import sample_groups
from posttrain.options.reward import RewardOptions
from posttrain.rewards.cheap_attacks import made_problem
from posttrain.rewards.grading.function import TrainerState
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.reward_registry import BUILT_IN, load_reward
from posttrain.runs.prompt_preview import graded_lines
from posttrain.training.session import CallerObjects, open_session
from tests.support.own_objects import config_for
from tests.support.pages import documented
from tests.support.refusals import refused
from tests.support.reward_rows import CHAT, group
from tests.support.runs import command, metrics_of, records, require_same, rollout_rows, tiny_recipe

STATES: list[TrainerState] = []


def lengths(completions: Sequence[str], log_extra: Any, log_metric: Any, trainer_state: TrainerState) -> list[float]:
    STATES.append(trainer_state)
    log_extra("letters", [sum(map(str.isalpha, text)) for text in completions])
    log_metric("shortest", min(map(len, completions)))
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    return [float(len(text)) for text in completions]


OWN: dict[str, Any] = {
    "rows": [{"prompt": f"{i} and {i} make ", "answer": i} for i in range(1, 9)],
    "held_out_rows": [{"prompt": "9 and 9 make ", "answer": 9}],
    "rewards": [lengths, lengths],
}


def logging(model: Path, folder: Path) -> posttrain.Config:
    return config_for(
        model,
        folder,
        algorithm={"name": "grpo", "reward_aggregation": "normalize_then_sum"},
        rollout={"prompts_per_step": 4, "group_size": 3},
        evaluation={"every_steps": 2, "samples": 2, "brief_problems": 1},
        checkpoint={"every_steps": 1, "keep_last": 9},
        run={"num_steps": 3},
    )


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return posttrain.train(logging(model, tmp_path_factory.mktemp("logging") / "run"), **OWN).folder


def test_metrics_have_what_was_logged_beside_ours_and_of_each_function_apart(run: Path) -> None:
    lines = metrics_of(run)
    assert [line["logged/lengths/progress"] for line in lines[1:]] == [0, 1 / 3, 2 / 3]
    assert [line["eval/logged/lengths_2/progress"] for line in (lines[0], lines[2])] == [0, 2 / 3]
    assert lines[1]["logged/lengths/shortest"] == lines[1]["logged/lengths_2/shortest"]
    assert all(documented(name) for line in lines for name in line if "logged" in name)
    assert json.loads((run / "summary.json").read_text())["after"]["logged"]["lengths/progress"] == 1
    states = {(state.global_step, state.max_steps, state.epoch) for state in STATES}
    assert states == {(0, 3, 0.0), (1, 3, 0.5), (2, 3, 1.0), (3, 3, 1.5)}


def test_every_completion_has_what_was_logged_of_it(run: Path) -> None:
    for row in rollout_rows(run, 2):
        assert row["extra/lengths_2/letters"] == sum(map(str.isalpha, row["completion"]))


def test_a_step_that_is_taken_again_is_journalled_again_word_for_word(run: Path, model: Path) -> None:
    journal, metrics = (run / "scores.jsonl").read_text(), metrics_of(run)
    assert '"extra"' in journal
    posttrain.train(logging(model, run), **OWN, resume=True, from_step=1)
    assert ((run / "scores.jsonl").read_text(), metrics_of(run)) == (journal, metrics)


def test_what_is_shown_of_a_completion_has_it_too(model: Path, tmp_path: Path) -> None:
    with open_session(logging(model, tmp_path / "other"), CallerObjects(**OWN)) as session:
        (group,) = sample_groups(session.engine, session.task.held_out(), session.collector.request(1))
        lines = graded_lines(group, session.collector.grade([group]), 0, session.policy.tokenizer)
    letters = sum(map(str.isalpha, group.rollouts[0].text))
    assert lines[-2:] == [f"logged     lengths: letters = {letters}", f"logged     lengths_2: letters = {letters}"]


THROWS = [{"prompt": f"Throw {n}. "} for n in range(12)]


def steps_of_the_way(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[Any]:
    """A digit earns .5, and an even token .25; the score is the text's length."""
    return [
        ProcessReward(
            len(text) / 4,
            [0.25 if token % 2 == 0 else None for token in ids],
            [Span(i, i + 1, 0.5) for i, character in enumerate(text) if character.isdigit()],
        )
        for text, ids in zip(completions, completion_ids, strict=True)
    ]


def marked(model: Path, folder: Path, credit: str = "steps") -> posttrain.Config:
    kl = {"coefficient": 0.01, "estimator": "k1", "place": "reward"}
    return config_for(
        model,
        folder,
        algorithm={"name": "grpo", "credit": credit, "kl": kl},
        rollout={"prompts_per_step": 2, "max_completion_tokens": 6},
        checkpoint={"every_steps": 2, "keep_last": 1, "keep_best": False},
        run={"num_steps": 4},
    )


def test_a_resumed_run_with_marks_is_the_run_that_was_never_stopped(model: Path, tmp_path: Path) -> None:
    rewards = [posttrain.reward_function(steps_of_the_way, weight=0.5)]
    whole = posttrain.train(marked(model, tmp_path / "whole"), rows=THROWS, rewards=rewards).folder
    with posttrain.steps(marked(model, tmp_path / "parts"), rows=THROWS, rewards=rewards) as parts:
        assert [next(parts).step for _ in range(3)] == [1, 2, 3]
    posttrain.train(marked(model, tmp_path / "parts"), rows=THROWS, rewards=rewards, resume=True)
    require_same(tmp_path / "parts", whole)

    rows = rollout_rows(whole, 4)
    journal = records(whole / "scores.jsonl")
    told = [each for line in journal if line["step"] == 4 for each in line["marks"]["steps_of_the_way"]]
    assert [json.loads(row["marks/steps_of_the_way"]) for row in rows] == told
    for row, marks in zip(rows, told, strict=True):
        # The penalties are small beside the marks: the policy has learned next to nothing yet.
        total = 0.5 * sum([value or 0.0 for value in marks["tokens"]] + [span[2] for span in marks["spans"]])
        assert len(row["token_rewards"]) == len(row["tokens"])
        assert sum(row["token_rewards"]) == pytest.approx(total, abs=0.1)


def test_workers_change_no_number_of_a_run_and_a_second_run_finds_every_score_in_the_file(folder: Path) -> None:
    kept = {"cache_file": "../scores.db", "seconds": 100.0}
    limits = {"workers": 2, "item_seconds": 20.0, "cache": True}
    scores, seen = [], []
    for name, grading, options in (("plain", {}, {}), ("first", kept, limits), ("second", kept, limits)):
        recipe = tiny_recipe(folder / name, grading=grading, rewards=[{"path": "../dice.py:dice", **options}])
        (folder / "dice.py").write_text((folder / name / "dice.py").read_text())
        ended = command("rl", recipe, folder=folder / name)
        assert ended.code == 0, ended.err
        scores.append((folder / name / "run" / "scores.jsonl").read_text())
        seen.append(metrics_of(folder / name / "run"))
    assert scores[0] == scores[1] == scores[2]
    cached = [[line.pop("num_cached_scores", None) for line in lines] for lines in seen]
    assert seen[0] == seen[1] == seen[2]
    assert cached[0] == [None, 0, 0, 0, 0]
    assert cached[1][1] < 16  # of four prompts and four completions each; step 0 is an evaluation
    assert cached[2] == [None, 16, 16, 16, 16]


def test_a_limit_that_cannot_be_kept_is_told_before_anything_is_trained(folder: Path) -> None:
    ended = command("rl", tiny_recipe(folder / "refused", grading={"seconds": 100.0}), folder=folder / "refused")
    assert ended.code == 2
    assert "grading.seconds = 100 cannot end reward 'dice', a plain function in the trainer's process" in ended.err
    assert not (folder / "refused" / "run").exists()


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
