"""`posttrain course check`: test your own version of a course's function on our test cases."""

from collections.abc import Sequence

from posttrain.commands.arguments import split_arguments
from posttrain.commands.flags import COMMAND_LINE, CommandSpec, read_flags
from posttrain.errors import UserError

PROGRAM = CommandSpec(
    name="posttrain course check FUNCTION FILE",
    description="Test your own version of a course's function on our test cases, and show the first number that"
    " differs.  FUNCTION is a name in posttrain.course, such as compute_grpo_loss; FILE is the Python file that has"
    " your function of the same name.  The file is imported, so it runs.  Exit code 0 if every case passes, else 1.",
)


def main(arguments: Sequence[str]) -> int:
    """Print a line for each case that passes; stop at the first one that fails."""
    name, rest = split_arguments(arguments, PROGRAM).first("FUNCTION")
    file, rest = rest.only("FILE")
    read_flags(rest.flags, PROGRAM, {})
    if not file.endswith(".py"):
        raise UserError(f"{COMMAND_LINE}: FILE = {file}: give the Python file with your {name}, such as mine.py.")
    import torch

    from posttrain.course.own_version import check_own_version

    torch.set_num_threads(1)
    print(f"{name} of {file}")
    for line in check_own_version(name, file):
        print(line, flush=True)
    print("Every case passes.")
    return 0
