"""The task of sentences: its beginnings and reward, what full stops are for, and the texts that models learn before."""

import re
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from posttrain.options.task import SentencesOptions
from posttrain.records import Finish, Group, Prompt, Rollout, TokenSequence
from posttrain.rewards.grading.grade import grade
from posttrain.tasks import sentences_task
from posttrain.tasks.base import Messages
from posttrain.tasks.sentences_task import PeriodUse, SentencesTask, period_strategies, period_uses
from posttrain.training.sft.learned_rows import SentenceDemonstrations

MANY = [sentences_task.grammar_text(Random(f"text {number}")) for number in range(400)]


class CharacterRenderer:
    """One token per character."""

    def render(self, content: str | Messages, *, id: str, prefill: str, columns: Mapping[str, object]) -> Prompt:
        assert isinstance(content, str)
        return Prompt(id=id, text=content, tokens=tuple(map(ord, content)), columns=columns)


def task(**options: Any) -> SentencesTask:
    return SentencesTask(SentencesOptions(**options), CharacterRenderer())


def group_of(*completions: str) -> Group:
    rollouts = tuple(
        Rollout(sample=i, sequence=TokenSequence.one_turn((1,), logprobs=(0.0,), finish=Finish.LENGTH), text=text)
        for i, text in enumerate(completions)
    )
    return Group(prompt=task().prompts(1, range(1))[0], draw=0, rollouts=rollouts)


def test_every_beginning_comes_as_often_as_the_others_and_held_out_ones_are_others() -> None:
    own = task(openings=("One", "Two"), held_out_openings=("Three",), held_out_size=3)
    assert [prompt.text for prompt in own.prompts(1, range(1, 6))] == ["Two", "One", "Two", "One", "Two"]
    assert [(prompt.text, prompt.id) for prompt in own.held_out()] == [("Three", f"held-out/{i}") for i in range(3)]


def test_a_completion_earns_its_full_stops_however_many() -> None:
    grades = grade([group_of("It rained. It", "." * 30, "none")], task().reward_functions)
    assert grades.rewards[0].tolist() == [1, 30, 0]


def test_the_probe_says_what_full_stops_are_for() -> None:
    [probe] = task().probes().values()
    found = probe.measure([group_of("It rained. Dr. Lee"), group_of("3.5 miles...")])
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
