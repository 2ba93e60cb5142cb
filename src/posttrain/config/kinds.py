"""The kinds of recipe, the command that reads each, and how a config is written down again."""

from dataclasses import asdict, fields

from posttrain.config.collect import CollectConfig
from posttrain.config.dpo import DpoConfig
from posttrain.config.recipes import to_yaml
from posttrain.config.reward_model import RewardModelConfig
from posttrain.config.sections import Config, IrlConfig, SftConfig, plain
from posttrain.options.reward_model import EnsembleOptions, RewardModelOptions

TrainingConfig = Config | SftConfig | RewardModelConfig | DpoConfig
"""Those of runs that train a model: with a model, checkpoints and trackers."""
AnyConfig = TrainingConfig | CollectConfig | IrlConfig

COMMAND_OF: dict[type[AnyConfig], str] = {
    Config: "rl",
    SftConfig: "sft",
    RewardModelConfig: "reward-model",
    DpoConfig: "dpo",
    CollectConfig: "collect",
    IrlConfig: "irl",
}
"""The command that reads each kind of recipe."""


def as_recipe(config: AnyConfig) -> str:
    """The config as a recipe file, every option written out: reading it gives the same config."""
    content = {name: plain(section) for name, section in asdict(config).items()}
    if "rewards" in content:  # each is by name or by path, which comes first
        content["rewards"] = [said_of(each) for each in content["rewards"]]
    return to_yaml(content)


def said_of(reward: dict[str, object]) -> dict[str, object]:
    """What a recipe says of a reward: first which it is, and of a function nothing that only a reward model has."""
    of_models = {each.name for each in fields(RewardModelOptions)} if not reward["model"] else set()
    of_models |= {each.name for each in fields(EnsembleOptions)} if not reward["ensemble"] else set()
    ordered: dict[str, object] = {"name": "", "path": "", "model": ""} | reward
    return {key: value for key, value in ordered.items() if value not in ("", {}, None) and key not in of_models}
