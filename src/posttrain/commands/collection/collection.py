"""Collecting preferences: completions are sampled, paired, judged, and written as rows to learn from.

The folder can be read without posttrain.  It has append-only journals: prompts with completions and rewards, a model's
answers, people's votes and undos.  Preferences, ties (same columns) and the summary are written from them each time
collecting ends or stops.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Self

from posttrain.binding import bind
from posttrain.commands.collection import pairs
from posttrain.commands.collection.ballot import Ballot
from posttrain.commands.collection.judge_answers import LlmJudge
from posttrain.commands.collection.prompt_sampler import PromptSampler
from posttrain.config import CollectConfig, build
from posttrain.config.recipes import short_reward
from posttrain.errors import RunError, UserError
from posttrain.models.policy import Policy
from posttrain.options.collect import OF_CALLS, LlmJudgeOptions, RewardJudgeOptions
from posttrain.options.reward import RewardOptions
from posttrain.rewards.grading.function import RewardFunction
from posttrain.runs import named_inputs
from posttrain.runs.files import LineJournal
from posttrain.runs.folder import Folder, lock_folder, resume_command, saved_recipe
from posttrain.runs.interruption import NOTHING_KEPT, Interruption, KeptWork, interruptible, stopped_with_a_word
from posttrain.runs.progress import Progress, peak_memory_bytes
from posttrain.runs.reports import Run, versions
from posttrain.runs.run_inputs import FILE as INPUTS, RunInput, RunInputs, class_name, code_input, require_same_inputs
from posttrain.tasks.dataset import Rows, count_text
from posttrain.training.session import CallerObjects, Rewards

COMPLETIONS, ANSWERS, VOTES = "completions.jsonl", "answers.jsonl", "votes.jsonl"
PREFERENCES, TIES = "preferences.jsonl", "ties.jsonl"
QUESTIONS_AT_A_TIME = 64
"""Judge calls between checks whether the collection should stop."""
MAY_CHANGE = frozenset(
    {"run.folder", "run.overwrite", "run.threads", "judge.endpoint"}
    | {"judge.options", *(f"judge.options.{name}" for name in OF_CALLS)}  # the first if there are none
)
"""Options that a resumed collection may change: the user's server may have another port tomorrow."""


class CollectionFolder(Folder):
    """The only writer of such a folder."""

    contents = (INPUTS, COMPLETIONS, ANSWERS, VOTES, PREFERENCES, TIES, "summary.json", "config.yaml")
    journals = (COMPLETIONS,)
    content_files = (COMPLETIONS, ANSWERS, VOTES)
    foreign = ("metrics.jsonl", "checkpoints")
    resumed_by = "collect"

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Become the writer of a folder that is known to hold a collection."""
        return cls(path, lock_folder(path), begun=True)

    @cached_property
    def line_journals(self) -> dict[str, LineJournal]:
        """One object for all writers of a journal."""
        return {name: LineJournal(self.path / name) for name in (COMPLETIONS, ANSWERS, VOTES)}


def inputs_of_collection(config: CollectConfig, own: CallerObjects) -> RunInputs:
    """The caller's objects, and the files that the recipe names, with digests."""
    objects, named = named_inputs.policy_input(own.policy), dict[str, RunInput]()
    given = own.rewards if isinstance(own.rewards, list | tuple) else [own.rewards]
    for index, reward in enumerate(given):
        if isinstance(reward, str):
            options = bind(RewardOptions, short_reward(reward), where="rewards")
            named |= named_inputs.read_all(named_inputs.files_of_reward(f"rewards[{index}], by its name", options))
        else:
            call = reward.call if isinstance(reward, RewardFunction) else reward
            objects[f"rewards[{index}]"] = code_input(class_name(reward), call)
    return named_inputs.inputs_of_run(config, objects, rows=own.rows, files=named)


