"""`posttrain course`: try a mistake of course notebooks, or your own version of a course's function."""

from collections.abc import Sequence
from importlib import import_module

from posttrain.commands.flags import COMMAND_LINE
from posttrain.errors import UserError
from posttrain.schemas import did_you_mean

SUBCOMMANDS = {
    "mistake": ("mistake N", "train 20 steps with a mistake of course notebooks and without it, and draw both"),
    "check": ("check FUNCTION FILE", "try your own version of a course's function on the cases of our tests"),
}
"""A module of this package -> its usage, and what it does."""


def main(arguments: Sequence[str]) -> int:
    """Run a subcommand."""
    if not arguments or arguments[0] in ("-h", "--help"):
        rows = "\n".join(f"  {usage:22} {does}" for usage, does in SUBCOMMANDS.values())
        print(f"usage: posttrain course SUBCOMMAND [ARGUMENTS]\n\nExercises for students of RLHF and GRPO.\n\n{rows}")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in SUBCOMMANDS:
        raise UserError(f"{COMMAND_LINE}: course {name}: no such subcommand.  {did_you_mean(name, [*SUBCOMMANDS])}")
    return int(import_module(f"posttrain.commands.course.{name}").main(rest))
