"""From the name or path in a recipe to a reward function."""

import importlib

from posttrain.binding import bind
from posttrain.errors import UserError
from posttrain.options.reward import RewardOptions
from posttrain.rewards.grading.function import RewardFunction, load_function, source_at
from posttrain.schemas import did_you_mean

BUILT_IN = {
    "countdown": "posttrain.rewards.countdown:countdown",
    "countdown_last": "posttrain.rewards.countdown:countdown_last",
    "countdown_credit": "posttrain.rewards.countdown:CountdownCredit",
    "countdown_steps": "posttrain.rewards.countdown:CountdownSteps",
    "strict_format": "posttrain.rewards.shaping:strict_format",
    "last_format": "posttrain.rewards.shaping:last_format",
    "line_format": "posttrain.rewards.shaping:line_format",
    "graded_format": "posttrain.rewards.shaping:graded_format",
    "code": "posttrain.rewards.code.code_reward:CodeReward",
    "code_course": "posttrain.rewards.code.code_reward:code_course",
    "exact_match": "posttrain.rewards.exact_match:exact_match",
    "generated": "posttrain.rewards.generated_reward:GeneratedReward",
    "judge": "posttrain.rewards.judge_reward:JudgeReward",
    "math": "posttrain.rewards.math_reward:MathsReward",
    "maths": "posttrain.rewards.math_reward:MathsReward",
    "soft_overlong": "posttrain.rewards.shaping:SoftOverlong",
    "cosine_length": "posttrain.rewards.shaping:CosineLength",
    "group_length": "posttrain.rewards.shaping:GroupLength",
    "repetition": "posttrain.rewards.shaping:Repetition",
    "truncated": "posttrain.rewards.shaping:TruncationPenalty",
    "blocklist": "posttrain.rewards.shaping:Blocklist",
    "refusal": "posttrain.rewards.shaping:Refusal",
    "copied_prompt": "posttrain.rewards.shaping:CopiedPrompt",
    "language_drift": "posttrain.rewards.shaping:LanguageDrift",
    "period_count": "posttrain.rewards.shaping:PeriodCount",
}
"""This package's rewards as MODULE:FUNCTION, or MODULE:CLASS if they have options; imported when used."""


def load_reward(options: RewardOptions) -> RewardFunction:
    """The function or reward model that an item of a recipe's `rewards` names."""
    if options.model:
        from posttrain.rewards.model import reward_model_of  # it loads transformers

        scored = reward_model_of(options)
        return RewardFunction(name=options.called, call=scored, settings=options, bounded=True)
    if options.path:
        place, _, name = options.path.rpartition(":")
        call = load_function(options.path)
        return RewardFunction(name=name, call=call, settings=options, source=source_at(place, name, call))
    if options.name not in BUILT_IN:
        own = "Name your function FILE.py:FUNCTION or package.module:FUNCTION, a reward model `model: FOLDER`."
        raise UserError(f"rewards: no reward function `{options.name}`.  {did_you_mean(options.name, BUILT_IN)}  {own}")
    module, _, function = BUILT_IN[options.name].partition(":")
    call = getattr(importlib.import_module(module), function)
    if isinstance(call, type):
        call = bind(call, options.options, where=f"rewards: {options.name}")
    elif options.options:
        raise UserError(f"rewards: {options.name} has no options. Remove {dict(options.options)}.")
    return RewardFunction(name=options.name, call=call, settings=options, text_only=True, bounded=True)
