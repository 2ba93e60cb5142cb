"""The task of additions: its questions, what they carry, what earns what, and what is measured beside it."""

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from posttrain.options.task import SYSTEM, ArithmeticOptions
from posttrain.records import Finish, Group, Prompt, Rollout, TokenSequence
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.parsing.tags import answer_lines
from posttrain.tasks.arithmetic_task import (
    MANNERS,
    Addition,
    ArithmeticTask,
    demonstrated_additions,
    demonstrated_answer,
    demonstrated_question,
    every_addition,
    held_out_additions,
    last_written_number,
    training_additions,
    working,
)
from posttrain.tasks.base import Messages, Probe
from tests.support.refusals import refused

FORMED = "<think>\n57 + 8: 7 + 8 = 15, 50 + 15 = 65\n</think>\n<answer>\n65\n</answer>"


class CharacterRenderer:
    """One token per character, and messages one after another."""

    def render(self, content: str | Messages, *, id: str, prefill: str, columns: Mapping[str, object]) -> Prompt:
        assert not isinstance(content, str)
        text = "\n".join(turn["content"] for turn in content)
        return Prompt(id=id, text=text, tokens=tuple(map(ord, text)), messages=tuple(content), columns=columns)


def task(seed: int = 0, **options: Any) -> ArithmeticTask:
    return ArithmeticTask(ArithmeticOptions(**options), CharacterRenderer(), seed=seed)


def asked(own: ArithmeticTask, step: int = 1, count: int = 8) -> list[str]:
    return [prompt.id for prompt in own.prompts(step, range(count))]


def group_of(*completions: str) -> Group:
    """57 + 8, and what was said to it."""
    rollouts = tuple(
        Rollout(sample=i, sequence=TokenSequence.one_turn((1,), logprobs=(0.0,), finish=Finish.STOP), text=text)
        for i, text in enumerate(completions)
    )
    return Group(prompt=task().prompt(Addition(57, 8), "train/0"), draw=0, rollouts=rollouts)


def test_a_prompt_is_the_system_message_and_the_question_and_carries_the_sum() -> None:
    prompt = task().prompt(Addition(57, 8), "train/0")
    assert prompt.messages == (
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "If you add 57 and 8, what is the result?"},
    )
    assert prompt.columns == {"answer": "65"}
    assert SYSTEM.endswith("\n<think>\n...\n</think>\n<answer>\n...\n</answer>")
    assert task(system="Add.").prompt(Addition(57, 8), "x").messages[0] == {"role": "system", "content": "Add."}
    assert [turn["role"] for turn in task(system="").prompt(Addition(57, 8), "x").messages] == ["user"]


def test_the_training_questions_are_those_that_the_courses_generator_draws() -> None:
    # As `random.seed(42)`, then randint(10, 99) and randint(1, 9) for every question, give them.
    rng = Random(42)
    pairs = []
    for _ in range(64):
        a = rng.randint(10, 99)
        pairs.append((a, rng.randint(1, 9)))
    assert [(each.a, each.b) for each in training_additions(64)] == pairs
    assert training_additions(8) == training_additions(64)[:8]


def test_held_out_questions_are_different_ones_that_are_never_trained_on_or_demonstrated() -> None:
    trained, apart = set(training_additions(64)), held_out_additions(32, num_training=64)
    shown = set(demonstrated_additions(num_training=64, num_held_out=32))
    assert len(set(apart)) == 32
    assert not trained & set(apart)
    assert shown == set(every_addition()) - set(apart)
    assert len(every_addition()) == 810
    assert held_out_additions(8, num_training=64) == apart[:8]
    assert [prompt.columns["answer"] for prompt in task().held_out()] == [str(each.total) for each in apart]
    assert [p.text for p in task(seed=5).held_out()] == [p.text for p in task().held_out()]


