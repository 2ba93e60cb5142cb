"""`posttrain behaviours`: how often a run's completions verify, backtrack or retry, over training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.commands.arguments import picture_file, split_arguments
from posttrain.commands.flags import CommandSpec
from posttrain.config import Config
from posttrain.runs.named_inputs import run_recipe


@dataclass(frozen=True, kw_only=True)
class BehaviourSwitches:
    """Where rates are drawn."""

    picture: str = ""
    """File of the picture; default: behaviours.png in the run's folder."""


PROGRAM = CommandSpec(
    name="posttrain behaviours RUN [RECIPE.yaml ...]",
    description="Read every completion that a run of `posttrain rl` sampled, and show how many verify, backtrack, try"
    " several times, explain, reason about the task or reflect, over training, as a table and a picture."
    "  --behaviours.measure chooses the rows of the table; the default is the run's choice, else all.",
    switches=BehaviourSwitches(),
    only=("behaviours",),
)


def main(arguments: Sequence[str]) -> int:
    """Print the table and draw the picture."""
    named, rest = split_arguments(arguments, PROGRAM).first("RUN")
    run = Path(named)
    recipes = [*([run_recipe(run)] if (run / "config.yaml").is_file() else []), *rest.recipes()]
    own = [(each, each.sections.get("behaviours")) for each in recipes]  # no other section: no code is imported
    layers = [replace(each, sections={"behaviours": section}) for each, section in own if section is not None]
    config, switches = rest.configured(Config, layers)
    from posttrain.behaviours.behaviour_reader import BehaviourReader, draw_behaviours, history_table, read_history
    from posttrain.behaviours.behaviour_table import TABLE, chosen_rows

    reader = BehaviourReader(chosen_rows(config.behaviours) or TABLE)
    picture = picture_file(switches.picture) if switches.picture else run / "behaviours.png"
    history = read_history(run, reader)
    print(f"{run}: {sum(map(len, history.steps.values()))} completions of {len(history.steps)} steps\n")
    print(history_table(history, reader))
    draw_behaviours(history, reader, picture, title=run.absolute().name)
    print(f"\nPicture of every step: {picture}")
    return 0
