"""Options of the tasks whose prompts are rows of data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt

from posttrain.options.bounds import (
    GIVEN,
    Bounded,
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Rules,
    Unused,
)


@dataclass(frozen=True, kw_only=True)
class GeneratorOptions(Bounded):
    """A generator of reasoning-gym (extra `gym`) instead of a file of rows."""

    generator: str = ""
    """Name of the reasoning-gym generator that makes the rows, such as `knights_knaves`.  A row has the question as
    `prompt`, the `answer`, and what the reward `generated` needs."""
    generator_options: Mapping[str, object] = field(default_factory=dict)
    """The generator's own configuration, such as `{n_people: 3}`."""
    generator_seed: int = 0
    """Seed of the generator; the run's seed only decides the order of the rows."""
    generator_size: PositiveInt = 1000
    """How many rows the generator makes, held-out rows included."""

    rules: ClassVar[Rules] = (
        Rule("generator_seed", lambda o: 0 <= o.generator_seed < 2**32, "is not a valid seed.  Use 0 to 4294967295."),
        Rule("generator_options", lambda o: "seed" not in o.generator_options, "contains a seed.  Use generator_seed."),
        Rule("generator_options", lambda o: "size" not in o.generator_options, "contains a size.  Use generator_size."),
    )


@dataclass(frozen=True, kw_only=True)
class RowSourceOptions(GeneratorOptions):
    """Rows from one or more files, a folder saved by `datasets`, the hub, or a generator."""

    path: str = ""
    """Where the rows are: a .jsonl (one JSON object per line), .json (a list of objects), .csv or .tsv file, optionally
    compressed (.jsonl.gz); a .parquet or .arrow file; a pattern for several files, such as `data/*.jsonl`; a folder
    saved by `datasets`; or OWNER/NAME of a dataset on the hub."""
    split: str = ""
    """Which split of a saved folder or a hub dataset; empty: `train`, or the only one."""
    subset: str = ""
    """Which configuration of a hub dataset that has several, such as `main` of gsm8k."""
    revision: str = ""
    """Commit, tag or branch of a hub dataset; empty: the newest."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Renames columns: new name to name in the rows, such as `{prompt: question, ground_truth: answer}`.  A column that
    already has the new name is dropped."""
    delimiter: str = ""
    """Character between the cells of a .csv file.  Empty: whichever of `,` `;` tab and `|` splits the first line into
    the most columns."""
    json_columns: tuple[str, ...] = ()
    """Columns, by their names in the rows, whose text is parsed as JSON; otherwise the cells of a .csv file are
    text."""

    rules: ClassVar[Rules] = (
        Rule("path", lambda o: not (o.path and o.generator), "and generator are both given.  Leave one out."),
        Unused("generator_options generator_seed generator_size", {"generator": GIVEN}),
        Rule("delimiter", lambda o: len(o.delimiter) <= 1, "must be a single character.  Use one such as ;"),
    )


@dataclass(frozen=True, kw_only=True)
class MixtureSourceOptions(RowSourceOptions):
    """One dataset of a mixture."""

    name: str = ""
    """The value of `source` in its rows, and part of its metrics' names; empty: the file or generator."""
    weight: PositiveFloat | None = None
    """Its share of the prompts, relative to the other weights and independent of its size.  If no source has a weight,
    all rows are equally likely."""

    rules: ClassVar[Rules] = (
        Rule("path", lambda o: o.path or o.generator, "is empty.  Give every source a path or a generator."),
    )


