"""Options of the task whose prompts are rows of a file."""

from dataclasses import dataclass
from typing import Literal

from posttrain.errors import require

BUNDLED_PROGRAMS = "bundled"
"""The path that stands for the problems that come with the package."""


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Prompts from a local file, one row each; every other column reaches the reward functions by its name."""

    name: Literal["dataset"] = "dataset"
    """Which task this is."""
    path: str = ""
    """File of rows: .jsonl (one JSON object a line), .json (a list of objects), .csv or .parquet."""
    prompt_column: str = "prompt"
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
    held_out_path: str = ""
    """File of rows to evaluate on; prompts that are in both files are not trained on."""
    held_out_share: float = 0.1
    """Without `held_out_path`: share of different prompts set apart for evaluation, chosen by a hash of the prompt and
    so the same for every seed; 0 trains on all and evaluates on none."""
    held_out_size: int = 512
    """Most held-out rows that are evaluated on; the others are still never trained on."""

    def __post_init__(self) -> None:
        require(self.prompt_column != "", self, "prompt_column", "names no column; the usual name is `prompt`")
        both = (self.prompt_format, self.last_assistant_message) == ("plain", "prefill")
        require(not both, self, "last_assistant_message", "needs a chat template, and prompt_format is plain; use drop")
        require(0 <= self.held_out_share < 1, self, "held_out_share", "must be at least 0 and below 1, such as 0.1")
        require(self.held_out_size >= 1, self, "held_out_size", "leaves nothing to evaluate on; use >= 1")


@dataclass(frozen=True, kw_only=True)
class ProgramsOptions(DatasetOptions):
    """Programming problems from a local file in the layout of HumanEval, MBPP, APPS, CodeContests or our own."""

    name: Literal["programs"] = "programs"  # type: ignore[assignment]
    """Which task this is."""
    path: str = BUNDLED_PROGRAMS
    """File of problems: .jsonl, .json, .csv or .parquet; `bundled` means the 34 that come with the package."""
