"""The commands that train: `posttrain rl`, `sft`, `reward-model` and `dpo`; `irl`, which finds a reward; `replay`."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from posttrain.commands.arguments import INTERRUPTED, TrustSwitch, split_arguments
from posttrain.commands.flags import CommandSpec, asks_help
from posttrain.commands.start_ranks import run_ranks, starts_ranks
from posttrain.commands.view import viewer_beside
from posttrain.config import Config, DpoConfig, IrlConfig, RewardModelConfig, SftConfig, TrainingConfig
from posttrain.errors import UserError
from posttrain.options.bounds import NonNegativeInt
from posttrain.ranks.group import leads
from posttrain.runs.interruption import kept_of_run, stopped_with_a_word


@dataclass(frozen=True, kw_only=True)
class TrainingSwitches(TrustSwitch):
    """Switches of the commands that train."""

    dry_run: bool = False
    """Show the plan, the seconds per step (one step is timed), and the first completions, rows or pairs; train
    nothing."""
    resume: str = ""
    """Continue the run in this folder from its last checkpoint."""
    from_step: int | None = None
    """With --resume: continue from the checkpoint of this step; later results are removed."""
    accept_changes: bool = False
    """With --resume: continue although model, rows, rewards or files have changed; inputs.json records it."""
    ranks: NonNegativeInt = 0
    """Train with this many processes on this machine, each with a share of the weights and of the tokens.  0: one
    process, or as many as torchrun started."""


@dataclass(frozen=True, kw_only=True)
class RlSwitches(TrainingSwitches):
    """Switches of `posttrain rl`."""

    show_prompts: NonNegativeInt = 0
    """Show this many prompts as the model reads them, and train nothing; with --dry-run, also its answers and their
    rewards."""
    view: bool = False
    """Show the run in a browser while it trains, as `posttrain view` does; the address is printed."""


PROGRAMS = {
    "rl": CommandSpec(
        name="posttrain rl [RECIPE.yaml ...]",
        description="Train a model by reward.  Recipes are files or names of bundled recipes; later ones override"
        " earlier ones, and flags override all of them.  The options of task and algorithm depend on their names.",
        switches=RlSwitches(),
    ),
    "sft": CommandSpec(
        name="posttrain sft [RECIPE.yaml ...]",
        description="Train a model on your own rows (`--model.path MODEL --task.path ROWS`), or a small one from"
        " scratch on demonstrations of its task.  `posttrain rl` can continue from it.",
        switches=TrainingSwitches(),
    ),
    "reward-model": CommandSpec(
        name="posttrain reward-model [RECIPE.yaml ...]",
        description="Train a reward model on rows with `chosen` and `rejected` (`--model.path MODEL --task.path"
        " PAIRS`).  `posttrain rl --rewards RUN/model` trains with it.",
        switches=TrainingSwitches(),
    ),
    "dpo": CommandSpec(
        name="posttrain dpo [RECIPE.yaml ...]",
        description="Train a model on pairs of answers (`--model.path MODEL --task.path ROWS`, each row with `chosen`"
        " and `rejected`), or, with --dpo.rounds, on pairs of its own answers, judged by rewards.",
        switches=TrainingSwitches(),
    ),
    "irl": CommandSpec(
        name="posttrain irl [RECIPE.yaml ...]",
        description="Find the reward behind demonstrations.  Recipes are files or names of bundled recipes; later ones"
        " override earlier ones, and flags override all of them.  The options of world, demonstrations, features and"
        " method depend on their names.",
    ),
    "replay": CommandSpec(
        name="posttrain replay RUN",
        description="Repeat the training of a run of `posttrain rl` from its rollout files, without sampling or"
        " grading, and compare the weights with every checkpoint, bit for bit.  The folder does not change.",
        switches=TrustSwitch(),
        only=("model.path", "run.threads"),
    ),
}
TRAINS: dict[str, tuple[type[TrainingConfig], str, str, str]] = {
    "rl": (Config, "posttrain.training.rl", "train", "show_rl_plan"),
    "sft": (SftConfig, "posttrain.training.sft.sft_run", "train_sft", "show_sft_plan"),
    "reward-model": (
        *(RewardModelConfig, "posttrain.training.reward_model.reward_run"),
        *("train_reward_model", "show_reward_plan"),
    ),
    "dpo": (DpoConfig, "posttrain.training.dpo.dpo_run", "train_dpo", "show_dpo_plan"),
}
"""By command: its config, its module, and the functions there that train and that show the plan."""


def run_training(command: str, arguments: Sequence[str]) -> int:
    """Read the recipe, or the resumed run's; then train, or show prompts or the plan."""
    kind, module, train, show = TRAINS[command]
    given = split_arguments(arguments, PROGRAMS[command])
    folder = given.switch("resume")
    # until it owns a folder, the run that it resumes is what is kept
    with stopped_with_a_word(lambda: kept_of_run(folder, command)):
        config, switches = given.resumed(kind, folder) if folder else given.configured(kind, given.recipes())
        more: dict[str, Any] = {"recipe": " ".join(given.positional)} if isinstance(config, Config) else {}
        if isinstance(config, Config) and switches.dry_run:
            more["show_prompts"] = switches.show_prompts or 1
        elif isinstance(config, Config) and switches.show_prompts:
            show_prompts(config, switches.show_prompts)
            return 0
        if switches.ranks and switches.dry_run:
            raise UserError(
                f"command line: --ranks {switches.ranks}: --dry-run takes its step in one process.  Leave --ranks out,"
                " or show the memory of a rank with posttrain plan --ranks."
            )
        if starts_ranks(switches.ranks):
            return run_ranks(switches.ranks, command, arguments)
        functions = import_module(module)
        if switches.dry_run:
            getattr(functions, show)(config, **more)
            return 0
        start = {"from_step": switches.from_step, "accept_changes": switches.accept_changes}
        shown = isinstance(switches, RlSwitches) and switches.view and leads()
        with viewer_beside(config.run.folder) if shown else nullcontext():
            run = getattr(functions, train)(config, resume=bool(folder), **start, **more)
        return INTERRUPTED if run.interrupted and leads() else 0


