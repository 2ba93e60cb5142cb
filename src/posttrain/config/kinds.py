"""Every kind of recipe, and the command that reads it."""

from posttrain.config.dpo import DpoConfig
from posttrain.config.sections import Config, IrlConfig, SftConfig

TrainingConfig = Config | SftConfig | DpoConfig
"""What trains a language model."""
AnyConfig = TrainingConfig | IrlConfig

COMMAND_OF: dict[type[AnyConfig], str] = {Config: "rl", SftConfig: "sft", DpoConfig: "dpo", IrlConfig: "irl"}
"""The command that reads each kind of recipe."""
