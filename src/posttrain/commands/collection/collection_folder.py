"""The folder of collected preferences; nothing in it needs posttrain to be read.

config.yaml         the resolved configuration
inputs.json         its other inputs, with digests
completions.jsonl   a line for each prompt: its completions and their rewards
answers.jsonl       of a language model as judge: each answer as it came
votes.jsonl         of people: each vote, and each undo
preferences.jsonl   the pairs of which one is better, rows for reward models and preference losses
ties.jsonl          the others, in the same columns
summary.json        counts, agreement, versions

The journals of completions, answers and votes only grow; preferences, ties and summary are written from them each time
that collecting ends or stops.
"""

from pathlib import Path
from typing import Self

from posttrain.binding import bind
from posttrain.commands.collection.prompt_sampler import PairObjects
from posttrain.config import CollectConfig, build
from posttrain.config.recipes import short_reward
from posttrain.errors import UserError
from posttrain.options.collect import OF_CALLS
from posttrain.options.reward import RewardOptions
from posttrain.rewards.grading.function import RewardFunction
from posttrain.runs.files import LineJournal
from posttrain.runs.folder import Folder, lock_folder
from posttrain.runs.named_inputs import files_of_reward, inputs_of_run, policy_input, read_all
from posttrain.runs.run_inputs import FILE as INPUTS
from posttrain.runs.run_inputs import RunInput, RunInputs, class_name, code_input
from posttrain.runs.same_recipe import lasting_options, option_differences, run_recipe

COMPLETIONS, ANSWERS, VOTES = "completions.jsonl", "answers.jsonl", "votes.jsonl"
PREFERENCES, TIES = "preferences.jsonl", "ties.jsonl"
MAY_CHANGE = frozenset(
    [
        *("run.folder", "run.overwrite", "run.threads", "judge.endpoint"),
        *("judge.options", *(f"judge.options.{name}" for name in OF_CALLS)),  # the first if there are none
    ]
)
"""Options that a resumed collection may change: the user's server may have another port the next day."""


class CollectionFolder(Folder):
    """The one writer of such a folder."""

    contents = (INPUTS, COMPLETIONS, ANSWERS, VOTES, PREFERENCES, TIES, "summary.json", "config.yaml")
    journals = (COMPLETIONS,)
    content_files = (COMPLETIONS, ANSWERS, VOTES)
    foreign = ("metrics.jsonl", "checkpoints")
    resumed_by = "collect"

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Become the writer of a folder that is known to be a collection's."""
        return cls(path, lock_folder(path), begun=True)

    def __init__(self, path: Path, lock: int, *, begun: bool, new: bool = False) -> None:
        super().__init__(path, lock, begun=begun, new=new)
        self._line_journals = {name: LineJournal(self.path / name) for name in (COMPLETIONS, ANSWERS, VOTES)}

    def journal(self, name: str) -> LineJournal:
        """A journal: one object for all who write to it."""
        return self._line_journals[name]


def inputs_of_collection(config: CollectConfig, own: PairObjects) -> RunInputs:
    """The caller's objects, and the files that the recipe names, with digests."""
    objects, named = policy_input(own.policy), dict[str, RunInput]()
    for index, reward in enumerate(own.rewards):
        if isinstance(reward, str):
            options = bind(RewardOptions, short_reward(reward), where="rewards")
            named |= read_all(files_of_reward(f"rewards[{index}], by its name", options))
        else:
            call = reward.call if isinstance(reward, RewardFunction) else reward
            objects[f"rewards[{index}]"] = code_input(class_name(reward), call)
    return inputs_of_run(config, objects, rows=own.rows, files=named)


def require_same_collection(folder: Path, config: CollectConfig) -> None:
    own = build(CollectConfig, [run_recipe(folder)], to_run=False)
    found = option_differences(lasting_options(own, MAY_CHANGE), lasting_options(config, MAY_CHANGE))
    if found:
        rule = f"the config differs from the collection's own in {'; '.join(found)}"
        raise UserError(f"resume {folder}: {rule}.  Restore it, or collect into another folder.")
