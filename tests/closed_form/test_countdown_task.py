"""The Countdown task: what prompts say and carry, and what counts as a try of a search."""

from typing import Any

import pytest

from posttrain.options.task import CountdownOptions
from posttrain.records import Prompt
from posttrain.rewards.countdown import Countdown, Outcome
from posttrain.rewards.grading.grade import grade
from posttrain.tasks.base import DRAWS_PER_STEP
from posttrain.tasks.countdown_problems import held_out
from posttrain.tasks.countdown_task import CountdownTask, Search, chat_prompt, compact, search, search_statistics
from tests.support.dataset_rows import CharacterRenderer
from tests.support.sequences import group_of


def task(seed: int = 0, **options: Any) -> CountdownTask:
    return CountdownTask(CountdownOptions(**options), CharacterRenderer(), seed=seed)


def score(prompt: Prompt, completion: str, own: CountdownTask) -> tuple[float, str]:
    """What the task's own rewards say of a completion."""
    grades = grade([group_of(completion, prompt=prompt)], own.reward_functions)
    return float(grades.rewards[0, 0]), grades.outcomes[grades.names[0]][0][0]


def test_compact_prompts_are_the_lines_that_the_bundled_model_knows() -> None:
    assert compact(Countdown((11, 25, 11), 25, "all")) == "Use all of 11, 25, 11 to make 25.\n"
    assert compact(Countdown((11, 25, 11), 25, "subset")) == "Use some of 11, 25, 11 to make 25.\n"


def test_chat_prompts_state_numbers_target_tags_and_the_rule() -> None:
    said = {rule: chat_prompt(Countdown((11, 25, 4), 40, rule)) for rule in ("all", "subset")}
    assert [turn["role"] for turn in said["all"]] == ["system", "user"]
    for turns in said.values():
        assert "11, 25, 4" in turns[1]["content"]
        assert "equals 40." in turns[1]["content"]
        assert "<think> </think>" in turns[1]["content"]
        assert "<answer> </answer>" in turns[1]["content"]
    assert "every one of the numbers exactly once" in said["all"][1]["content"]
    assert "at most once" in said["subset"][1]["content"]
    assert "at most once" not in said["all"][1]["content"]


@pytest.mark.parametrize("style", ["compact", "r1"])
@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("mode", ["strict", "last"])
@pytest.mark.parametrize("numbers", ["all", "subset"])
def test_a_solution_earns_the_reward_in_every_style(style, prefill, mode, numbers) -> None:
    own = task(prompt_style=style, prefill_think=prefill, format_mode=mode, numbers=numbers)
    prompt = own.prompt(Countdown((17, 5, 3), 25, own.options.numbers), "x")
    assert prompt.text.endswith("<think>") == prefill
    assert (prompt.messages is not None) == (style == "r1")
    solution = "17+5+3"
    completion = ("" if prefill else "<think>") + f"hm</think>\n<answer>{solution}</answer>"
    assert score(prompt, completion, own) == (1.0, Outcome.CORRECT)
    assert score(prompt, completion + " Done.", own)[0] == (1.0 if mode == "last" else 0.0)
    assert score(prompt, completion.replace(solution, solution + "+1"), own) == (0.0, Outcome.WRONG_NUMBERS)


# Trap: the prompt says one rule and the grader applies another.
@pytest.mark.parametrize(
    ("numbers", "word", "outcome"), [("all", "all", "wrong_numbers"), ("subset", "some", "correct")]
)
def test_the_rule_in_the_prompt_is_the_rule_that_is_graded(numbers: str, word: str, outcome: str) -> None:
    own = task(numbers=numbers)
    prompt = own.prompt(Countdown((17, 5, 3), 12, own.options.numbers), "x")
    assert prompt.text == f"Use {word} of 17, 5, 3 to make 12.\n"
    assert score(prompt, "<think></think><answer>17-5</answer>", own)[1] == outcome


def test_every_step_and_draw_has_a_problem_of_its_own() -> None:
    own = task()
    prompts = [prompt for step in range(4) for prompt in own.prompts(step, range(8))]
    assert len({prompt.id for prompt in prompts}) == 32
    # 30^3 = 27000 draws of numbers alone: with 32 prompts a shared (numbers, target) has a chance below 2%, seed fixed.
    assert len({prompt.text for prompt in prompts}) == 32
    assert own.prompts(2, range(5, 7)) == own.prompts(2, range(8))[5:7]
    last = own.prompts(0, range(DRAWS_PER_STEP - 1, DRAWS_PER_STEP))
    assert last[0].id == f"train/{DRAWS_PER_STEP - 1}"
    assert own.prompts(1, range(1))[0].id == f"train/{DRAWS_PER_STEP}"
    with pytest.raises(AssertionError):
        own.prompts(0, range(DRAWS_PER_STEP, DRAWS_PER_STEP + 1))


