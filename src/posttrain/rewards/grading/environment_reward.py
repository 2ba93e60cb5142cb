"""The rewards that an environment gave with its replies, as one more reward function of a run."""

from collections.abc import Sequence

from posttrain.rewards.grading.function import RewardFunction


def environment(
    completions: Sequence[object], environment_rewards: Sequence[float | None] = (), **_: object
) -> list[float | None]:
    """What the replies to each completion earned together; None where no reply had a reward."""
    return list(environment_rewards) or [None] * len(completions)


ENVIRONMENT_REWARD = RewardFunction(name=environment.__name__, call=environment, bounded=True)
