"""Where rows come from, and what their columns are called."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.errors import UserError, require
from posttrain.options.bounds import PositiveFloat
from posttrain.options.generator import GeneratorOptions
from posttrain.schemas import require_left_out


@dataclass(frozen=True, kw_only=True)
class RowSourceOptions(GeneratorOptions):
    """Rows of a file, of several, of a folder that `datasets` saved, of a hub, or of a generator."""

    path: str = ""
    """Where the rows are: a .jsonl (one JSON object a line), .json (a list of objects), .csv or .tsv file, each also
    compressed (.jsonl.gz), a .parquet or .arrow file; several of them as a pattern, such as `data/*.jsonl`; a folder
    saved by `datasets`; or OWNER/NAME of a data set on the hub."""
    split: str = ""
    """Which split of a saved folder or of the hub; without it `train`, or the only one there is."""
    subset: str = ""
    """Which configuration of a data set on the hub, where it has several, such as `main` of gsm8k."""
    revision: str = ""
    """Which commit, tag or branch of a data set on the hub; without it the newest."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """New names of columns and what they are called in the rows, such as `{prompt: question, ground_truth: answer}`;
    a column that had the new name already is left out."""
    delimiter: str = ""
    """What stands between the cells of a .csv file; without it the one of `,` `;` tab and `|` that makes most columns
    of the first line."""
    json_columns: tuple[str, ...] = ()
    """Columns, by their names in the rows, whose text is read as JSON: numbers, lists and messages in the cells of a
    .csv file, which otherwise are all text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not (self.path and self.generator), self, "path", "is given beside a generator; leave one of them out")
        if not self.generator:
            made = ("generator_options", "generator_seed", "generator_size")
            require_left_out(self, made, "is about rows that a generator makes, and generator is empty")
        require(len(self.delimiter) <= 1, self, "delimiter", "must be a single character, such as ;")


@dataclass(frozen=True, kw_only=True)
class MixtureSourceOptions(RowSourceOptions):
    """One data set of a mixture."""

    name: str = ""
    """What its rows have in the column `source`, and metrics of it in their name; without it that of the file or
    generator."""
    weight: PositiveFloat | None = None
    """Its share of the prompts in proportion to the other weights, whatever its size; with none for any source each
    row counts alike."""

    def __post_init__(self) -> None:
        super().__post_init__()
        named = self.path != "" or self.generator != ""
        require(named, self, "path", "is empty; every source names its rows, by a path or a generator")


def require_weights(sources: tuple[MixtureSourceOptions, ...]) -> None:
    """Refuse weights for some sources of a mixture and not for the others."""
    given = [source.weight is not None for source in sources]
    if any(given) and not all(given):
        without = sources[given.index(False)]
        raise UserError(
            f"sources: {without.path or without.generator} has no weight, and others have; give each source one, or"
            " none"
        )
