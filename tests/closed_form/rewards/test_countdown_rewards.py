"""The Countdown, format and process reward functions, at the cases that their definition turns on."""

import pytest

from posttrain.errors import UserError
from posttrain.records import Finish
from posttrain.rewards.countdown import CountdownCredit, CountdownSteps, Outcome, countdown, countdown_last
from posttrain.rewards.grading.answers import Span
from posttrain.rewards.shaping import FormatOutcome, graded_format, last_format, strict_format
from tests.support.refusals import refused

RIGHT = "<think>hm</think>\n<answer>(17-5)*3</answer>"
WRONG = "<think>hm</think>\n<answer>17-5*3</answer>"


HM = "<think></think><answer>{}</answer>"


@pytest.mark.parametrize(
    ("text", "finish", "numbers", "target", "rule", "outcome"),
    [
        (RIGHT, "stop", [17, 5, 3], 36, "all", Outcome.CORRECT),
        (WRONG, "stop", [17, 5, 3], 36, "all", Outcome.WRONG_VALUE),
        ("", "stop", [17, 5, 3], 36, "all", Outcome.NO_ANSWER),
        ("<think>", Finish.LENGTH, [17, 5, 3], 36, "all", Outcome.TRUNCATED),
        ("<think>17", Finish.STOP, [17, 5, 3], 36, "all", Outcome.NO_ANSWER),
        # Each completion is graded on its own problem.
        (RIGHT, "stop", [3, 5, 17], 36, "all", Outcome.CORRECT),
        (RIGHT, "stop", [17, 5, 3], 37, "all", Outcome.WRONG_VALUE),
        (RIGHT, "stop", [17, 5, 4], 36, "all", Outcome.WRONG_NUMBERS),
        (RIGHT, "stop", [17, 5, 3, 9], 36, "subset", Outcome.CORRECT),
        # Trap: stated as "at most once", graded as "exactly once".  Here the rule is one value of the problem.
        (HM.format("17-5"), "stop", [17, 5, 3], 12, "all", Outcome.WRONG_NUMBERS),
        (HM.format("17-5"), "stop", [17, 5, 3], 12, "subset", Outcome.CORRECT),
        # Trap: a subset check by membership, under which 17+17+5-3 = 36 passes.
        (HM.format("17+17+5-3"), "stop", [17, 5, 3], 36, "all", Outcome.WRONG_NUMBERS),
        (HM.format("17+17+5-3"), "stop", [17, 5, 3], 36, "subset", Outcome.WRONG_NUMBERS),
        (HM.format("17+17+5-3"), "stop", [17, 17, 5, 3], 36, "all", Outcome.CORRECT),
    ],
)
def test_a_correct_answer_is_worth_one_and_everything_else_nothing(
    text, finish, numbers, target, rule, outcome
) -> None:
    columns = {"completions": [RIGHT, text], "finish_reasons": ["stop", finish], "numbers": [[17, 5, 3], numbers]}
    graded = countdown(**columns, target=[36, target], rule=["all", rule])
    assert graded == [(1.0, Outcome.CORRECT), (float(outcome is Outcome.CORRECT), outcome)]


@pytest.mark.parametrize(
    ("text", "numbers", "strict", "last"),
    [
        # Without a rule column every number has to be used.
        (RIGHT, [17, 5, 3, 9], Outcome.WRONG_NUMBERS, Outcome.WRONG_NUMBERS),
        ("So: " + RIGHT, [17, 5, 3], Outcome.MALFORMED, Outcome.CORRECT),
    ],
)
def test_the_two_functions_read_in_their_modes(text, numbers, strict, last) -> None:
    columns = {"completions": [text], "finish_reasons": ["stop"], "numbers": [numbers], "target": [36]}
    assert [reward(**columns)[0].outcome for reward in (countdown, countdown_last)] == [strict, last]


@pytest.mark.parametrize(
    ("numbers", "target", "rule", "said"),
    [
        ([17, 5, 3], "36", "all", "target = '36'"),
        ([17, 5, 3], 36.0, "all", "target = 36.0"),
        (["17", "5", "3"], 36, "all", "whole numbers"),
        ("17 5 3", 36, "all", "whole numbers"),
        ([17, -5, 3], 36, "all", "numbers = [17, -5, 3]"),
        ([17, 5, 3], 36, "any", "must be all or subset"),
    ],
)
def test_columns_that_no_answer_could_meet_are_an_error_and_not_a_zero(numbers, target, rule, said) -> None:
    columns = {"completions": [RIGHT], "finish_reasons": ["stop"]}
    with refused(said):
        countdown(numbers=[numbers], target=[target], rule=[rule], **columns)


