"""`posttrain course notebooks`: the lessons, to work with."""

from collections.abc import Sequence
from pathlib import Path

from posttrain.commands.arguments import split_arguments
from posttrain.commands.flags import CommandSpec, read_flags

PROGRAM = CommandSpec(
    name="posttrain course notebooks FOLDER",
    description="Write the lessons of the documentation as Jupyter notebooks.  FOLDER is made if it is missing; a file"
    " that is there is never overwritten.",
)


def main(arguments: Sequence[str]) -> int:
    """Write them, and name the folder."""
    folder, rest = split_arguments(arguments, PROGRAM).only("FOLDER")
    read_flags(rest.flags, PROGRAM, {})
    from posttrain.course.notebooks import write_notebooks

    written = write_notebooks(Path(folder))
    print(f"{len(written)} lessons in {folder}.  Open one with JupyterLab (pip install jupyterlab):")
    print(f"  jupyter lab {written[0]}")
    return 0
