"""Options of the tasks whose prompts are rows of data."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt

from posttrain.options.bounds import NonEmptyStr, NonNegativeInt, PositiveInt
from posttrain.options.row_source import MixtureSourceOptions, RowSourceOptions, same_kind_of_weights
from posttrain.options.rules import Rule, Rules

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
        Rule("sources", lambda o: same_kind_of_weights(o.sources), "have weights for some.  Give all or none one."),
        Rule("path", lambda o: not (o.sources and o.path), "is given as well as sources.  Make it one of them."),
        Rule(
            "generator", lambda o: not (o.sources and o.generator), "and sources are both given.  Make it one of them."
        ),
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
