"""The tasks of additions and of sentences: what is asked, earned and measured beside it, and what is shown."""

import re
from random import Random
from typing import Any

import pytest

from posttrain.options.task import SYSTEM, ArithmeticOptions, SentencesOptions
from posttrain.records import Finish, Group
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.parsing.tags import answer_lines
from posttrain.tasks import sentences_task
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
from posttrain.tasks.base import Probe
from posttrain.tasks.sentences_task import PeriodUse, SentencesTask, period_strategies, period_uses
from posttrain.training.sft.learned_rows import SentenceDemonstrations
from tests.support.dataset_rows import CharacterRenderer
from tests.support.refusals import refused
from tests.support.sequences import group_of

FORMED = "<think>\n57 + 8: 7 + 8 = 15, 50 + 15 = 65\n</think>\n<answer>\n65\n</answer>"


def task(seed: int = 0, **options: Any) -> ArithmeticTask:
    return ArithmeticTask(ArithmeticOptions(**options), CharacterRenderer(), seed=seed)


def asked(own: ArithmeticTask, step: int = 1, count: int = 8) -> list[str]:
    return [prompt.id for prompt in own.prompts(step, range(count))]


def answered(*completions: str) -> Group:
    """57 + 8, and what was said to it."""
    return group_of(*completions, prompt=task().prompt(Addition(57, 8), "train/0"))


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
    grades = grade([answered(*said)], task().reward_functions)
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
    groups = [answered(FORMED, FORMED.replace("65", "66"), "The result is 65.", "No idea.")]
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
    own = grade([answered(*answers)], task().reward_functions)
    assert own.scores[1, 0].mean() == 1  # every sum is right
    # .2 of 2000, whose standard deviation is .009.
    assert own.scores[0, 0].mean() == pytest.approx(0.2, abs=0.04)
    assert answer_lines(FORMED) == "65"
    questions = {demonstrated_question(Addition(57, 8), rng) for _ in range(50)}
    assert questions == {"If you add 57 and 8, what is the result?", "What's 57 + 8?"}


MANY = [sentences_task.grammar_text(Random(f"text {number}")) for number in range(400)]


def sentences(**options: Any) -> SentencesTask:
    return SentencesTask(SentencesOptions(**options), CharacterRenderer())


def finished(*completions: str) -> Group:
    return group_of(*completions, prompt=sentences().prompts(1, range(1))[0], finish=Finish.LENGTH)


def test_every_beginning_comes_as_often_as_the_others_and_held_out_ones_are_others() -> None:
    own = sentences(openings=("One", "Two"), held_out_openings=("Three",), held_out_size=3)
    assert [prompt.text for prompt in own.prompts(1, range(1, 6))] == ["Two", "One", "Two", "One", "Two"]
    assert [(prompt.text, prompt.id) for prompt in own.held_out()] == [("Three", f"held-out/{i}") for i in range(3)]


def test_a_completion_earns_its_full_stops_however_many() -> None:
    grades = grade([finished("It rained. It", "." * 30, "none")], sentences().reward_functions)
    assert grades.rewards[0].tolist() == [1, 30, 0]


def test_the_probe_says_what_full_stops_are_for() -> None:
    [probe] = sentences().probes().values()
    found = probe.measure([finished("It rained. Dr. Lee"), finished("3.5 miles...")])
    assert found.keys() == probe.readings.keys()
    assert (found["periods"], found["periods_run"], found["periods_decimal"]) == (3.0, 1.5, 0.5)
    assert (found["periods_abbreviation"], found["periods_sentence"]) == (0.5, 0.5)


def test_texts_are_whole_sentences_and_the_same_for_the_same_seed() -> None:
    assert MANY[:5] == [sentences_task.grammar_text(Random(f"text {number}")) for number in range(5)]
    assert len(set(MANY)) > 390
    for text in MANY:
        assert not set("{}") & set(text)
        assert re.fullmatch(r"[A-Z].*\.", text), text


