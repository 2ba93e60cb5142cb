"""Reward functions in a file, asked in the test's process or in workers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import RunError
from posttrain.options.reward import RewardOptions
from posttrain.records import Grades, Group
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.reward_registry import load_reward


def function_of(folder: Path, source: str, name: str = "mine", **options: Any) -> RewardFunction:
    """The function of this name in a file with this content."""
    file = folder / "my_rewards.py"
    if not file.exists() or file.read_text(encoding="utf-8") != source:
        file.write_text(source, encoding="utf-8")
    return load_reward(RewardOptions(path=f"{file}:{name}", **options))


def told(groups: Sequence[Group], function: RewardFunction, **options: Any) -> Any:
    """All that grading says, in terms that compare: the scores and outcomes, or the error."""
    try:
        grades: Grades = grade(groups, [function], **options)
    except RunError as error:
        return str(error)
    return repr(grades.scores.tolist()), grades.outcomes, grades.num_failures
