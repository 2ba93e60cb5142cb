"""A thousand programs, and two thousand completions, good and bad; `make soak` runs a hundred thousand of each."""

from tests.soak import COMPLETIONS, PROGRAMS, soak, soak_workers


def test_nothing_is_left_behind_and_every_outcome_comes_as_often_as_it_should() -> None:
    outcomes = soak(1000)
    assert outcomes == {
        "passed": 75 * 10,
        "raised": (8 + 4 + 3 + 2) * 10,
        "syntax_error": 5 * 10,
        "output_limit": 2 * 10,
        "time_limit": 1 * 10,
    }
    assert sum(count for _, _, count in PROGRAMS) == 100


def test_a_function_in_workers_leaves_nothing_behind_and_every_outcome_comes_as_often_as_it_should() -> None:
    outcomes = soak_workers(2000)
    assert outcomes == {
        "4.0": 480 * 4 + 100 + 1000,  # the length of "good", of which there are more at the end
        "6.0": (5 + 2) * 4,  # and of "prints" and "starts"
        "InvalidScore": 10 * 4,
        "ScoringFailure": (2 + 1) * 4,
    }
    assert sum(COMPLETIONS.values()) == 500