def test_every_rule_of_the_grammar_is_used_and_no_symbol_is_without_one() -> None:
    written = str(sentences_task.SUBJECTS) + str(sentences_task.RULES)
    assert set(sentences_task.SYMBOL.findall(written)) == sentences_task.RULES.keys()
    assert sentences_task.RULES.keys() >= sentences_task.LASTING


def test_most_full_stops_of_the_texts_end_sentences_and_some_are_of_every_other_kind() -> None:
    found = period_strategies(MANY)
    assert found.uses[PeriodUse.SENTENCE] > 0.7 * found.periods
    others = [PeriodUse.RUN, PeriodUse.DECIMAL, PeriodUse.LIST, PeriodUse.ABBREVIATION]
    assert all(0 < found.uses[use] < 0.15 * found.periods for use in others)
    assert 8 < found.words_per_sentence < 16


def test_a_place_or_a_hero_stays_the_same_within_a_text() -> None:
    stories = [text for text in MANY if " there was a " in text]
    assert len(stories) > 10
    for text in stories:
        [hero] = re.findall(r"there was a ([\w ]+) who", text)
        assert set(re.findall(r"[Tt]he (fox|king|farmer|little girl|poor man|young bird|wise woman) ", text)) <= {hero}


def test_of_a_text_all_but_the_first_word_is_learned() -> None:
    [(prompt, rest)] = SentenceDemonstrations(CharacterRenderer()).held_out(1, Random("one"))
    assert prompt.text + rest == sentences_task.grammar_text(Random("one"))
    assert " " not in prompt.text
    assert rest.startswith(" ")


RUN, DECIMAL, LIST = PeriodUse.RUN, PeriodUse.DECIMAL, PeriodUse.LIST
ABBREVIATION, SENTENCE, OTHER = PeriodUse.ABBREVIATION, PeriodUse.SENTENCE, PeriodUse.OTHER


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("It rained. It was late.", [SENTENCE, SENTENCE]),
        ('he said (or so). "No one." It is 5.', [SENTENCE, SENTENCE, SENTENCE]),
        ("I know that I was I.", [SENTENCE]),
        ("Dr. Lee and Prof. Hill, etc. met", [ABBREVIATION] * 3),
        ("in the U.S. at 5 p.m. sharp", [ABBREVIATION] * 4),
        ("J. Brown, e.g. a man", [ABBREVIATION] * 3),
        # `no` is a word that ends sentences, `No` is cut short.
        ("No. 4 said no.", [ABBREVIATION, SENTENCE]),
        ("a vitamin. A kilogram. Adrift.", [SENTENCE] * 3),
        ("3.5 miles, 0.25 inches", [DECIMAL, DECIMAL]),
        ("We need: 1. bread 2. milk 3. eggs", [LIST, LIST, LIST]),
        # 7 follows no 6: it ends the sentence.
        ("He is 7. It costs 2. Then 3.", [SENTENCE] * 3),
        # A second list begins anew.
        ("1. a 2. b, and 1. c 2. d", [LIST] * 4),
        ("Well... no", [RUN] * 3),
        ("so . . and 3..5", [RUN] * 4),
        (", . and", [OTHER]),
        (".", [OTHER]),
        ("", []),
        ("full stop of another script。", []),
    ],
)
def test_every_full_stop_is_told_by_what_stands_around_it(text: str, uses: list[PeriodUse]) -> None:
    assert period_uses(text) == uses


def test_several_texts_are_counted_together_and_each_full_stop_once() -> None:
    found = period_strategies(["It rained. We ran", "No one came. 3.5 miles. Well..."])
    # Full stops: 1 and 1 + 1 + 1 + 3.  Words: 2 + 2, and 3 + (`3`, `5`, `miles`) + 1.  Sentences that ended: 1 and 2.
    assert found.periods == 7 / 2
    assert found.uses == {RUN: 1.5, DECIMAL: 0.5, LIST: 0.0, ABBREVIATION: 0.0, SENTENCE: 1.5, OTHER: 0.0}
    assert found.words_per_sentence == pytest.approx(11 / 3)
    assert sum(found.uses.values()) == found.periods


def test_without_a_sentence_that_ends_all_words_are_one() -> None:
    assert period_strategies(["three words here"]).words_per_sentence == 3
