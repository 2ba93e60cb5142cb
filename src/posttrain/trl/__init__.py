"""TRL's configs and trainers over our loop: `from posttrain.trl import GRPOConfig, GRPOTrainer`.

    args = GRPOConfig(output_dir="run", max_steps=100)
    trainer = GRPOTrainer(model="my-model", reward_funcs=[solved], args=args, train_dataset=rows)
    trainer.train()

docs/guides/trl.md says what is the same, and what is not.
"""

from posttrain.trl.fields.grpo_config import GRPOConfig
from posttrain.trl.fields.model_config import ModelConfig, get_kbit_device_map, get_peft_config, get_quantization_config
from posttrain.trl.fields.script_arguments import ScriptArguments, TrlParser
from posttrain.trl.fields.sft_config import SFTConfig
from posttrain.trl.grpo_trainer import GRPOTrainer
from posttrain.trl.sft_trainer import SFTTrainer

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "ModelConfig",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "TrlParser",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]
