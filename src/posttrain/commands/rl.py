"""`posttrain rl`: train a model by reward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.commands.arguments import (
    INTERRUPTED,
    TrustSwitch,
    configured,
    recipe_layers,
    require_model,
    resumed,
    split_arguments,
    switch_value,
)
from posttrain.commands.flags import CommandSpec
from posttrain.config import Config
from posttrain.errors import require
from posttrain.runs.interruption import stopped_while_loading


@dataclass(frozen=True, kw_only=True)
class RlSwitches(TrustSwitch):
    """What this command does with the recipe."""

    dry_run: bool = False
    """Show the plan, with seconds per step from one timed step, and of that step a prompt, an answer and its scores;
    train nothing."""
    show_prompts: int = 0
    """Show the first so many prompts as the model reads them, and train nothing; with --dry-run also what it answers
    and what that is paid."""
    resume: str = ""
    """Continue the run in this folder exactly where its last checkpoint left it."""
    from_step: int | None = None
    """With --resume: go on from the checkpoint of this step; what came after it is removed."""
    accept_changes: bool = False
    """With --resume: go on although rows, rewards or files have changed since the run began; inputs.json notes it."""


PROGRAM = CommandSpec(
    name="posttrain rl [RECIPE.yaml ...]",
    description="Train a model by reward.  Recipes are files or names of bundled ones, later ones overriding earlier;"
    " flags override them all.  The options of the task and of the algorithm depend on their names.",
    switches=RlSwitches(),
)


def main(arguments: Sequence[str]) -> int:
    """Train, or show what training would be."""
    given = split_arguments(arguments)
    folder = switch_value("resume", given)
    with stopped_while_loading(folder, "rl"):
        if folder:
            config, switches = resumed(Config, folder, given, PROGRAM)
        else:
            config, switches = configured(Config, recipe_layers(given), given.flags, PROGRAM)
            require_model(config.model)
        require(switches.show_prompts >= 0, switches, "show_prompts", "is no number of prompts; use 1 or more")
        if switches.show_prompts and not switches.dry_run:
            show_prompts(config, switches.show_prompts)
            return 0
        from posttrain.training.rl import show_plan, train

        recipe = " ".join(given.positional)
        if switches.dry_run:
            show_plan(config, show_prompts=switches.show_prompts or 1, recipe=recipe)
            return 0
        run = train(
            config,
            resume=bool(folder),
            from_step=switches.from_step,
            accept_changes=switches.accept_changes,
            recipe=recipe,
        )
        return INTERRUPTED if run.interrupted else 0


def show_prompts(config: Config, count: int) -> None:
    """Print the first prompts, step after step, as the model reads them; its weights are not loaded."""
    from posttrain.models.loading.tokenizer_folder import load_tokenizer
    from posttrain.models.rendering import TokenizerRenderer
    from posttrain.runs.prompt_preview import Reader, preview_lines
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
    print("\n".join(preview_lines(prompts[:count], reader)))
