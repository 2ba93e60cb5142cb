"""The rollout files of a run as one pyarrow table, and as a pandas frame.  Torch-free."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from posttrain.errors import RunError, UserError

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

Kept = Literal["rollouts", "evaluations", "token_columns"]
"""Folders of a run with a Parquet file for each step."""


def rollout_table(
    run: Path, kept: Kept = "rollouts", *, steps: Collection[int] | None = None, columns: Sequence[str] | None = None
) -> "pa.Table":
    """The rows of all files, or of some steps, in order; only the named columns are read.

    A column is null where a file does not have it.  Raises UserError if there are no files, RunError for a damaged one.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = {int(file.stem.removeprefix("step-")): file for file in sorted((run / kept).glob("step-*.parquet"))}
    wanted = [file for step, file in found.items() if steps is None or step in steps]
    if not wanted:
        some = "" if steps is None else f" of the steps {', '.join(map(str, steps))}"
        raise UserError(f"{run / kept}: no files{some}.  Name the folder of a run that has them.")
    tables, known = [], dict[str, None]()
    for file in wanted:
        try:
            held = pq.read_schema(file).names
            known |= dict.fromkeys(held)
            names = None if columns is None else [name for name in columns if name in held]
            tables.append(pq.read_table(file, columns=names))
        except (pa.ArrowException, OSError) as error:
            says = (str(error).splitlines() or [""])[0]
            remedy = "Exclude its step with `steps`, or repair the file."
            raise RunError(f"{file}: damaged, or still being written ({says}).  {remedy}") from error
    if missing := [name for name in columns or () if name not in known]:
        raise UserError(f"{run / kept}: no file has the column `{missing[0]}`.  There are: {', '.join(known)}.")
    return pa.concat_tables(tables, promote_options="permissive")


def pandas_frame(table: "pa.Table") -> "pandas.DataFrame":
    """The table for pandas, which is not a dependency.  Raises UserError if it is not installed."""
    try:
        return table.to_pandas()
    except ImportError as error:
        raise UserError("to_pandas: pandas is not installed.  Run `pip install pandas`.") from error
