"""How far it is from `grade` to a reward function of a user's own and back: the files that a reader must open."""

import sys
from pathlib import Path
from types import FrameType

import posttrain
from posttrain.rewards.grading.function import reward_function
from posttrain.rewards.grading.grade import grade
from tests.support.reward_rows import group

PACKAGE = Path(posttrain.__file__).parent
MOST_FILES = 11


def test_a_score_passes_through_few_files() -> None:
    entered: set[str] = set()
    at_the_function: list[set[str]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(path.relative_to(PACKAGE).as_posix())

    def mine(completions: list[str], **columns: object) -> list[float]:
        at_the_function.append(set(entered))
        return [float(len(text)) for text in completions]

    groups, functions = [group(["a", "bc"])], [reward_function(mine)]
    grade(groups, functions)  # what is made once per process is made
    entered.clear()
    sys.setprofile(note)
    try:
        grades = grade(groups, functions)
    finally:
        sys.setprofile(None)
    assert grades.rewards.tolist() == [[1.0, 2.0]]
    assert "rewards/grading/dispatch.py" in at_the_function[-1]
    assert len(entered) <= MOST_FILES, "\n".join(sorted(entered))
