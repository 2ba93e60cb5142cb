"""What a collection is made of, so that it is not resumed as another one."""

from pathlib import Path

from posttrain.binding import bind
from posttrain.config import build
from posttrain.config.collect import CollectConfig
from posttrain.config.recipes import short_reward
from posttrain.errors import UserError
from posttrain.options.collect import OF_CALLS
from posttrain.options.reward import RewardOptions
from posttrain.rewards.grading.function import RewardFunction
from posttrain.runs.input_digests import code_input
from posttrain.runs.named_inputs import files_of_reward, given_rows, named_options, read_all
from posttrain.runs.run_inputs import RunInput, RunInputs, class_name
from posttrain.runs.same_recipe import lasting_options, option_differences, run_recipe
from posttrain.training.collection.prompt_sampler import PairObjects

MAY_CHANGE = frozenset(
    [
        "run.folder",
        "run.overwrite",
        "run.threads",
        "judge.endpoint",
        "judge.options",  # as a path it is there where there are none
        *(f"judge.options.{name}" for name in OF_CALLS),
    ]
)
"""Options that a resumed collection may change; a server of the user's may have another port the next day."""


def inputs_of_collection(config: CollectConfig, own: PairObjects) -> RunInputs:
    """The caller's objects, and the files that the recipe names, with digests."""
    objects: dict[str, RunInput] = {}
    named: dict[str, RunInput] = {}
    if own.policy is not None:
        count = sum(each.numel() for each in own.policy.model.parameters())
        objects["policy"] = RunInput(f"{class_name(own.policy.model)} of {count} parameters")
    for index, reward in enumerate(own.rewards):
        if isinstance(reward, str):
            options = bind(RewardOptions, short_reward(reward), where="rewards")
            named |= read_all(files_of_reward(f"rewards[{index}], by its name", options))
        else:
            call = reward.call if isinstance(reward, RewardFunction) else reward
            objects[f"rewards[{index}]"] = code_input(class_name(reward), call)
    objects |= given_rows(own.rows, None)
    return RunInputs(objects=objects, files=named | read_all(named_options(config), objects))


def require_same_collection(folder: Path, config: CollectConfig) -> None:
    """Refuse to go on with a collection under another recipe than its own."""
    own = build(CollectConfig, [run_recipe(folder)], to_run=False)
    found = list(option_differences(lasting_options(own, MAY_CHANGE), lasting_options(config, MAY_CHANGE)))
    if found:
        raise UserError(
            f"resume {folder}: the config differs from the collection's own in {'; '.join(found)}.  What is resumed"
            " keeps its recipe: put that back as it was, or collect into another folder."
        )
