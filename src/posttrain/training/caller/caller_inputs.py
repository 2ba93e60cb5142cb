"""What a run by reward is made of beside its config, so that it is not resumed as another one."""

from dataclasses import fields

from posttrain.algorithms.table import build_algorithm
from posttrain.config import Config
from posttrain.models.policy import Policy
from posttrain.options.reward import RewardSettings
from posttrain.runs.input_digests import code_input
from posttrain.runs.named_inputs import given_rows, named_options, read_all
from posttrain.runs.run_inputs import RunInput, RunInputs, class_name, sha256_of
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
    objects |= given_rows(own.rows, own.held_out_rows)
    return RunInputs(objects=objects, files=files | read_all(named_options(config), objects))


def policy_input(policy: Policy, config: Config, own: CallerObjects) -> RunInput:
    """A policy by its shape; where its weights are the reference of a KL, which no checkpoint holds, by those too."""
    algorithm = own.algorithm or build_algorithm(config.algorithm)
    is_weighed = algorithm.uses_reference and not config.reference.refresh_every
    return weighed_policy(policy) if is_weighed else shape_input(policy)


def weighed_policy(policy: Policy) -> RunInput:
    """A policy by its shape and some of its weights."""
    some = [each.detach().flatten()[:SOME_WEIGHTS].double().tolist() for each in policy.model.parameters()]
    return RunInput(shape_input(policy).what, sha256_of(repr(some)))


def shape_input(policy: Policy) -> RunInput:
    """A policy by its shape."""
    count = sum(each.numel() for each in policy.model.parameters())
    return RunInput(f"{class_name(policy.model)} of {count} parameters")
