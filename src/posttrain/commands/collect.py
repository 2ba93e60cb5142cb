"""`posttrain collect`: pairs of a policy's completions, judged by rewards, by a language model or by people."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from posttrain.commands.arguments import INTERRUPTED, TrustSwitch, split_arguments
from posttrain.commands.flags import CommandSpec, named_as_flags
from posttrain.config import CollectConfig
from posttrain.options.bounds import Rule, Unused, require_rules
from posttrain.options.collect import PersonJudgeOptions
from posttrain.server.addresses import Port, serve_extra

MAY_CHANGE = ("run.threads", "judge.endpoint", "judge.options")
"""Options that may change when a collection is resumed."""


@dataclass(frozen=True, kw_only=True)
class CollectSwitches(TrustSwitch):
    """How a collection runs, and how people vote."""

    dry_run: bool = False
    """Show the plan and the pairs of the first prompt with their rewards; save nothing."""
    resume: str = ""
    """Continue the collection in this folder; nothing is sampled, asked or voted on twice."""
    accept_changes: bool = False
    """With --resume: continue although model, rows or rewards have changed; inputs.json records it."""
    rater: tuple[str, ...] = ("person",)
    """Names of the people who vote; each gets a page.  Others can vote later with --resume."""
    terminal: bool = False
    """Ask for votes in the terminal instead of on a page."""
    port: Port = 0
    """Port of the page, which only this machine can reach; 0: a free one."""

    rules = (
        Rule(
            "rater",
            lambda o: o.rater and len(set(o.rater)) == len(o.rater),
            "must name each rater once, such as --rater anna ben",
        ),
        Rule(
            "terminal",
            lambda o: not o.terminal or len(o.rater) == 1,
            "only works with one rater.  Leave out --terminal.",
        ),
    )


PROGRAM = CommandSpec(
    name="posttrain collect [RECIPE.yaml ...]",
    description="Sample completions of a task's prompts, pair them, and have the pairs judged: by rewards, by a"
    " language model (`--judge.name llm`) or by people (`--judge.name person`).  The result is rows for reward models"
    " and preference losses.",
    switches=CollectSwitches(),
)


def main(arguments: Sequence[str]) -> int:
    """Collect preferences, or show the plan."""
    given = split_arguments(arguments, PROGRAM)
    if folder := given.switch("resume"):
        config, switches = given.resumed(CollectConfig, folder, may_change=MAY_CHANGE)
    else:
        config, switches = given.configured(CollectConfig, given.recipes())
    if not isinstance(config.judge, PersonJudgeOptions):
        kind = f"people who vote, and judge.name = {config.judge.name}"
        with named_as_flags():
            require_rules(switches, (Unused("rater terminal port", kind),))
    from posttrain.commands.collection import ballot, collection_report
    from posttrain.commands.collection.collection import Collection, collect

    if switches.dry_run:
        collection_report.show_collection_plan(config)
        return 0

    if isinstance(config.judge, PersonJudgeOptions) and not switches.terminal:
        with serve_extra("collect: the voting page (not needed with --terminal)"):  # before anything is sampled
            import_module("posttrain.server.voting_page")

    def have_people_vote(collection: Collection) -> None:
        assert isinstance(config.judge, PersonJudgeOptions)
        question = config.judge.question
        ballots = [collection.ballot(rater) for rater in switches.rater]
        if switches.terminal:
            ballot.ask_in_terminal(ballots[0], question)
        else:
            ballot.ask_on_pages(ballots, question, port=switches.port, stopping=lambda: bool(collection.interruption))

    run = collect(config, people=have_people_vote, resume=bool(folder), accept_changes=switches.accept_changes)
    print("\n".join(collection_report.collection_closing_lines(run)))
    return INTERRUPTED if run.interrupted else 0
