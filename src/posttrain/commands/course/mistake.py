"""`posttrain course mistake`: train with and without a mistake of course notebooks."""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.commands.arguments import picture_file, split_arguments
from posttrain.commands.flags import COMMAND_LINE, CommandSpec, read_flags
from posttrain.errors import UserError
from posttrain.options.bounds import Bounded, PositiveInt


@dataclass(frozen=True, kw_only=True)
class MistakeSwitches(Bounded):
    """Length of the runs, and the file of the picture."""

    steps: PositiveInt = 20
    """Steps of each of the two runs."""
    picture: str = ""
    """File of the picture; default: named after the mistake, such as mistake-4.png, in the current folder."""


PROGRAM = CommandSpec(
    name="posttrain course mistake N",
    description="Train a small bundled model twice on one CPU: without a mistake of course notebooks, and with it."
    "  Prints both, says which metric or alarm reveals the mistake, and draws reward, KL, length and gradient norm."
    "  N is 1 to 13, as in docs/learn/mistakes/.",
    switches=MistakeSwitches(),
)


def main(arguments: Sequence[str]) -> int:
    """Train, print the table and draw the picture."""
    given, rest = split_arguments(arguments, PROGRAM).only("N")
    _, switches = read_flags(rest.flags, PROGRAM, {})
    if not given.isdecimal():
        raise UserError(f"{COMMAND_LINE}: N = {given}: must be the number of a mistake, 1 to 13.")
    number = int(given)
    picture = picture_file(switches.picture or f"mistake-{number}.png")
    import torch
    from rich.console import Console

    from posttrain.course.mistakes import (
        IGNORED_LABELS,
        MISTAKES,
        draw_trial,
        ignored_labels,
        raised_alarms,
        shown_alarms,
        trial_table,
        try_mistake,
    )
    from posttrain.runs.progress import Progress

    torch.set_num_threads(1)
    if number == IGNORED_LABELS:
        print(f"Mistake 5: labels of -100 are used as indices\n\n{ignored_labels()}")
        return 0
    with Progress(console=Console(stderr=True)) as progress:
        trial = try_mistake(number, num_steps=switches.steps, progress=progress)
    mistake = MISTAKES[number]
    print(f"Mistake {number}: {mistake.title}\n\n{trial_table(trial)}\n\nWhat tells: {mistake.told_by}.")
    raised = raised_alarms(trial.wrong, honest=mistake.pays is not None)
    print(f"Alarms that the mistaken run would raise: {shown_alarms(raised)}.")
    draw_trial(trial, picture, title=f"Mistake {number}: {mistake.title}")
    print(f"picture: {picture}")
    return 0
