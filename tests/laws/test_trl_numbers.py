"""No number in TRL's configs is swallowed: each is one that its field may be, or is refused by the field's name.

The table says, field by field, which of some strange values TRL 1.16 and transformers give a meaning to; of the others
none reaches a run.
"""

import math
from typing import Any, get_args, get_type_hints

import pytest

from posttrain.options.model import ModelOptions
from posttrain.trl import GRPOConfig, ModelConfig, SFTConfig
from posttrain.trl.configs.field_rules import CheckedFields, Treatment, require_values
from posttrain.trl.configs.recipe import batch_plan, rl_config
from tests.support.refusals import refused

PROBES = (0, -1, 3, 0.5, -0.5, 1.5, math.inf, -math.inf, math.nan, True, "a word", None)
ANY = (0.5, 1.5, 3)
OF_ALL = {
    "per_device_train_batch_size": (3,),
    "num_train_epochs": ANY,
    "max_steps": (-1, 0, 3),
    "learning_rate": ANY,
    "warmup_steps": (0, *ANY),
    "warmup_ratio": (0, 0.5, None),
    "weight_decay": (0, *ANY),
    "adam_beta1": (0, 0.5),
    "adam_beta2": (0, 0.5),
    "max_grad_norm": (0, *ANY, math.inf, None),
    "gradient_accumulation_steps": (3,),
    "logging_steps": (0.5, 3),
    "eval_steps": (0, 0.5, 3, None),
    "eval_delay": (0, *ANY),
    "save_steps": (0, 0.5, 3),
    "save_total_limit": (-1, 0, 3, None),
    "seed": (0, 3),
}
ALLOWED: dict[type[CheckedFields], dict[str, tuple[Any, ...]]] = {
    GRPOConfig: {
        **OF_ALL,
        **dict.fromkeys(("num_generations", "max_completion_length", "num_iterations", "ref_model_sync_steps"), (3,)),
        **dict.fromkeys(("generation_batch_size", "steps_per_generation", "max_prompt_length"), (3, None)),
        "max_tool_calling_iterations": (0, 3, None),
        "num_generations_eval": (0, 3, None),
        "temperature": ANY,
        "top_p": (0.5, None),
        "top_k": (0, -1, 3, None),
        "min_p": (0, 0.5, None),
        "beta": (0, *ANY),
        "epsilon": (0, 0.5),
        "delta": (1.5, 3, math.inf, None),
        "epsilon_high": (0, *ANY, math.inf, None),
        "reward_weights": (0, -1, 3, 0.5, -0.5, 1.5, None),
        "ref_model_mixup_alpha": (0, 0.5),
    },
    SFTConfig: {**OF_ALL, "max_length": (3, None), "max_seq_length": (3, None)},
    ModelConfig: {"lora_r": (3,), "lora_alpha": ANY, "lora_dropout": (0, 0.5)},
}


NUMBERS = [
    (config, name)
    for config in ALLOWED
    for name, kind in get_type_hints(config).items()
    if name in (rules := config.field_rules)
    and {part for each in get_args(kind) or (kind,) for part in (each, *get_args(each))} & {int, float}
    and rules[name].treatment not in (Treatment.IDLE, Treatment.REFUSED)
]


@pytest.mark.parametrize("config", ALLOWED, ids=lambda config: config.__name__)
def test_the_table_has_every_field_that_is_a_number_and_does_something(config: Any) -> None:
    assert sorted(ALLOWED[config]) == sorted(name for each, name in NUMBERS if each is config)


@pytest.mark.parametrize(("config", "name"), NUMBERS, ids=lambda each: getattr(each, "__name__", each))
def test_a_number_is_one_that_the_field_may_be_or_is_refused_by_its_name(config: Any, name: str) -> None:
    allowed = [repr(each) for each in ALLOWED[config][name]]
    for value in PROBES:
        given = [value] if name == "reward_weights" and value is not None else value
        if repr(value) in allowed:
            require_values(config(**{name: given}))
        else:
            with refused(f"{config.__name__}: {name} =", ": use a", "number"):
                require_values(config(**{name: given}))


BESIDE: dict[str, dict[str, Any]] = {
    "num_train_epochs": {"max_steps": -1},
    "ref_model_mixup_alpha": {"sync_ref_model": True, "beta": 0.1},
    "ref_model_sync_steps": {"sync_ref_model": True, "beta": 0.1, "ref_model_mixup_alpha": 1.0},
}
"""What else a script says where a field means nothing alone."""
PLAIN = {"ref_model_mixup_alpha": {"ref_model_mixup_alpha": 1.0}}
"""What stands in for a default that is refused there."""
REFUSED_TOGETHER = {("generation_batch_size", 3), ("ref_model_mixup_alpha", 0), ("ref_model_mixup_alpha", 0.5)}
"""Numbers that a field may be, and not beside the others: a size that another does not divide."""
OF_THE_LOG = {"logging_steps", "eval_steps", "eval_delay", "num_generations_eval", "reward_weights"}
"""Not part of our Config; tests/laws/test_trl_callbacks.py and the end-to-end tests see what they do."""
AS_BY_DEFAULT = {
    "num_train_epochs": (3,),
    "save_steps": (0.5,),  # of 1000 updates
    "warmup_steps": (0,),
    "warmup_ratio": (0, None),
    "weight_decay": (0,),
    "save_total_limit": (-1, 0, None),  # all are kept
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "beta": (0,),
    **dict.fromkeys(("generation_batch_size", "steps_per_generation", "max_prompt_length"), (None,)),
    **dict.fromkeys(("top_p", "delta", "epsilon_high"), (None,)),
    "max_tool_calling_iterations": (0, 3, None),  # read where there are tools: tests/end_to_end/trl/test_tools.py
}


def run_of(**given: Any) -> object:
    """All that a script's arguments make of a run on 100 rows."""
    args = GRPOConfig(**{"max_steps": 1000, **given})
    plan = batch_plan(args)
    length = plan.length(args, 100)
    return rl_config(args, ModelOptions(), plan, length), plan, length


@pytest.mark.parametrize("name", [name for name in ALLOWED[GRPOConfig] if name not in OF_THE_LOG])
def test_a_number_that_a_field_may_be_is_heeded(name: str) -> None:
    beside = BESIDE.get(name, {})
    default = run_of(**{**beside, **PLAIN.get(name, {})})
    for value in ALLOWED[GRPOConfig][name]:
        if (name, value) in REFUSED_TOGETHER:
            with refused(f"GRPOConfig: {name} = {value}"):
                run_of(**beside, **{name: value})
        else:
            made = run_of(**beside, **{name: value})
            assert (made == default) == (value in AS_BY_DEFAULT.get(name, ())), value
