"""One frozen record of everything that decides a run, made from recipe files and flags."""

from posttrain.config.fit_configs import DpoConfig, RewardModelConfig, SftConfig
from posttrain.config.reading import AnyConfig, TrainingConfig, as_recipe, build, load_recipe
from posttrain.config.sections import CollectConfig, Config, IrlConfig

__all__ = [
    "AnyConfig",
    "CollectConfig",
    "Config",
    "DpoConfig",
    "IrlConfig",
    "RewardModelConfig",
    "SftConfig",
    "TrainingConfig",
    "as_recipe",
    "build",
    "load_recipe",
]
