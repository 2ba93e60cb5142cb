"""A recipe without loading the model: `posttrain config` prints it in full, `posttrain plan` estimates its memory."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from posttrain.binding import is_own
from posttrain.commands.arguments import TrustSwitch, split_arguments
from posttrain.commands.flags import CommandSpec
from posttrain.config import CollectConfig, Config, DpoConfig, IrlConfig, RewardModelConfig
from posttrain.config.reading import recipe_kind, recipe_sections, resolved_config
from posttrain.config.recipes import merge, to_yaml
from posttrain.config.run_trust import READ_BY_IMPORT
from posttrain.errors import UserError
from posttrain.options.bounds import PositiveInt
from posttrain.options.rollout import HttpOptions


@dataclass(frozen=True, kw_only=True)
class PlanSwitches(TrustSwitch):
    """Assumptions of the plan, and its output format."""

    prompt_tokens: PositiveInt = 256
    """Assumed length of prompts; a run knows the real one."""
    gpu_gb: Annotated[float, Ge(0.001)] | None = None
    """Plan for a CUDA GPU with this much memory in GB, instead of this machine."""
    ranks: PositiveInt = 1
    """Plan for a run with this many ranks (`posttrain rl --ranks`); shows the memory of each."""
    json: bool = False
    """Print the plan as JSON, in bytes."""


PROGRAMS = {
    "config": CommandSpec(
        name="posttrain config [RECIPE.yaml ...]",
        description="Print the full recipe that results from recipes and flags; running it gives the same run.",
    ),
    "plan": CommandSpec(
        name="posttrain plan [RECIPE.yaml ...]",
        description="Estimate the memory of a recipe, and of the same recipe as PPO with a critic, GRPO, GRPO with LoRA"
        " and GRPO with QLoRA.  Reads only the model's config.json, not its weights.  Warns if a run will not fit.",
        switches=PlanSwitches(),
    ),
}


def show_recipe(arguments: Sequence[str]) -> int:
    """Print the recipe with every option.

    The user's own task and algorithm in a run's recipe are printed as written: resolving them would run their code.
    """
    given = split_arguments(arguments, PROGRAMS["config"])
    layers = given.recipes()
    merged = merge(layers)
    of_runs = [name for name in READ_BY_IMPORT if merged.source(f"{name}.path") in merged.of_runs]
    own = {name: merged.sections[name] for name in of_runs if is_own(name, merged.sections[name])}
    known = [replace(layer, sections={**layer.sections, **dict.fromkeys(own, None)}) for layer in layers]
    config, _ = given.configured(recipe_kind(layers), known if own else layers, to_run=False, loads_model=False)
    print(to_yaml({**recipe_sections(config), **own}), end="")
    return 0


def show_plan(arguments: Sequence[str]) -> int:
    """Print the plan."""
    given = split_arguments(arguments, PROGRAMS["plan"])
    layers = given.recipes()
    config, switches = given.configured(recipe_kind(layers), layers, loads_model=False)
    if isinstance(config, IrlConfig | CollectConfig):
        raise UserError(
            "plan: this recipe does not train a language model.  Give a recipe of `posttrain rl`, `sft` or `dpo`."
        )
    from posttrain.commands.memory_table import plans_as_json, print_plans
    from posttrain.models.memory.memory_plan import MemoryPlan
    from posttrain.models.memory.model_shape import recipe_shape
    from posttrain.runs import planned_memory

    config = resolved_config(config)
    shape, on_gpu = recipe_shape(config.model), True if switches.gpu_gb is not None else None
    if isinstance(config, Config):
        from posttrain.algorithms.table import build_algorithm

        algorithm, length = build_algorithm(config.algorithm), switches.prompt_tokens
        setup = planned_memory.rl_setup(config, shape, algorithm, prompt_tokens=length, on_cuda=on_gpu)
    elif isinstance(config, DpoConfig):
        setup = planned_memory.dpo_setup(config, shape, on_cuda=on_gpu)
    elif isinstance(config, RewardModelConfig):
        setup = planned_memory.pairs_setup(config.model, config.reward_model, shape, on_cuda=on_gpu)
    else:
        setup = planned_memory.sft_setup(config, shape, on_cuda=on_gpu)
    setup = replace(setup, ranks=switches.ranks)
    if switches.gpu_gb is None:
        machine = planned_memory.machine_memory(on_cuda=setup.on_cuda, ranks=switches.ranks)
    else:
        machine = planned_memory.MachineMemory(round(switches.gpu_gb * 1e9), "GPU memory")
    beside = planned_memory.compared_setups(shape, setup) if isinstance(config, Config) else {"recipe": setup}
    plans = {name: MemoryPlan(shape, each) for name, each in beside.items()}
    if switches.json:
        print(json.dumps(plans_as_json(plans, machine), indent=1))
    else:
        print_plans(plans, machine, config.optimizer)
        if isinstance(config, Config) and isinstance(config.engine, HttpOptions):
            print(f"Completions are sampled by {', '.join(config.engine.urls)}, which get weights {config.engine.way}.")
        if isinstance(config, Config) and (config.tools or config.environment.is_given):
            print("Replies are not counted; with them, a completion may fill the model's context.")
    return 0