def collect(
    config: CollectConfig,
    *,
    policy: Policy | None = None,
    rows: Rows | None = None,
    rewards: Rewards = (),
    people: "Callable[[Collection], None] | None" = None,
    resume: bool = False,
    accept_changes: bool = False,
) -> Run:
    """Collect preferences: what `posttrain collect` does; the pairs are rows of RUN/preferences.jsonl.

    For callers in Python: `policy` (made by `posttrain.as_policy`) replaces the config's model, `rows` replace the
    dataset's file, and `rewards` are added before those of the config.  If judge.name is person, `people` is called
    with the collection; it has people vote on the ballots, and returns when they are done or want to stop.  With
    `resume` the collection in `config.run.folder` continues: nothing is sampled, asked or voted on twice.
    """
    own = CallerObjects(policy=policy, rows=rows, rewards=rewards)
    path, inputs = Path(config.run.folder), inputs_of_collection(config, own)
    if resume:
        before = build(CollectConfig, [named_inputs.run_recipe(path)], to_run=False)
        lasting = (named_inputs.lasting_options(each, MAY_CHANGE) for each in (before, config))
        if found := named_inputs.option_differences(*lasting):
            rule = f"the config differs from the collection's own in {'; '.join(found)}"
            raise UserError(f"resume {path}: {rule}.  Restore it, or collect into another folder.")
        inputs = require_same_inputs(path, inputs, accept_changes=accept_changes)
    judge = LlmJudge(config.judge, seed=config.run.seed) if isinstance(config.judge, LlmJudgeOptions) else None
    if judge is not None:
        judge.reward.key()  # a missing key shows before anything is sampled
    folder = CollectionFolder.resume(path) if resume else CollectionFolder.claim(path, overwrite=config.run.overwrite)
    says = "the collection stops after the current part, and saves it."
    with (
        folder,
        stopped_with_a_word(lambda: kept_of_collection(folder)),
        Progress() as progress,
        interruptible(lambda: says) as interruption,
    ):
        if resume:
            folder.replace_config(saved_recipe(config))
            folder.write_inputs(inputs)
        collection = Collection(config, own, inputs, folder, progress, interruption, judge)
        collection.sample()
        collection.judge(people)
        return collection.finish()


def kept_of_collection(folder: CollectionFolder) -> KeptWork:
    """What a collection has saved, and the command that continues it."""
    if not folder.begun:
        return NOTHING_KEPT
    counts = {name: sum(1 for _ in journal.records()) for name, journal in folder.line_journals.items()}
    prompts = (
        count_text(counts[COMPLETIONS], "prompt")
        + f" with {'its' if counts[COMPLETIONS] == 1 else 'their'} completions"
    )
    kept = f"{prompts}, {count_text(counts[ANSWERS], 'answer')}, {count_text(counts[VOTES], 'vote')}"
    return KeptWork(f"Kept: {kept}.", resume_command(folder.path, "collect"))


