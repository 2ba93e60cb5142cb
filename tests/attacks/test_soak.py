"""Two thousand programs of all kinds, good and bad, through one sandbox; `make soak` runs a hundred thousand."""

from tests.soak import PROGRAMS, soak


def test_nothing_is_left_behind_and_every_outcome_comes_as_often_as_it_should() -> None:
    outcomes = soak(2000)
    assert outcomes == {
        "passed": 75 * 20,
        "raised": (8 + 4 + 3 + 2) * 20,
        "syntax_error": 5 * 20,
        "output_limit": 2 * 20,
        "time_limit": 1 * 20,
    }
    assert sum(count for _, _, count in PROGRAMS) == 100
