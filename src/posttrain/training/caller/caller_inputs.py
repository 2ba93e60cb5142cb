"""What a run by reward is made of beside its config, so that it is not resumed as another one."""

from dataclasses import fields

from posttrain.algorithms.table import build_algorithm
from posttrain.config import Config
from posttrain.models.policy import Policy
from posttrain.options.reward import RewardSettings
from posttrain.runs.code_digests import code_input
from posttrain.runs.named_inputs import named_files
from posttrain.runs.run_inputs import RunInput, RunInputs, class_name, rows_input, sha256_of
from posttrain.training.caller.caller_objects import CallerObjects, given_rewards

SOME_WEIGHTS = 64
"""Of each parameter, to tell two policies of one shape from each other."""


def inputs_of(config: Config, own: CallerObjects) -> RunInputs:
    """What a run is made of beside its config: the caller's objects, and files whose place none of them takes."""
    objects: dict[str, RunInput] = {}
    files: dict[str, RunInput] = {}
    if own.policy is not None:
        objects["policy"] = policy_input(own.policy, config, own)
    if own.task is not None:
        objects["task"] = RunInput(f"{class_name(own.task)} ({getattr(own.task, 'name', '')})")
    if own.engine is not None:
        draws = "" if getattr(own.engine, "reproducible", True) else ", with random numbers of its own"
        objects["engine"] = RunInput(class_name(own.engine) + draws)
    if own.algorithm is not None:
        objects["algorithm"] = code_input(own.algorithm.name, own.algorithm)
    if own.optimizer is not None:
        objects["optimizer"] = RunInput(class_name(own.optimizer.optimizer))
    for index, reward in enumerate(given_rewards(own)):
        settings = {
            each.name: getattr(reward.settings, each.name)
            for each in fields(RewardSettings)  # one that is given by its name has those of a recipe's item
            if getattr(reward.settings, each.name) != getattr(RewardSettings(), each.name)
        }
        said = ", ".join(f"{name} = {value}" for name, value in settings.items())
        objects[f"rewards[{index}]"] = code_input(f"{reward.name} ({said})" if said else reward.name, reward.call)
        if reward.source is not None:
            files[f"rewards[{index}], by its name"] = RunInput(reward.source.name, reward.source.digest)
    if own.rows is not None:
        objects["rows"] = rows_input(own.rows)
    if own.held_out_rows is not None:
        objects["held_out_rows"] = rows_input(own.held_out_rows)
    unused = ["task.path", "task.sources"] if own.rows is not None else []
    unused += ["task.held_out_path"] if own.held_out_rows is not None else []
    unused += ["task."] if own.task is not None else []
    unused += ["engine."] if own.engine is not None else []
    unused += ["model.path", "model.chat_template"] if own.policy is not None else []
    unused += ["algorithm.path"] if own.algorithm is not None else []
    return RunInputs(objects=objects, files=files | named_files(config, unused=unused))


def policy_input(policy: Policy, config: Config, own: CallerObjects) -> RunInput:
    """A policy by its shape; where its weights are the reference of a KL, which no checkpoint holds, by those too."""
    algorithm = own.algorithm or build_algorithm(config.algorithm)
    weighed = weighed_policy(policy)
    return weighed if algorithm.uses_reference and not config.reference.refresh_every else RunInput(weighed.what)


def weighed_policy(policy: Policy) -> RunInput:
    """A policy by its shape and some of its weights."""
    parameters = [*policy.model.parameters()]
    what = f"{class_name(policy.model)} of {sum(each.numel() for each in parameters)} parameters"
    some = [each.detach().flatten()[:SOME_WEIGHTS].double().tolist() for each in parameters]
    return RunInput(what, sha256_of(repr(some)))
