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


BUNDLED_PROGRAMS = "bundled"
"""The path of the problems in the package."""


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(RowSourceOptions):
    """Prompts from rows of data, one each; every other column reaches the reward functions by its name."""

    name: Literal["dataset"] = "dataset"
    sources: tuple[MixtureSourceOptions, ...] = ()
    """Several data sets instead of `path`, as a list such as `[{path: maths.jsonl, weight: 2}, {path: code.jsonl,
    weight: 1}]`.  The column `source` says which one a row is of; rewards can select by it."""
    shuffle: bool = True
    """Draw the rows of each epoch in another order; without it always in the order of the data.  The turns of a
    mixture's sources are random either way."""
    prompt_column: NonEmptyStr = "prompt"
    """Column with the prompt: text, or a list of messages with `role` and `content`."""
    prompt_format: Literal["auto", "plain", "chat"] = "auto"
    """`auto`: text unchanged, and lists of messages through the model's chat template.  `chat`: text too, as a user's
    message.  `plain`: no template; of messages the contents without roles, an empty line between two."""
    system: str = ""
    """System message before every prompt, which makes text a conversation; with `prompt_format: plain`, text above the
    prompt and an empty line."""
    prefill: str = ""
    """Beginning of every answer, such as `<think>`: part of the prompt, and read by the rewards."""
    last_assistant_message: Literal["error", "prefill", "drop"] = "error"
    """How to treat a last message by the assistant: as an error, as the beginning of the answer (before `prefill`), or
    as an answer to leave out, as in rows for supervised training."""
    over_long: Literal["error", "skip", "cut_left"] = "error"
    """What to do with a prompt that is too long: refuse it as a bad row, skip the row, or cut the prompt from its
    beginning.  Of messages the oldest turns go first, the system message stays, and the last is cut if necessary."""
    max_prompt_tokens: PositiveInt | None = None
    """Most tokens of a prompt.  Null: for `skip` and `cut_left`, what the model's context and
    `update.tokens_per_microbatch` leave with `rollout.max_completion_tokens`; for `error`, what leaves any room."""
    skip_bad_rows: NonNegativeInt = 0
    """Most unusable rows (a broken line, a missing column, an empty prompt) to skip; the plan lists them, and more are
    an error."""
    held_out_path: str = ""
    """Rows to evaluate on, named as in `path`; their prompts are not trained on."""
    held_out_split: str = ""
    """Split to evaluate on, of `held_out_path` or else of `path`."""
    held_out_share: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Without `held_out_path` and `held_out_split`: share of different prompts kept for evaluation, chosen by a hash of
    the prompt, so the same for every seed; 0 trains on all and evaluates on none."""
    held_out_size: PositiveInt = 512
    """Most held-out rows to evaluate on; the others are not trained on either."""

    rules: ClassVar[Rules] = (
        Rule(
            "sources",
            lambda o: len({each.weight is None for each in o.sources}) <= 1,
            "have weights for some.  Give all or none one.",
        ),
        Rule("path", lambda o: not (o.sources and o.path), "is given as well as sources.  Make it one of them."),
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
    """Programming problems from a local file in the layout of HumanEval, MBPP, APPS, CodeContests or our own."""

    name: Literal["programs"] = "programs"  # type: ignore[assignment]
    path: str = BUNDLED_PROGRAMS
    """File of problems: .jsonl, .json, .csv or .parquet; `bundled` means the 34 that come with the package."""


@dataclass(frozen=True, kw_only=True)
class GeneratedOptions(DatasetOptions):
    """Problems of one generator of reasoning-gym, scored by the reward `generated`."""

    name: Literal["generated"] = "generated"  # type: ignore[assignment]
    generator: str = "leg_counting"
    """Generator of reasoning-gym that makes the problems, by its name there."""

    rules: ClassVar[Rules] = (
        Rule("sources", lambda o: not o.sources, "is not for this task.  Use task.name = dataset."),
    )