@dataclass
class Collection:
    """One collection, from its folder to its rows."""

    config: CollectConfig
    own: CallerObjects
    inputs: RunInputs
    folder: CollectionFolder
    progress: Progress
    interruption: Interruption
    judge_model: LlmJudge | None
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by stage since the collection was started or resumed."""

    @cached_property
    def prompts(self) -> list[pairs.SampledPrompt]:
        """Prompts whose completions are saved."""
        if not self.folder.begun:  # the journal may be of a collection that is overwritten
            return []
        return [pairs.SampledPrompt.read(each) for each in self.folder.line_journals[COMPLETIONS].records()]

    @cached_property
    def chosen(self) -> pairs.ChosenPairs:
        assert self.sampled, "pairs are made from all prompts at once"
        return pairs.choose_pairs(self.prompts, self.config.collect, seed=self.config.run.seed)

    @property
    def sampled(self) -> bool:
        return len(self.prompts) >= self.config.collect.num_prompts

    def sample(self) -> None:
        """Sample what is missing, a batch of prompts at a time; the model is loaded only if something is."""
        began = time.monotonic()
        missing = self.config.collect.num_prompts - len(self.prompts)
        if missing <= 0 or self.interruption:
            return
        with PromptSampler(self.config, self.own) as sampler:
            total = missing * self.config.collect.group_size
            with self.progress.stage("completions", total) as advance:
                for batch in sampler.batches(len(self.prompts), advance):
                    if not self.folder.begun:  # only now is an earlier collection overwritten
                        self.folder.begin(saved_recipe(self.config))
                        self.folder.write_inputs(self.inputs)
                    self.folder.line_journals[COMPLETIONS].append([asdict(each) for each in batch])
                    self.prompts.extend(batch)
                    rewards = [
                        each.reward for prompt in batch for each in prompt.completions if each.reward is not None
                    ]
                    advance(0, f"reward {fmean(rewards):.3f}" if rewards else "")
                    if self.interruption:
                        break
        self.seconds["sample"] = time.monotonic() - began

    def judge(self, people: "Callable[[Collection], None] | None" = None) -> None:
        """Have the open pairs judged; rewards have already judged them by their scores."""
        if self.interruption or not self.sampled:
            return
        began = time.monotonic()
        if self.judge_model is not None:
            try:
                self._ask(self.judge_model)
            except RunError:
                self.finish()  # the answers so far are rows all the same
                raise
        elif self.config.judge.name == "person":
            if people is None:
                remedy = "Use `posttrain collect`, or in Python collect(config, people=...)."
                raise UserError(f"judge.name = person: nobody is given to vote.  {remedy}")
            people(self)
        self.seconds["judge"] = time.monotonic() - began

    def ballot(self, rater: str) -> Ballot:
        return Ballot(self.chosen.pairs, self.folder.line_journals[VOTES], rater=rater, seed=self.config.run.seed)

    def finish(self) -> Run:
        """Write the rows judged so far and the summary; nothing if nothing was sampled."""
        if not self.folder.begun:
            return Run(folder=self.folder.path, summary={}, interrupted=True)
        verdicts, about_judges = self._verdicts() if self.sampled else ([], {})
        chosen = self.chosen if self.sampled else pairs.ChosenPairs(pairs=())
        better = [each for each in verdicts if not each.is_tie]
        ties = [each for each in verdicts if each.is_tie]
        summary: dict[str, object] = {
            "judge": self.config.judge.name,
            "num_prompts": len(self.prompts),
            "num_completions": sum(len(each.completions) for each in self.prompts),
            **{each.name: getattr(chosen, each.name) for each in fields(chosen) if each.name != "pairs"},
            "num_pairs": len(chosen.pairs),
            "num_judged": len(verdicts),
            "num_preferences": len(better),
            "num_ties": len(ties),
            "num_open": len(chosen.pairs) - len(verdicts),
            **about_judges,
            **pairs.length_summary(better),
            "seconds": {**self.seconds, "total": sum(self.seconds.values())},
            "judge_tokens": self.judge_model.budget.tokens if self.judge_model else 0,
            "peak_memory_bytes": peak_memory_bytes(),
            "versions": versions(),
        }
        self.folder.write_rows(PREFERENCES, [each.as_row() for each in better])
        kept = ties if self.config.collect.ties == "keep" else []
        self.folder.write_rows(TIES, [each.as_row() for each in kept])
        self.folder.write_summary(summary)
        return Run(folder=self.folder.path, summary=summary, interrupted=bool(self.interruption))

    def _ask(self, judge: LlmJudge) -> None:
        """Ask the judge the open questions; each answer is on disk before the next batch."""
        journal, most = self.folder.line_journals[ANSWERS], self.config.grading.max_failure_share
        open_now = judge.open_questions(self.chosen.pairs, journal.records())
        if not open_now:
            return
        failures = 0
        with self.progress.stage("questions to the judge", len(open_now)) as advance:
            for start in range(0, len(open_now), QUESTIONS_AT_A_TIME):
                asked = open_now[start : start + QUESTIONS_AT_A_TIME]
                failed = judge.ask(asked, lambda answer: journal.append([answer]), lambda: bool(self.interruption))
                failures += len(failed)
                advance(len(asked))
                if failed and failures > most * (start + len(asked)):
                    rule = f"at most {100 * most:g}% may fail (grading.max_failure_share)"
                    says = f"judge: {failures} of {start + len(asked)} questions failed; {rule}: {failed[-1]}."
                    resume = f"--resume {self.folder.path} (in Python collect(config, resume=True))"
                    raise RunError(f"{says}  Fix it and continue with {resume}.")
                if self.interruption:
                    return

    def _verdicts(self) -> pairs.Judged:
        """The verdicts so far, and the summary's numbers on the judges."""
        chosen, judge = self.chosen.pairs, self.config.judge
        if isinstance(judge, RewardJudgeOptions):
            name = " + ".join(self.prompts[0].completions[0].scores or {}) or "reward"
            return pairs.judged_by_rewards(chosen, judge.margin, name)
        if self.judge_model is None:
            return pairs.judged_by_people(chosen, self.folder.line_journals[VOTES].records())
        records = self.folder.line_journals[ANSWERS].records()
        still_open = {each.pair.id for each in self.judge_model.open_questions(chosen, records)}
        return pairs.judged_by_model(chosen, records, still_open)
