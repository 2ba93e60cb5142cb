"""Groups made by hand, and short ways to score them."""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from posttrain.records import Finish, Grades, Group, Prompt, Rollout, TokenSequence
from posttrain.rewards.grading.grade import grade, reward_function

CHAT = ({"role": "user", "content": "1 + 1?"},)


class Outcome(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"


def group(
    texts: Sequence[str], *, id: str = "p", columns: Mapping[str, object] | None = None, prefill: str = "", **chat: Any
) -> Group:
    prompt = Prompt(id=id, text="1 + 1?" + prefill, tokens=(5,), prefill=prefill, columns=columns or {}, **chat)
    rollouts = tuple(
        Rollout(
            sample=i,
            sequence=TokenSequence.one_turn((i, 9), logprobs=(0.0, 0.0), finish=Finish.STOP if i else Finish.LENGTH),
            text=text,
        )
        for i, text in enumerate(texts)
    )
    return Group(prompt=prompt, draw=0, rollouts=rollouts)


def graded(groups: Sequence[Group], *calls: Callable[..., object], **options: Any) -> Grades:
    return grade(groups, [reward_function(call) for call in calls], **options)


def scores(groups: Sequence[Group], call: Callable[..., object], **options: Any) -> list[list[float | None]]:
    rows = graded(groups, call, **options).scores[0].tolist()
    return [[None if math.isnan(score) else score for score in row] for row in rows]
