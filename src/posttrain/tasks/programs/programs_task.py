"""Programming problems: prompts and hidden tests from a local file, in any of the usual layouts.

**What the prompt looks like.**  The problem, with a line that asks for one fenced block of Python.

**What earns what.**  posttrain.rewards.code.code_reward: a program that passes all tests of its row, in the sandbox.

**Which problems are trained on.**  As in posttrain.tasks.dataset: whole rows are held out, by a hash of the prompt.

**Known hacks.**  Those of posttrain.rewards.code.code_reward.  Tests that are shown in a prompt can be learned by
heart.
"""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from posttrain.errors import UserError
from posttrain.options.dataset import BUNDLED_PROGRAMS, ProgramsOptions
from posttrain.rewards.code.code_reward import CodeReward
from posttrain.rewards.grading.function import RewardFunction
from posttrain.tasks.base import PromptRenderer
from posttrain.tasks.dataset import DatasetTask, Rows
from posttrain.tasks.programs.program_layouts import program_row
from posttrain.tasks.rows import DatasetRow

ASKED_FOR = "\n\nGive the whole program in one block that begins with ```python and ends with ```."


class ProgramsTask(DatasetTask):
    """Rows of programming problems."""

    name = "programs"
    reward_functions: tuple[RewardFunction, ...] = (
        RewardFunction(name="code", call=CodeReward(), text_only=True, bounded=True),
    )

    def __init__(
        self,
        options: ProgramsOptions,
        renderer: PromptRenderer,
        *,
        seed: int,
        prompts_per_step: int,
        rows: Rows | None = None,
        held_out_rows: Rows | None = None,
    ) -> None:
        path = str(bundled_programs()) if options.path == BUNDLED_PROGRAMS else options.path
        found = replace(options, path=path, prompt_column="prompt")
        given = {"rows": rows, "held_out_rows": held_out_rows}
        super().__init__(found, renderer, seed=seed, prompts_per_step=prompts_per_step, **given)

    def prepared(self, row: DatasetRow) -> DatasetRow:
        """In our own layout, its prompt with what is asked for."""
        return with_request(program_row(row))


def with_request(row: DatasetRow) -> DatasetRow:
    """The row with the line that asks for a block of Python."""
    prompt = row.columns["prompt"]
    if not isinstance(prompt, str):
        raise UserError(f"{row.where}: a programming problem must be text, not {type(prompt).__name__}")
    return DatasetRow(row.where, {**row.columns, "prompt": prompt + ASKED_FOR})


def bundled_programs() -> Path:
    """The problems that come with the package."""
    return Path(str(files("posttrain") / "assets" / "programs.jsonl"))