FORMAT_CASES = [
    (RIGHT, 1.0, 1.0, 1.0),
    (WRONG, 1.0, 1.0, 1.0),  # format does not look at the value
    ("<think>hm</think><answer>((</answer>", 1.0, 1.0, 1.0),  # nor at the syntax
    ("<think>hm</think><answer>= 36</answer>", 1.0, 1.0, 0.5),
    ("<think>hm</think><answer>17.0-5*3</answer>", 1.0, 1.0, 0.5),
    ("<think>hm</think><answer> </answer>", 1.0, 1.0, 0.5),
    ("<think>hm</think><answer>\n(17-5)*3\n</answer>", 1.0, 1.0, 1.0),
    ("So: " + RIGHT, 0.0, 1.0, 0.0),
    (RIGHT + " Done.", 0.0, 1.0, 0.0),
    (RIGHT + RIGHT, 0.0, 1.0, 0.0),
    ("<think>hm</think> so <answer>36</answer>", 0.0, 0.0, 0.0),
    ("<answer>(17-5)*3</answer>", 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("text", "strict", "last", "graded"), FORMAT_CASES)
def test_format_rewards(text: str, strict: float, last: float, graded: float) -> None:
    columns = {"completions": [text], "finish_reasons": ["stop"], "prompts": ["?"]}
    scores = [reward(**columns)[0].score for reward in (strict_format, last_format, graded_format)]
    assert scores == [strict, last, graded]


@pytest.mark.parametrize("reward", [strict_format, last_format, graded_format])
def test_format_outcomes_tell_a_cut_completion_from_a_shapeless_one(reward) -> None:
    columns = {"completions": ["<think>", "<think>", RIGHT], "finish_reasons": ["length", "stop", "length"]}
    outcomes = [FormatOutcome.TRUNCATED, FormatOutcome.UNFORMATTED, FormatOutcome.FORMATTED]
    assert [each.outcome for each in reward(**columns)] == outcomes


def test_the_graded_format_names_extra_text() -> None:
    [graded] = graded_format(completions=["<think></think><answer>x</answer>"], finish_reasons=["stop"])
    assert graded == (0.5, FormatOutcome.EXTRA_TEXT)


PAYS = {"step": 0.01, "attempt": 0.02, "hit": 0.2, "cost": 0.03, "most": 0.5}


def marks(text: str, *, rule: str = "all", **options: float) -> list[tuple[str, float]]:
    """What each marked stretch of the text says, and earns; the puzzle is 17 from 3, 4 and 5."""
    reward = CountdownSteps(**{**PAYS, **options})
    (given,) = reward(completions=[text], numbers=[[3, 4, 5]], target=[17], rule=[rule])
    assert given.score == 0.0
    assert all(isinstance(span, Span) for span in given.spans)
    return [(text[start:end], pytest.approx(value, abs=1e-12)) for start, end, value in given.spans]


LINE, OTHER = "3*4=12,12+5=17!", "4*3=12,5+12=17!"
FIRST = ("3*4=12", 0.01)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        # Right steps and a new try earn, and are marked where they stand.
        (
            "<think>4+3=7,7+5=12.\n3*4=12,12+5=17!\n</think>\n<answer>3*4+5</answer>",
            {},
            [
                ("4+3=7", 0.01),
                ("7+5=12", 0.01),
                ("4+3=7,7+5=12.", 0.02),
                FIRST,
                ("12+5=17", 0.01),
                ("3*4=12,12+5=17!", 0.2),
            ],
        ),
        # A wrong step costs, and ends its try; in the second 4 is spent.
        ("<think>3*4=13,13+4=17!\n", {}, [("3*4=13", -0.03)]),
        ("<think>3*4=12,12+4=16\n", {}, [FIRST, ("12+4=16", -0.03)]),
        ("<think>5-3=2,3-5=2\n", {}, [("5-3=2", 0.01), ("3-5=2", -0.03)]),
        # A step made again earns nothing, also the other way round; other sides of a difference are another step.
        *[(f"<think>3*4=12\n{again}\n", {}, [FIRST, (again, 0.0)]) for again in ("3*4=12", "4*3=12", "03*4=12")],
        ("<think>5-4=1\n4/4=1\n", {}, [("5-4=1", 0.01), ("4/4=1", -0.03)]),
        # A try that does not use all is complete under subset only.
        ("3*4=12\n", {}, [FIRST]),
        ("3*4=12\n", {"rule": "subset"}, [FIRST, ("3*4=12", 0.02)]),
        # What is earned and what is charged stop at most.
        (f"{LINE}\n4+5=9\n", {"most": 0.205}, [FIRST, ("12+5=17", 0.01), (LINE, 0.185), ("4+5=9", 0.0)]),
        ("1+1=2\n" * 3, {"cost": 0.2, "hit": 0.2, "most": 0.3}, [("1+1=2", -0.2), ("1+1=2", -0.1), ("1+1=2", 0.0)]),
        # Only lines of the thinking that begin with a step are read; white space around a step is none of it.
        (
            "  <think> 3*4=12 \nso 4+5=9\n3 * 4=12\n\n5+3=8; 8+4=12.\n5+3=8, 8+4=12 .\n</think>3+4=7<think>\n4*5=20",
            {},
            [FIRST, ("5+3=8", 0.01), ("8+4=12", 0.01), ("5+3=8, 8+4=12 .", 0.02)],
        ),
    ],
)
def test_which_step_and_which_try_earns_what(text, options, expected) -> None:
    assert marks(text, **options) == expected


