"""`posttrain rl`: train a model by reward."""

import math
from dataclasses import dataclass
from functools import partial

from posttrain.commands.arguments import INTERRUPTED
from posttrain.commands.flags import CommandSpec
from posttrain.commands.training_runs import TrainingSwitches, run_training_command
from posttrain.config import Config
from posttrain.options.bounds import NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class RlSwitches(TrainingSwitches):
    """Switches of `posttrain rl`."""

    show_prompts: NonNegativeInt = 0
    """Show this many prompts as the model reads them, and train nothing; with --dry-run also its answers and their
    rewards."""


PROGRAM = CommandSpec(
    name="posttrain rl [RECIPE.yaml ...]",
    description="Train a model by reward.  Recipes are files or names of bundled ones, later ones overriding earlier;"
    " flags override them all.  The options of the task and of the algorithm depend on their names.",
    switches=RlSwitches(),
)


def act(config: Config, switches: RlSwitches, recipe: str, resume: bool) -> int:
    """Train, or show prompts or the plan."""
    if switches.show_prompts and not switches.dry_run:
        show_prompts(config, switches.show_prompts)
        return 0
    from posttrain.training.rl import show_rl_plan, train

    if switches.dry_run:
        show_rl_plan(config, show_prompts=switches.show_prompts or 1, recipe=recipe)
        return 0
    run = train(
        config,
        resume=resume,
        from_step=switches.from_step,
        accept_changes=switches.accept_changes,
        recipe=recipe,
    )
    return INTERRUPTED if run.interrupted else 0


main = partial(run_training_command, Config, PROGRAM, act)


def show_prompts(config: Config, count: int) -> None:
    """Print the first prompts, step after step, as the model reads them; its weights are not loaded."""
    from posttrain.models.loading.model_folder import load_tokenizer
    from posttrain.models.rendering import TokenizerRenderer
    from posttrain.runs.prompt_preview import Reader, prompt_preview_lines
    from posttrain.tasks.base import training_prompts
    from posttrain.tasks.task_registry import load_task

    model, size = config.model, config.rollout.prompts_per_step
    tokenizer, stop_ids = load_tokenizer(model)
    renderer = TokenizerRenderer(tokenizer, template_options=model.template_options)
    task = load_task(config.task, renderer, seed=config.run.seed, prompts_per_step=size)
    reader = Reader(
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        template_file=model.chat_template,
        template_options=model.template_options,
    )
    steps = range(1, 1 + math.ceil(count / size))
    prompts = [prompt for step in steps for prompt in training_prompts(task, step, range(size))]
    print("\n".join(prompt_preview_lines(prompts[:count], reader)))
