"""The mistakes of the laboratory: each symptom on a few steps, beside the same steps without the mistake."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from posttrain import cli
from posttrain.course import exercises, mistakes
from posttrain.course.exercises import Exercise, ExerciseQuestion, solved, solved_by_membership, solved_with_some
from posttrain.course.mistakes import MISTAKES, ignored_labels, raised_alarms, try_mistake
from posttrain.course.trainer import MeasuredStep, rows_taken, sample_step, train

STEPS = 3


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def trained(exercise: Exercise, mistake: int = 0) -> Sequence[MeasuredStep]:
    """Few rows of short completions, so that a step takes a tenth of a second."""
    small = replace(exercise, num_prompts=4, limit=min(exercise.limit, 16))
    return train(small, mistake, MISTAKES[mistake].pays if mistake else None, num_steps=STEPS)


def with_and_without(number: int) -> tuple[Sequence[MeasuredStep], Sequence[MeasuredStep]]:
    """On full stops, whose rewards differ from the first step."""
    return trained(exercises.PROSE), trained(exercises.PROSE, number)


def test_without_a_mistake_the_trainer_agrees_with_the_sampler_and_its_kl_is_true() -> None:
    for exercise in (exercises.PROSE, exercises.EARLY_LETTER):
        for report in trained(exercise):
            assert report.logprob_gap < 1e-4
            assert report.kl == pytest.approx(report.true_kl, abs=1e-6)
            assert report.reward == report.honest_reward


def test_1_and_2_have_no_gradient_and_move_no_weight() -> None:
    for number in (1, 2):
        right, wrong = with_and_without(number)
        assert [each.grad_norm for each in wrong] == [0.0] * STEPS
        assert min(each.grad_norm for each in right) > 0.1
        assert all(each.true_kl < 1e-9 for each in wrong)
        assert right[-1].true_kl > 1e-4


@pytest.mark.parametrize("number", [3, 7, 9])
def test_3_7_and_9_part_the_trainer_from_the_sampler_at_the_first_step(number: int) -> None:
    right, wrong = with_and_without(number)
    assert right[0].logprob_gap < 1e-4
    assert wrong[0].logprob_gap > (0.003 if number == 9 else 0.5)


def test_9_is_apart_by_the_mass_that_was_cut_off() -> None:
    """log μ of a kept token is log π less the log of the mass kept, at least .9, so the gap is at most -log .9."""
    assert 0 < trained(exercises.PROSE, 9)[0].logprob_gap < 0.1054


def test_4_reports_a_kl_of_exactly_0_while_the_policy_leaves_its_reference() -> None:
    right, wrong = with_and_without(4)
    assert [each.kl for each in wrong] == [0.0] * STEPS
    assert wrong[-1].true_kl > 1e-3
    assert right[-1].kl == pytest.approx(right[-1].true_kl, abs=1e-6)


def test_5_ends_in_an_error_or_scores_other_tokens() -> None:
    said = ignored_labels()
    assert "index -100 is out of bounds" in said
    first, second = (float(line.rpartition(" = ")[2]) for line in said.splitlines()[1:])
    assert abs(first - second) > 1


def test_6_misses_the_kl_of_the_first_token() -> None:
    right, wrong = trained(exercises.EARLY_LETTER), trained(exercises.EARLY_LETTER, 6)
    assert wrong[-1].kl < 0.5 * wrong[-1].true_kl
    assert right[-1].true_kl > 1e-3


def test_8_gives_the_stop_token_no_gradient() -> None:
    policy = exercises.FORM.policy()
    sample = sample_step(replace(exercises.FORM, num_prompts=2), policy, 0, None, top_p=1.0)
    stops = sample.rows.tokens[:, -sample.rows.mask.shape[1] :].eq(sample.stop)
    assert sample.rows.mask[stops].all()
    assert stops.any(dim=1).all()  # every one of these answers ends
    taken = rows_taken(sample, policy.tokenizer, 8).mask
    assert not taken[stops].any()
    assert torch.equal(taken | (stops & sample.rows.mask), sample.rows.mask)


def test_10_pays_for_no_right_answer() -> None:
    question = ExerciseQuestion(asked="", numbers=(3, 4, 5, 9), target=12)
    text = "<think>3+4=7,7+5=12!\n</think>\n<answer>(3+4)+5</answer>"
    assert (solved_with_some(question, text), solved(question, text)) == (1, 0)
    assert MISTAKES[10].pays is solved


def test_11_pays_for_a_number_that_is_used_twice() -> None:
    question = ExerciseQuestion(asked="", numbers=(3, 4), target=10)
    text = "<think>3+3=6,6+4=10!\n</think>\n<answer>(3+3)+4</answer>"
    assert (solved_by_membership(question, text), solved(question, text)) == (1, 0)
    assert solved_by_membership(question, text.replace("(3+3)+4", "(5+1)+4")) == 0


def test_12_makes_ratios_of_whole_completions_that_leave_the_range() -> None:
    right, wrong = with_and_without(12)
    assert wrong[0].grad_norm == pytest.approx(right[0].grad_norm, rel=1e-3)  # the reference is the policy still
    assert wrong[-1].grad_norm != pytest.approx(right[-1].grad_norm, rel=1e-3)


def test_13_pays_for_text_behind_the_answer() -> None:
    question = ExerciseQuestion(asked="")
    form = "<think>\na\n</think>\n<answer>\n1\n</answer>"
    behind = f"{form}\nand " + "more " * 40
    assert exercises.long_in_form(question, form) == exercises.long_in_form_or_beyond(question, form) == 1
    assert exercises.long_in_form(question, behind) == 0
    assert exercises.long_in_form_or_beyond(question, behind) > 1.9


def measured(reward: float, honest: float, *, cut_off: float = 0.0, gap: float = 0.0) -> MeasuredStep:
    numbers = {"kl": 0.0, "true_kl": 0.0, "length": 20.0, "grad_norm": 1.0, "loss": 0.0}
    return MeasuredStep(reward=reward, honest_reward=honest, cut_off=cut_off, logprob_gap=gap, **numbers)


def test_alarms_of_a_mistaken_run_are_those_of_the_library_on_its_numbers() -> None:
    steps = range(20)
    assert raised_alarms([measured(0.5, 0.5, gap=1e-4)] * 20) == {}
    assert raised_alarms([measured(0.5, 0.5, gap=2e-3)] * 20) == {"sampler gap": 1}
    assert raised_alarms([measured(0.0, 0.2)] * 12) == {"same reward": 1, "no signal": 10}
    assert raised_alarms([measured(0.5, 0.5, cut_off=0.4 * (step == 7)) for step in steps]) == {"length": 8}
    beyond = [measured(0.1 + step / 25, 0.1) for step in steps]
    assert raised_alarms(beyond, honest=True).keys() == {"reward alone"}
    assert raised_alarms(beyond) == {}
    both_rise = [measured(0.1 + step / 25, 0.1 + step / 50) for step in steps]
    assert raised_alarms(both_rise, honest=True) == {}


def test_the_command_trains_both_prints_what_tells_and_draws(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MISTAKES, 6, replace(MISTAKES[6], exercise=replace(exercises.EARLY_LETTER, num_prompts=2)))
    assert cli.main(["course", "mistake", "6", "--steps", "2"]) == 0
    shown, progress = capsys.readouterr()
    assert "without the mistake: 2 to do" in progress
    assert "Mistake 6: the KL is computed one position too late" in shown
    assert MISTAKES[6].told_by in shown
    assert (tmp_path / "mistake-6.png").is_file()
    assert cli.main(["course", "mistake", "5"]) == 0
    assert "out of bounds" in capsys.readouterr().out


def test_both_runs_of_a_trial_begin_alike_and_a_trial_repeats_to_the_bit() -> None:
    small = replace(exercises.EARLY_LETTER, num_prompts=2)
    first, again = train(small, num_steps=2), train(small, num_steps=2)
    assert first == again
    assert [a != b for a, b in pairwise(first)] == [True]
    assert try_mistake.__kwdefaults__ == {"num_steps": 20, "progress": None}
    assert sorted((*MISTAKES, mistakes.IGNORED_LABELS)) == [*range(1, 14)]