def test_a_try_made_again_costs_and_the_target_is_hit_once() -> None:
    assert [each[1] for each in marks(f"{LINE}\n{LINE}\n{OTHER}\n") if "," in each[0]] == [0.2, -0.03, -0.03]
    # Another way to the target is a new try, and no second hit: 20 - 3 after 12 + 5.
    assert marks(f"{LINE}\n4*5=20,20-3=17!\n")[-1] == ("4*5=20,20-3=17!", 0.02)
    assert marks("<think>5-4=1,3-1=2\n5-3=2,4-2=2\n")[3:5] == [("5-3=2", 0.01), ("4-2=2", 0.01)]
    assert len(marks("3*4=12\n" * 1001)) == 1000, "no more tries are read"
    given = CountdownSteps()(completions=["3*4=12", "6+1=7"], numbers=[(3, 4, 5), (6, 1)], target=[17, 7])
    assert [len(each.spans) for each in given] == [1, 2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"most": 0.0}, "most = 0.0"),
        ({"hit": 0.6}, "hit = 0.6 must be from 0 to most = 0.5"),
        ({"cost": -0.1}, "cost = -0.1"),
        ({"step": float("nan")}, "step = nan"),
    ],
)
def test_what_is_paid_for_the_way_is_bounded(options: dict[str, float], says: str) -> None:
    with refused(says):
        CountdownSteps(**options)


@pytest.mark.parametrize(
    ("answer", "score", "outcome"),
    [
        ("3 + 4 + 5", 1.0, Outcome.CORRECT),
        ("3 * 4 - 5", 0.2 * (1 - 5 / 12), Outcome.WRONG_VALUE),
        ("5 * 4 - 3", 0.2 * (1 - 5 / 12), Outcome.WRONG_VALUE),
        ("3 * 4 * 5", 0.0, Outcome.WRONG_VALUE),
        ("3 / 4 + 5", 0.2 * (5.75 / 12), Outcome.WRONG_VALUE),
        ("3 / (4 - 4) + 5", 0.0, Outcome.WRONG_NUMBERS),
        ("12", 0.0, Outcome.WRONG_NUMBERS),
        ("11 + 1", 0.0, Outcome.WRONG_NUMBERS),
        ("nearly 12", 0.0, Outcome.MALFORMED),
    ],
)
def test_what_an_answer_is_worth(answer: str, score: float, outcome: Outcome) -> None:
    given = {"completions": [HM.format(answer)], "finish_reasons": ["stop"]}
    (graded,) = CountdownCredit(credit=0.2)(**given, numbers=[[3, 4, 5]], target=[12])
    assert graded == (pytest.approx(score), outcome)


def test_a_division_by_zero_is_near_nothing() -> None:
    given = {"completions": [HM.format("5 / (4 - 4)")], "finish_reasons": ["stop"]}
    (graded,) = CountdownCredit()(**given, numbers=[[5, 4, 4]], target=[5])
    assert graded == (0.0, Outcome.WRONG_VALUE)


@pytest.mark.parametrize("credit", [0.0, 1.0, -0.1])
def test_near_is_worth_less_than_right(credit: float) -> None:
    with pytest.raises(UserError):
        CountdownCredit(credit=credit)
