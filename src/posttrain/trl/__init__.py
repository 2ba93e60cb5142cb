"""TRL's configs and trainers on our loop: `from posttrain.trl import GRPOConfig, GRPOTrainer`.

    args = GRPOConfig(output_dir="run", max_steps=100)
    trainer = GRPOTrainer(model="my-model", reward_funcs=[solved], args=args, train_dataset=rows)
    trainer.train()

docs/guides/trl.md says what is the same and what differs.
"""

import importlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from posttrain.schemas import did_you_mean
from posttrain.trl.configs.script_arguments import (
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from posttrain.trl.configs.trainer_configs import DPOConfig, GRPOConfig, RewardConfig, RLOOConfig, SFTConfig
from posttrain.trl.dpo_trainer import DPOTrainer
from posttrain.trl.grpo_trainer import GRPOTrainer, RLOOTrainer
from posttrain.trl.names_elsewhere import INSTEAD, ModulesElsewhere
from posttrain.trl.reward_trainer import RewardTrainer
from posttrain.trl.sft_trainer import SFTTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "ModelConfig",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "TrlParser",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]

sys.meta_path.append(ModulesElsewhere())

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A module of this package, or an ImportError that says what to use instead of a TRL name."""
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        remedy = INSTEAD.get(name) or did_you_mean(name, __all__)
        raise ImportError(f"cannot import {name!r} from posttrain.trl: it is not here.  {remedy}")
