"""`posttrain collect`: pairs of a policy's completions, judged by rewards, by a language model or by people."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from posttrain.config import CollectConfig
from posttrain.errors import UserError, require
from posttrain.options.collect import PersonJudgeOptions

if TYPE_CHECKING:
    from posttrain.commands.collection.collection import Collection

MAY_CHANGE = ("run.threads", "judge.endpoint", "judge.options")
"""What may be another when a collection is resumed."""


@dataclass(frozen=True, kw_only=True)
class CollectSwitches(TrustSwitch):
    """What this command does with the recipe, and how people are asked."""

    dry_run: bool = False
    """Show the plan and the pairs of the first prompt, with what the rewards say of them; keep nothing."""
    resume: str = ""
    """Go on with the collection in this folder: nothing is sampled, asked or voted on twice."""
    accept_changes: bool = False
    """With --resume: go on although model, rows or rewards have changed since; inputs.json notes it."""
    rater: tuple[str, ...] = ("person",)
    """Who votes, where people judge: each of these has a page of their own.  Others may vote later by --resume."""
    terminal: bool = False
    """Ask in the terminal instead of on a page."""
    port: int = 0
    """Port of the page, which listens to this machine alone; 0 takes a free one."""


PROGRAM = CommandSpec(
    name="posttrain collect [RECIPE.yaml ...]",
    description="Sample completions of a task's prompts, make pairs of them and have them judged: by rewards, by a"
    " language model (`--judge.name llm`) or by people (`--judge.name person`).  The pairs are rows that"
    " reward models and preference losses are trained on.",
    switches=CollectSwitches(),
)


def main(arguments: Sequence[str]) -> int:
    """Collect, or show what would be collected."""
    given = split_arguments(arguments)
    folder = switch_value("resume", given)
    if folder:
        config, switches = resumed(CollectConfig, folder, given, PROGRAM, may_change=MAY_CHANGE)
    else:
        config, switches = configured(CollectConfig, recipe_layers(given), given.flags, PROGRAM)
        require_model(config.model)
    require(0 <= switches.port < 1 << 16, switches, "port", "is no port; use 0 to 65535")
    require_raters(switches)
    require_voters(config, switches)
    if switches.dry_run:
        from posttrain.commands.collection.collection_report import show_collection_plan

        show_collection_plan(config)
        return 0
    from posttrain.commands.collection.collection import collect

    run = collect(
        config,
        people=lambda collection: ask_people(collection, switches),
        resume=bool(folder),
        accept_changes=switches.accept_changes,
    )
    from posttrain.commands.collection.collection_report import collection_closing_lines

    print("\n".join(collection_closing_lines(run)))
    return INTERRUPTED if run.interrupted else 0


def require_raters(switches: CollectSwitches) -> None:
    """Refuse raters that cannot be told apart, or asked."""
    if len(set(switches.rater)) != len(switches.rater) or not switches.rater:
        raise UserError(f"--rater {' '.join(switches.rater)}: name each rater once, such as --rater anna ben")
    if switches.terminal and len(switches.rater) > 1:
        raise UserError(f"--rater {' '.join(switches.rater)}: a terminal asks one person; leave out --terminal")


def require_voters(config: CollectConfig, switches: CollectSwitches) -> None:
    """Refuse switches about voting where nobody votes."""
    if isinstance(config.judge, PersonJudgeOptions):
        return
    usual = CollectSwitches()
    for name in ("rater", "terminal", "port"):
        if getattr(switches, name) != getattr(usual, name):
            raise UserError(f"--{name}: is of people who vote, and judge.name = {config.judge.name} asks nobody.")


def ask_people(collection: "Collection", switches: CollectSwitches) -> None:
    """Have people vote, on pages or in the terminal, until all is judged or they stop."""
    judge = collection.config.judge
    assert isinstance(judge, PersonJudgeOptions)
    ballots = [collection.ballot(rater) for rater in switches.rater]
    if switches.terminal:
        from posttrain.commands.collection.terminal_ballot import ask_in_terminal

        ask_in_terminal(ballots[0], judge.question)
        return
    from posttrain.commands.collection.ballot_server import ask_on_pages

    ask_on_pages(ballots, judge.question, port=switches.port, stopping=lambda: bool(collection.interruption))