rl, sft, reward_model, dpo = (partial(run_training, command) for command in TRAINS)


def irl(arguments: Sequence[str]) -> int:
    """Find a reward."""
    given = split_arguments(arguments, PROGRAMS["irl"])
    config, _ = given.configured(IrlConfig, given.recipes())
    from posttrain.irl_runs import require_library

    for library in ("scipy", *(["matplotlib"] if config.run.plots else [])):
        require_library(library)
    from posttrain.irl_runs.run import recover

    recover(config)
    return 0


def rerun(arguments: Sequence[str]) -> int:
    """Replay a run, and print how its weights compare with the checkpoints."""
    run, given = split_arguments(arguments, PROGRAMS["replay"]).only("RUN")
    if asks_help(arguments):
        given.configured(Config, [])  # which shows it
    config, _ = given.resumed(Config, run, may_change=("model.path", "run.threads"))
    from posttrain.training.run_replay import replay

    found = replay(config, show=partial(print, flush=True))
    if not found.equal:
        print("The weights differ.  Something other than the rollouts has changed: versions, threads, model or rows.")
    return 0 if found.equal else 1


def show_prompts(config: Config, count: int) -> None:
    """Print the first prompts, step by step, as the model reads them, without loading its weights."""
    from posttrain.models.loading.model_folder import load_tokenizer
    from posttrain.models.rendering import TokenizerRenderer
    from posttrain.runs.prompt_preview import Reader, prompt_preview_lines
    from posttrain.tasks.base import training_prompts
    from posttrain.tasks.task_registry import load_task

    model, size = config.model, config.rollout.prompts_per_step
    tokenizer, stop_ids = load_tokenizer(model)
    tools: list[Mapping[str, Any]] = []
    if config.tools and not config.tools_at:
        from posttrain.environments.tools import toolbox_of

        toolbox = toolbox_of(config.tools, config.sandbox)
        toolbox.close()
        tools = toolbox.descriptions
    renderer = TokenizerRenderer(tokenizer, template_options=model.template_options, tools=tools)
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
