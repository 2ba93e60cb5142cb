"""Options of the tasks whose prompts are rows of data."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from posttrain.errors import require
from posttrain.options.bounds import NonEmptyStr, NonNegativeInt, PositiveInt
from posttrain.options.row_source import MixtureSourceOptions, RowSourceOptions, require_weights

BUNDLED_PROGRAMS = "bundled"
"""The path that stands for the problems that come with the package."""


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(RowSourceOptions):
    """Prompts from rows of data, one each; every other column reaches the reward functions by its name."""

    name: Literal["dataset"] = "dataset"
    """Which task this is."""
    sources: tuple[MixtureSourceOptions, ...] = ()
    """Several data sets in place of `path`, as a list such as `[{path: maths.jsonl, weight: 2}, {path: code.jsonl,
    weight: 1}]`; each row says in a column `source` which it is of, and rewards are told apart by it."""
    shuffle: bool = True
    """Draw the rows of every epoch in an order of its own; without it always in the order of the data, a mixture's
    sources in turns that are drawn all the same."""
    prompt_column: NonEmptyStr = "prompt"
    """Column with the prompt: text, or a list of messages with `role` and `content`."""
    prompt_format: Literal["auto", "plain", "chat"] = "auto"
    """`auto`: text as it stands, and lists of messages through the model's chat template.  `chat`: text too, as a
    user's message.  `plain`: without a template; of messages the contents, an empty line between two, without roles."""
    system: str = ""
    """System message before every prompt.  It makes conversations of text, but with `prompt_format: plain`, where it
    stands above the text with an empty line between."""
    prefill: str = ""
    """Beginning of every answer, given in the prompt and read by the rewards, such as `<think>`."""
    last_assistant_message: Literal["error", "prefill", "drop"] = "error"
    """What a last message of the assistant's is: nothing that may be there, the beginning of the answer (before
    `prefill`), or an answer that is left out, as in rows for supervised training."""
    over_long: Literal["error", "skip", "cut_left"] = "error"
    """What to do with a prompt of more tokens than allowed: refuse it as a bad row, leave the row out, or cut the
    prompt from its beginning; of messages the oldest turns go first, the system message stays, and the last is cut if
    it must be."""
    max_prompt_tokens: PositiveInt | None = None
    """Most tokens of a prompt.  Without it: of `skip` and `cut_left`, what the model's context and
    `update.tokens_per_microbatch` leave beside `rollout.max_completion_tokens`; of `error`, what leaves any room."""
    skip_bad_rows: NonNegativeInt = 0
    """How many rows that cannot be used (a broken line, a missing column, an empty prompt) are left out; more are an
    error, and the plan says which they were."""
    held_out_path: str = ""
    """Rows to evaluate on, named as in `path`; prompts that are on both sides are not trained on."""
    held_out_split: str = ""
    """Split to evaluate on, of `held_out_path` or else of `path`."""
    held_out_share: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Without `held_out_path` and `held_out_split`: share of different prompts set apart for evaluation, chosen by a
    hash of the prompt and so the same for every seed; 0 trains on all and evaluates on none."""
    held_out_size: PositiveInt = 512
    """Most held-out rows that are evaluated on; the others are still never trained on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weights(self.sources)
        require(not (self.sources and self.path), self, "path", "is given beside sources; make it one of them")
        alone = not (self.sources and self.generator)
        require(alone, self, "generator", "is given beside sources; make it one of them: sources: [{generator: …}]")
        one_path = not self.sources or self.held_out_path or not self.held_out_split
        require(bool(one_path), self, "held_out_split", "is of no one path; give held_out_path, or sources without it")
        both = (self.prompt_format, self.last_assistant_message) == ("plain", "prefill")
        require(not both, self, "last_assistant_message", "needs a chat template, and prompt_format is plain; use drop")


@dataclass(frozen=True, kw_only=True)
class ProgramsOptions(DatasetOptions):
    """Programming problems from a local file in the layout of HumanEval, MBPP, APPS, CodeContests or our own."""

    name: Literal["programs"] = "programs"  # type: ignore[assignment]
    """Which task this is."""
    path: str = BUNDLED_PROGRAMS
    """File of problems: .jsonl, .json, .csv or .parquet; `bundled` means the 34 that come with the package."""


@dataclass(frozen=True, kw_only=True)
class GeneratedOptions(DatasetOptions):
    """Problems of one generator of reasoning-gym, scored by the reward `generated`."""

    name: Literal["generated"] = "generated"  # type: ignore[assignment]
    """Which task this is."""
    generator: str = "leg_counting"
    """Generator of reasoning-gym that makes the problems, by its name there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "is for rows; this task's are of one generator: name the task dataset, and each generator among sources"
        require(not self.sources, self, "sources", rule)
