"""The kinds of recipe, the command that reads each, and the text of a config."""

from dataclasses import asdict, replace
from typing import Any, TypeVar

from posttrain.config.fit_configs import DpoConfig, RewardModelConfig, SftConfig
from posttrain.config.recipe_yaml import to_yaml
from posttrain.config.schema import section_names
from posttrain.config.sections import CollectConfig, Config, IrlConfig, plain
from posttrain.options.dpo import DpoOptions
from posttrain.options.model import ModelOptions
from posttrain.options.reward_model import OF_ENSEMBLES, OF_MODELS
from posttrain.options.training import rated

TrainingConfig = Config | SftConfig | RewardModelConfig | DpoConfig
"""Runs that train a model."""
AnyConfig = TrainingConfig | CollectConfig | IrlConfig

OPTIMIZER_SECTIONS: dict[type[AnyConfig], str] = {
    Config: "update",
    SftConfig: "sft",
    RewardModelConfig: "reward_model",
    DpoConfig: "dpo",
}
"""The section with each kind's learning rate."""
COMMAND_OF: dict[type[AnyConfig], str] = {
    Config: "rl",
    SftConfig: "sft",
    RewardModelConfig: "reward-model",
    DpoConfig: "dpo",
    CollectConfig: "collect",
    IrlConfig: "irl",
}
AnyKind = TypeVar("AnyKind", bound=AnyConfig)


def resolved_config(config: AnyKind, *, adapter: bool | None = None) -> AnyKind:
    """The config with its open values filled in, such as the learning rate.

    `adapter` says whether a caller's policy trains an adapter; with None the config's model decides.
    """
    if isinstance(config, CollectConfig | IrlConfig):
        return config
    if adapter is None:
        adapter = isinstance(config.model, ModelOptions) and config.model.trains_adapter
    section = next(name for kind, name in OPTIMIZER_SECTIONS.items() if isinstance(config, kind))
    options = rated(getattr(config, section), adapter=adapter)
    changed: Any = {section: options.resolved() if isinstance(options, DpoOptions) else options}
    return replace(config, **changed)


def as_recipe(config: AnyConfig) -> str:
    """The config as a recipe file with every option: it gives the same run."""
    return to_yaml(recipe_sections(config))


def recipe_sections(config: AnyConfig) -> dict[str, object]:
    resolved = asdict(resolved_config(config))
    content: dict[str, Any] = {name: plain(resolved[name]) for name in section_names(type(config))}
    if "rewards" in content:  # each is by name or by path, which comes first
        content["rewards"] = [reward_section(each) for each in content["rewards"]]
    return content


def reward_section(reward: dict[str, object]) -> dict[str, object]:
    """A reward as recipes write it: first which one it is, and options of reward models only for those."""
    left_out = [] if reward["model"] else OF_MODELS.split()
    left_out += [] if reward["ensemble"] else OF_ENSEMBLES.split()
    ordered: dict[str, object] = {"name": "", "path": "", "model": ""} | reward
    return {key: value for key, value in ordered.items() if value not in ("", {}, None) and key not in left_out}