BUNDLED_PROGRAMS = "bundled"
"""The path of the problems that come with the package."""


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(RowSourceOptions):
    """Prompts from rows of data, one per row; reward functions receive every other column by its name."""

    name: Literal["dataset"] = "dataset"
    sources: tuple[MixtureSourceOptions, ...] = ()
    """Several datasets instead of `path`, as a list such as `[{path: maths.jsonl, weight: 2}, {path: code.jsonl,
    weight: 1}]`.  The column `source` names the dataset of a row; rewards can select by it."""
    shuffle: bool = True
    """Shuffle the rows again in each epoch; false keeps the order of the data.  The order of a mixture's sources is
    random either way."""
    prompt_column: NonEmptyStr = "prompt"
    """Column with the prompt: text, or a list of messages with `role` and `content`."""
    prompt_format: Literal["auto", "plain", "chat"] = "auto"
    """`auto`: text unchanged, and lists of messages through the model's chat template.  `chat`: text too, as a user
    message.  `plain`: no template; the contents of messages are joined by empty lines, without roles."""
    system: str = ""
    """System message before every prompt; it turns a text prompt into a conversation.  With `prompt_format: plain`,
    text before the prompt, followed by an empty line."""
    prefill: str = ""
    """Beginning of every answer, such as `<think>`: part of the prompt, and read by the rewards."""
    last_assistant_message: Literal["error", "prefill", "drop"] = "error"
    """How to treat a prompt that ends with an assistant message: as an error, as the beginning of the answer (before
    `prefill`), or as an answer to remove, as in rows for supervised training."""
    over_long: Literal["error", "skip", "cut_left"] = "error"
    """What to do with a prompt that is too long: treat the row as invalid, skip the row, or cut the beginning of the
    prompt.  In conversations the oldest turns are removed first, the system message stays, and the last message is cut
    if necessary."""
    max_prompt_tokens: PositiveInt | None = None
    """Maximum tokens of a prompt.  Null: for `skip` and `cut_left`, what fits the model's context and
    `update.tokens_per_microbatch` together with `rollout.max_completion_tokens`; for `error`, any length that leaves
    room for a completion."""
    skip_bad_rows: NonNegativeInt = 0
    """Maximum number of invalid rows (a broken line, a missing column, an empty prompt) to skip.  The plan lists them;
    more are an error."""
    held_out_path: str = ""
    """Rows for evaluation, named as in `path`; their prompts are not trained on."""
    held_out_split: str = ""
    """Split for evaluation, from `held_out_path` or else from `path`."""
    held_out_share: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Without `held_out_path` and `held_out_split`: share of distinct prompts kept for evaluation.  A hash of the
    prompt chooses them, so they are the same for every seed.  0 trains on all and evaluates on none."""
    held_out_size: PositiveInt = 512
    """Maximum number of held-out rows to evaluate on; the rest are not trained on either."""

    rules: ClassVar[Rules] = (
        Rule(
            "sources",
            lambda o: len({each.weight is None for each in o.sources}) <= 1,
            "have weights for some and not for all.  Give all of them a weight, or none.",
        ),
        Rule("path", lambda o: not (o.sources and o.path), "and sources are both given.  Move it into sources."),
        Rule("generator", lambda o: not (o.sources and o.generator), "and sources are both given.  Give one of them."),
        Rule(
            "held_out_split",
            lambda o: not (o.sources and o.held_out_split) or o.held_out_path,
            "with sources needs a path.  Give held_out_path, or leave it out.",
        ),
        Rule(
            "last_assistant_message",
            lambda o: (o.prompt_format, o.last_assistant_message) != ("plain", "prefill"),
            "needs a chat template, and prompt_format is plain.  Use drop.",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ProgramsOptions(DatasetOptions):
    """Programming problems from a local file in the format of HumanEval, MBPP, APPS, CodeContests or posttrain."""

    name: Literal["programs"] = "programs"  # type: ignore[assignment]
    path: str = BUNDLED_PROGRAMS
    """File of problems: .jsonl, .json, .csv or .parquet; `bundled` means the 34 problems of this package."""


@dataclass(frozen=True, kw_only=True)
class GeneratedOptions(DatasetOptions):
    """Problems from one generator of reasoning-gym, scored by the reward `generated`."""

    name: Literal["generated"] = "generated"  # type: ignore[assignment]
    generator: str = "leg_counting"
    """Name of the reasoning-gym generator that makes the problems."""

    rules: ClassVar[Rules] = (
        Rule("sources", lambda o: not o.sources, "is not for this task.  Use task.name = dataset."),
    )