def test_evaluations_can_ask_the_first_training_questions_instead() -> None:
    own = task(measured_on="training", held_out_size=4)
    assert [prompt.id for prompt in own.held_out()] == [f"train/{i}" for i in range(4)]
    assert [p.columns["answer"] for p in own.held_out()] == [str(each.total) for each in training_additions(4)]


def test_a_step_asks_different_questions_each_as_often_as_the_recipe_says() -> None:
    once, often = asked(task()), asked(task(repeats=4))
    assert len(set(once)) == 8
    assert often == [once[0]] * 4 + [once[1]] * 4
    assert asked(task()) == once
    assert asked(task(), step=2) != once
    assert asked(task(seed=1)) != once
    # All questions come before one comes again, and a refill goes on where the step's draws ended.
    assert sorted(asked(task(num_questions=8))) == sorted(asked(task(num_questions=8), count=16)[8:])
    assert [prompt.id for prompt in task().prompts(1, range(3, 8))] == once[3:]


def test_the_form_earns_the_reward_and_the_sum_is_measured_beside_it() -> None:
    said = (FORMED, FORMED.replace("65", "66"), "The result is 65.", "No idea.")
    grades = grade([group_of(*said)], task().reward_functions)
    assert grades.names == ("line_format", "right_sum")
    assert grades.scores[:, 0].tolist() == [[1, 1, 0, 0], [1, 0, 1, 0]]
    assert grades.rewards[0].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("57 + 8 = 65.", "65"),
        ("It is 65, I think", "65"),
        ("65.5", "65.5"),
        ("1,065", "1,065"),
        ("57 + 8 = -65", "-65"),
        ("none", ""),
        ("65 or 66", "66"),
        ("<answer>\n65\n</answer>", "65"),
    ],
)
def test_the_last_number_of_a_response_is_read_whole(text: str, number: str) -> None:
    assert last_written_number(text) == number


def test_probes_count_right_sums_and_those_in_the_form() -> None:
    probes = task().probes()
    assert (probes["greedy"].greedy, probes["sampled"].greedy) == (True, False)
    groups = [group_of(FORMED, FORMED.replace("65", "66"), "The result is 65.", "No idea.")]
    for name, probe in probes.items():
        numbers = probe.measure(groups)
        assert numbers == {f"answer_accuracy_{name}": 0.5, f"format_and_answer_{name}": 0.25}
        assert numbers.keys() == probe.readings.keys()


def test_a_probe_is_greedy_or_samples_anew() -> None:
    with refused("use one"):
        Probe(readings={}, measure=lambda groups: {}, greedy=True, endless=True)


def test_demonstrations_are_right_and_seldom_in_the_form() -> None:
    rng = Random(0)
    assert working(Addition(57, 8)) == "57 + 8: 7 + 8 = 15, 50 + 15 = 65"
    assert sum(MANNERS.values()) == pytest.approx(1)
    answers = [demonstrated_answer(Addition(57, 8), rng) for _ in range(2000)]
    own = grade([group_of(*answers)], task().reward_functions)
    assert own.scores[1, 0].mean() == 1  # every sum is right
    # .2 of 2000, whose standard deviation is .009.
    assert own.scores[0, 0].mean() == pytest.approx(0.2, abs=0.04)
    assert answer_lines(FORMED) == "65"
    questions = {demonstrated_question(Addition(57, 8), rng) for _ in range(50)}
    assert questions == {"If you add 57 and 8, what is the result?", "What's 57 + 8?"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_questions": 0}, "num_questions = 0"),
        ({"repeats": 0}, "repeats = 0"),
        ({"held_out_size": 0}, "held_out_size = 0"),
        ({"measured_on": "training", "held_out_size": 65}, "num_questions = 64"),
        ({"num_questions": 800, "held_out_size": 11}, "810"),
    ],
)
def test_options_that_cannot_hold_are_refused(options: dict[str, Any], message: str) -> None:
    with refused(message):
        ArithmeticOptions(**options)
