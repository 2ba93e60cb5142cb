"""Where rows come from, and what their columns are called."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from posttrain.options.bounds import Bounded, PositiveFloat, PositiveInt
from posttrain.options.rules import GIVEN, Rule, Rules, Unused


@dataclass(frozen=True, kw_only=True)
class GeneratorOptions(Bounded):
    """A generator of reasoning-gym (extra `gym`) in place of a file of rows."""

    generator: str = ""
    """Generator of reasoning-gym that makes the rows, by its name there, such as `knights_knaves`.  A row has the
    question as `prompt`, the `answer`, and what the reward `generated` needs."""
    generator_options: Mapping[str, object] = field(default_factory=dict)
    """The generator's own configuration, such as `{n_people: 3}`."""
    generator_seed: int = 0
    """Seed of the generator; the run's seed only decides the order of the rows."""
    generator_size: PositiveInt = 1000
    """How many rows the generator makes, held-out rows included."""

    rules: ClassVar[Rules] = (
        Rule("generator_seed", lambda o: 0 <= o.generator_seed < 2**32, "is not a valid seed.  Use 0 to 4294967295."),
        Rule("generator_options", lambda o: "seed" not in o.generator_options, "has a seed.  Use generator_seed."),
        Rule("generator_options", lambda o: "size" not in o.generator_options, "has a size.  Use generator_size."),
    )


@dataclass(frozen=True, kw_only=True)
class RowSourceOptions(GeneratorOptions):
    """Rows of a file, of several, of a folder that `datasets` saved, of a hub, or of a generator."""

    path: str = ""
    """Where the rows are: a .jsonl (one JSON object a line), .json (a list of objects), .csv or .tsv file, also
    compressed (.jsonl.gz); a .parquet or .arrow file; a pattern of several, such as `data/*.jsonl`; a folder saved by
    `datasets`; or OWNER/NAME of a data set on the hub."""
    split: str = ""
    """Which split of a saved folder or of the hub; empty is `train`, or the only one."""
    subset: str = ""
    """Which configuration of a data set on the hub that has several, such as `main` of gsm8k."""
    revision: str = ""
    """Commit, tag or branch of a data set on the hub; empty is the newest."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """New names of columns and their names in the rows, such as `{prompt: question, ground_truth: answer}`; a column
    that already has the new name is dropped."""
    delimiter: str = ""
    """Character between the cells of a .csv file; empty is the one of `,` `;` tab and `|` that splits the first line
    into most columns."""
    json_columns: tuple[str, ...] = ()
    """Columns, by their names in the rows, whose text is read as JSON: the cells of a .csv file are otherwise text."""

    rules: ClassVar[Rules] = (
        Rule("path", lambda o: not (o.path and o.generator), "and generator are both given.  Leave one out."),
        Unused("generator_options generator_seed generator_size", {"generator": GIVEN}),
        Rule("delimiter", lambda o: len(o.delimiter) <= 1, "must be a single character.  Use one such as ;"),
    )


@dataclass(frozen=True, kw_only=True)
class MixtureSourceOptions(RowSourceOptions):
    """One data set of a mixture."""

    name: str = ""
    """The value of its rows' column `source`, and part of its metrics' names; empty is the file or generator."""
    weight: PositiveFloat | None = None
    """Its share of the prompts, relative to the other weights and whatever its size; without any weights all rows are
    equally likely."""

    rules: ClassVar[Rules] = (
        Rule("path", lambda o: o.path or o.generator, "is empty.  Give every source a path or a generator."),
    )


def same_kind_of_weights(sources: tuple[MixtureSourceOptions, ...]) -> bool:
    """Whether all sources of a mixture have weights, or none."""
    return len({source.weight is None for source in sources}) <= 1
