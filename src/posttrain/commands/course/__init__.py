"""`posttrain course`: lessons as notebooks, mistakes of course notebooks, and a check of your own functions."""

from collections.abc import Sequence
from importlib import import_module

from posttrain.commands.flags import COMMAND_LINE, CommandSpec, asks_help, read_flags
from posttrain.errors import UserError
from posttrain.schemas import did_you_mean

SUBCOMMANDS = {
    "mistake": ("mistake N", "train 20 steps with and without a common mistake of course notebooks, and plot both"),
    "notebooks": ("notebooks FOLDER", "write the lessons as Jupyter notebooks"),
    "check": ("check FUNCTION FILE", "test your own version of a course's function on our test cases"),
}
"""A module of this package -> its usage, and what it does."""
PROGRAM = CommandSpec(
    name="posttrain course SUBCOMMAND [ARGUMENTS]",
    description="Exercises for students of RLHF and GRPO.  "
    + "  ".join(f"`{usage}`: {does}." for usage, does in SUBCOMMANDS.values())
    + "  `posttrain course SUBCOMMAND --help` shows the flags of one.",
)


def main(arguments: Sequence[str]) -> int:
    """Run a subcommand."""
    if asks_help(arguments[:1]):
        read_flags(arguments, PROGRAM, {})
    name, *rest = arguments or [""]
    if not name:
        raise UserError(f"{COMMAND_LINE}: SUBCOMMAND is missing.  There are: {', '.join(SUBCOMMANDS)}.")
    if name not in SUBCOMMANDS:
        raise UserError(f"{COMMAND_LINE}: course {name}: no such subcommand.  {did_you_mean(name, [*SUBCOMMANDS])}")
    return int(import_module(f"posttrain.commands.course.{name}").main(rest))
