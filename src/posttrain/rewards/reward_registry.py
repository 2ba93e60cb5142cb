"""From the name or path in a recipe to a reward function."""

import importlib
from collections.abc import Callable
from pathlib import Path

from posttrain.binding import bind, object_in_file
from posttrain.errors import UserError
from posttrain.options.reward import RewardOptions
from posttrain.rewards.grading.function import RewardFunction, source_in_file
from posttrain.schemas import did_you_mean

BUILT_IN = {
    "countdown": "posttrain.rewards.countdown.grader:countdown",
    "countdown_last": "posttrain.rewards.countdown.grader:countdown_last",
    "countdown_credit": "posttrain.rewards.countdown.partial_credit:CountdownCredit",
    "strict_format": "posttrain.rewards.format:strict_format",
    "last_format": "posttrain.rewards.format:last_format",
    "line_format": "posttrain.rewards.format:line_format",
    "graded_format": "posttrain.rewards.format:graded_format",
    "code": "posttrain.rewards.code.code_reward:CodeReward",
    "code_course": "posttrain.rewards.code.code_reward:code_course",
    "judge": "posttrain.rewards.judge.judge_reward:JudgeReward",
    "math": "posttrain.rewards.maths.math_reward:MathsReward",
    "maths": "posttrain.rewards.maths.math_reward:MathsReward",
    **{
        name: f"posttrain.rewards.shaping:{kind}"
        for name, kind in {
            "soft_overlong": "SoftOverlong",
            "cosine_length": "CosineLength",
            "group_length": "GroupLength",
            "repetition": "Repetition",
            "truncated": "TruncationPenalty",
            "blocklist": "Blocklist",
            "refusal": "Refusal",
            "copied_prompt": "CopiedPrompt",
            "language_drift": "LanguageDrift",
            "period_count": "PeriodCount",
        }.items()
    },
}
"""The reward functions of this package as MODULE:FUNCTION, or MODULE:CLASS where they have options.

A module is imported when a recipe asks for it.
"""


def load_reward(options: RewardOptions) -> RewardFunction:
    """The function, or the reward model, that an item of a recipe's `rewards` names, with its weight."""
    if options.model:
        from posttrain.rewards.model import RewardModel  # it loads transformers

        scored = RewardModel(options.model, **options.model_options)
        return RewardFunction(name=options.called, call=scored, settings=options, bounded=True)
    if options.path:
        file, _, _ = options.path.rpartition(":")
        call, name = function_in_file(options.path)
        return RewardFunction(name=name, call=call, settings=options, source=source_in_file(Path(file), name))
    if options.name not in BUILT_IN:
        raise UserError(
            f"rewards: no reward function `{options.name}`.  {did_you_mean(options.name, BUILT_IN)}"
            "  A function of your own is given as FILE.py:FUNCTION, a reward model by its folder as `model: FOLDER`."
        )
    module, _, function = BUILT_IN[options.name].partition(":")
    call = getattr(importlib.import_module(module), function)
    if isinstance(call, type):
        call = bind(call, options.options, where=f"rewards: {options.name}")
    elif options.options:
        raise UserError(f"rewards: {options.name} has no options, but is given {dict(options.options)}")
    return RewardFunction(name=options.name, call=call, settings=options, text_only=True, bounded=True)


def function_at(place: str, name: str) -> object:
    """The function of a source, in another process than the one that made the source."""
    if place.endswith(".py"):
        return function_in_file(f"{place}:{name}")[0]
    try:
        found: object = importlib.import_module(place)
    except Exception as error:
        raise UserError(f"rewards: module {place} cannot be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        found = getattr(found, part)
    return found


def function_in_file(path: str) -> tuple[Callable[..., object], str]:
    """The function that FILE.py:FUNCTION names, and its name."""
    file, _, name = path.rpartition(":")
    call = object_in_file(path, where="rewards")
    if not callable(call) or isinstance(call, type):
        raise UserError(
            f"rewards: `{name}` in {file} is a {type(call).__name__} and cannot score completions; name a function, or"
            " an object with a __call__ method"
        )
    return call, name
