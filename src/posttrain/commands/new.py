"""`posttrain new`: make a folder with rows, a reward and a recipe for your own problem, ready to train."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain.commands.arguments import split_arguments
from posttrain.commands.flags import COMMAND_LINE, CommandSpec, read_flags
from posttrain.errors import UserError
from posttrain.options.bounds import Bounded

TEMPLATES = Path(__file__).parents[1] / "assets" / "new"
"""A folder for each kind.  Python files end in `.py.template`: they are not code of this package."""


@dataclass(frozen=True, kw_only=True)
class NewSwitches(Bounded):
    """What the folder is for."""

    kind: Literal["rule", "judge", "tools"] = "rule"
    """`rule`: a function checks each completion.  `judge`: a reward model, trained on pairs of answers, scores it.
    `tools`: the policy calls your function while it answers."""


PROGRAM = CommandSpec(
    name="posttrain new FOLDER",
    description="Make a folder with rows, a reward, a recipe and a README for your own problem.  It passes"
    " `posttrain check-task` and trains unchanged, in less than a minute with a bundled model.  The README says what to"
    " change first.",
    switches=NewSwitches(),
)


def main(arguments: Sequence[str]) -> int:
    """Make the folder, and print the next commands."""
    name, given = split_arguments(arguments, PROGRAM).only("FOLDER")
    _, switches = read_flags(given.flags, PROGRAM, {})
    folder = Path(name)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{COMMAND_LINE}: {folder}: is a file.  Name a new folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{COMMAND_LINE}: {folder}: the folder is not empty.  Name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for file in sorted((TEMPLATES / switches.kind).iterdir()):
        made.append(file.name.removesuffix(".template"))
        (folder / made[-1]).write_bytes(file.read_bytes())
    print(f"{folder}: {', '.join(made)}\n\nTo try it as it is:\n\n    cd {shlex.quote(name)}")
    print("\n".join(f"    {command}" for command in commands_in(folder / "README.md")))
    print("\nREADME.md says what to change first.")
    return 0


def commands_in(readme: Path) -> list[str]:
    """The commands of a README, in order."""
    return re.findall(r"^\$ (.*)$", readme.read_text(encoding="utf-8"), re.MULTILINE)
