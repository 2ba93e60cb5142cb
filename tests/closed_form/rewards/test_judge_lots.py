"""Which candidate a judge is shown first: by a lot that is the same each time, and even."""

from posttrain.rewards.judge_prompts import shown_second


def test_the_lot_hangs_on_what_is_compared_alone_and_is_even() -> None:
    drawn = [shown_second("Which?", f"answer {number}", "another") for number in range(400)]
    assert drawn == [shown_second("Which?", f"answer {number}", "another") for number in range(400)]
    assert 160 < sum(drawn) < 240  # within 4 deviations, 10 each, of 200
    assert shown_second("a\ud800", "b", "c") in (True, False)  # half of a character is a text too