def test_the_seed_changes_training_problems_and_no_held_out_one() -> None:
    assert task(seed=1).prompts(0, range(8)) != task(seed=2).prompts(0, range(8))
    assert task(seed=1, held_out_size=20).held_out() == task(seed=2, held_out_size=20).held_out()


def test_held_out_prompts_are_as_many_as_asked_for_and_of_held_out_numbers() -> None:
    prompts = task(held_out_size=33).held_out()
    assert len({prompt.id for prompt in prompts}) == 33
    assert all(held_out(prompt.columns["numbers"]) for prompt in prompts)
    assert not any(held_out(prompt.columns["numbers"]) for prompt in task().prompts(0, range(33)))


def test_the_difficulty_options_reach_the_problems() -> None:
    own = task(num_numbers=4, min_number=2, max_number=9, operators="+*", min_target=50, max_target=60)
    for prompt in own.prompts(0, range(20)):
        assert len(prompt.columns["numbers"]) == 4
        assert all(2 <= number <= 9 for number in prompt.columns["numbers"])
        assert 50 <= prompt.columns["target"] <= 60
    course = task(variant="course", numbers="subset").prompts(0, range(20))
    assert {len(prompt.columns["numbers"]) for prompt in course} == {4}
    assert {prompt.columns["rule"] for prompt in course} == {"subset"}


ALL = Countdown((3, 4, 5), 17, "all")
SUBSET = Countdown((3, 4, 5), 12, "subset")


@pytest.mark.parametrize(
    ("line", "solves"),
    [
        ("3*4=12,12+5=17", True),
        ("5+12=17", False),  # 12 is not on the table
        ("4*3=12,5+12=17", True),
        ("3*4=13,13+4=17", False),  # wrong arithmetic on the way
        ("3*4=12,12+5=18", False),
        ("3*4=12", False),  # 5 is left over, and so is the target
        ("3+4=7,5+12=17", False),
        ("5-3=2,2+4=6", False),
        ("3*4=12,4+5=9,12+9=21", False),
        ("3*4=12, 12+5=17", True),  # white space around a step
        ("3*4=12;12+5=17", False),
        ("3 * 4=12,12+5=17", False),
        ("", False),
        ("1e9+3=17", False),
    ],
)
def test_under_all_a_try_must_end_in_the_target_with_nothing_left(line: str, solves: bool) -> None:
    assert search(ALL, f"<think>{line}\n</think>").successes == solves


@pytest.mark.parametrize(
    ("numbers", "line", "solves"),
    [
        ((3, 4, 5), "3*4=12", True),  # 5 may stay
        ((3, 4, 5), "3*4=12,12+5=17", False),  # beyond the target
        ((3, 4, 5), "4+5=9,9+3=12", True),
        ((6, 4, 5), "6+6=12", False),  # 6 is there once
        ((6, 6, 5), "6+6=12", True),
        ((2, 4, 5), "2*4=8,8+4=12", False),  # 4 is spent
        ((2, 2, 8), "2+2=4,4+8=12", True),  # a result is used like a number
    ],
)
def test_under_subset_numbers_may_stay_and_none_may_be_used_again(numbers, line, solves) -> None:
    assert search(Countdown(numbers, 12, "subset"), line).successes == solves


def test_tries_are_the_lines_before_the_end_of_thinking() -> None:
    text = "<think>3+4=7,7+5=12\n\n3*4=12,12+5=17\n5*4=20,20-3=17\n</think>\n<answer>3*4+5</answer>"
    assert search(ALL, text) == Search(tries=3, successes=2)
    assert search(ALL, "3*4=12,12+5=17\n3*4=1") == Search(tries=2, successes=1, at_once=True)  # cut off
    assert search(ALL, "<think></think>3*4=12,12+5=17") == Search(tries=0, successes=0)


def test_success_is_per_try_and_not_per_completion() -> None:
    # 3 tries with 1 success, and 1 try with 1: (1 + 1) / (3 + 1), where the mean of the two shares is 2/3.
    statistics = search_statistics([Search(3, 1), Search(1, 1, at_once=True)])
    assert statistics == {"tries_per_completion": 2.0, "success_per_try": 0.5, "success_of_first_try": 0.5}
    assert search_statistics([Search(0, 0)]) == {}  # prose, or another model's way of searching
