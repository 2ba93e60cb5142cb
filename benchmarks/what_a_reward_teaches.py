"""What a task-specific reward teaches, and what it does not: four rewards, one model, everything scored on everything.

    python benchmarks/what_a_reward_teaches.py [--seeds 0] [--minutes 8]
    python benchmarks/what_a_reward_teaches.py --table

The bundled model is trained on Countdown by the answer alone, by the form alone, by a shaped reward and by a process
reward (recipes/experiments/); a fifth run has the answer's rewards permuted over each step.  Each of them, and the
model before, answers held-out problems of the task that was trained on, of three variants of it that never were, and
additions put as questions; all rewards score all answers.  Same problems, same uniform numbers: differences to the
model before are paired by problem.  A training run and a scored setting are each a cell, kept as a
file as soon as it is there; the same command goes on where it was stopped, and several may work on different
`--rewards`.  `--table` gathers the cells in benchmarks/results/what_a_reward_teaches.json.

    --judge explanation.yaml doubt.yaml      options of the reward `judge` in each: endpoint, model, rubric, part: all

has rubric judges score every answer too, each under the name of its file; what was scored without them is scored again.
"""

import argparse
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from demo import permuted_countdown

import posttrain
from posttrain.behaviours.behaviour_reader import BehaviourReader
from posttrain.behaviours.behaviour_table import chosen_rows
from posttrain.config.recipes import parse_yaml
from posttrain.generation.engine import sample_groups
from posttrain.options.reward import RewardOptions
from posttrain.options.training import BehaviourOptions
from posttrain.records import Group
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.intervals import bootstrap_interval
from posttrain.training.evaluation import evaluation_request, means_of_problems
from posttrain.training.session import open_session

RESULTS = Path(__file__).parent / "results" / "what_a_reward_teaches.json"
FOLDER = Path("runs/what-a-reward-teaches")
CELLS = FOLDER / "cells"
BASE = "before"
TRAINED = ("outcome", "format", "shaped", "process", "permuted")
REWARDS: Sequence[Mapping[str, Any]] = (
    {"name": "countdown"},
    {"name": "graded_format"},
    {"name": "countdown_credit", "options": {"credit": 0.5}},
    {"name": "countdown_steps"},
)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "as trained": {},
    "numbers to 45": {"max_number": 45},
    "targets 100 to 199": {"min_target": 100, "max_target": 199},
    "four numbers": {"num_numbers": 4},
    "additions": {"name": "arithmetic", "system": ""},
}
"""The tasks that models are scored on; the first is the one that they were trained on."""
SAMPLES = 4
SEARCH = BehaviourReader(chosen_rows(BehaviourOptions(measure=("search",))))


@dataclass(frozen=True)
class Cell:
    """A model by the reward that trained it, and its seed."""

    reward: str
    seed: int

    @property
    def folder(self) -> Path:
        """Where its run is."""
        return FOLDER / f"{self.reward}-{self.seed}"

    @property
    def model(self) -> str:
        """What is scored."""
        return "bundled" if self.reward == BASE else str(self.folder / "model")


def key_of(cell: Cell, setting: str) -> str:
    """What a scored setting is kept under; of none the training run."""
    return f"{cell.reward}/{cell.seed}/{setting or 'training'}"


def kept() -> dict[str, Any]:
    """Everything that has been measured: what is in the results, and over it the cells of the runs' folder."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    cells = {file.stem.replace("+", "/"): json.loads(file.read_text(encoding="utf-8")) for file in CELLS.glob("*.json")}
    return dict(sorted({**results, **cells}.items()))


def keep(key: str, content: Mapping[str, Any]) -> None:
    """Write a cell to a file of its own, so that two commands can work on different cells."""
    CELLS.mkdir(parents=True, exist_ok=True)
    file = CELLS / f"{key.replace('/', '+')}.json"
    file.with_suffix(".new").write_text(json.dumps(content), encoding="utf-8")
    file.with_suffix(".new").rename(file)


def train(cell: Cell) -> dict[str, Any]:
    """One training run; what its last step and its evaluations said."""
    recipe = "outcome" if cell.reward == "permuted" else cell.reward
    own = {"rewards": []} if cell.reward == "permuted" else {}
    config = posttrain.load_recipe(
        "countdown-tiny",
        "experiments/reward-shared",
        f"experiments/reward-{recipe}",
        run={"folder": str(cell.folder), "seed": cell.seed},
        **own,
    )
    begun = any((cell.folder / "checkpoints").glob("step-*"))
    run = posttrain.train(config, rewards=[permuted_countdown] if own else (), resume=begun)
    if run.interrupted:
        raise SystemExit("interrupted; the same command goes on")
    summary = run.summary
    return {"steps": summary["steps"], "tokens": summary["tokens"], "seconds": summary["seconds"]}


def score(cell: Cell, setting: str, judges: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One model on one task: the mean of each problem by each reward, and shares of behaviours."""
    additions = setting == "additions"
    config = posttrain.load_recipe(
        "countdown-tiny",
        "experiments/reward-shared",
        model={"path": cell.model},
        task={"held_out_size": 128, **SETTINGS[setting]},
        rewards=[] if additions else list(REWARDS),
    )
    with open_session(config, inference=True) as session:
        session.load_weights()
        questions = session.questions()
        groups = sample_groups(session.engine, questions.prompts, evaluation_request(questions, samples=SAMPLES))
        functions = [*session.rewards, *more_functions(additions=additions, judges=judges)]
        means = scores_by_reward(groups, functions)
    search = {} if additions else SEARCH.metrics(groups)
    length = float(np.mean([len(each.tokens) for group in groups for each in group.rollouts]))
    before = kept().get(key_of(cell, setting), {"scores": {}})["scores"]  # by judges that are not asked now
    means = {**before, **means}
    return {"scores": means, "behaviours": search, "length": length, "example": groups[0].rollouts[0].text}


def more_functions(*, additions: bool, judges: Mapping[str, Mapping[str, Any]]) -> Iterator[RewardFunction]:
    """What scores beside the rewards of the config."""
    if additions:
        yield load_reward(RewardOptions(name="graded_format"))
    for name, options in judges.items():
        yield replace(load_reward(RewardOptions(name="judge", options=options)), name=name)


def judges_in(files: Sequence[Path]) -> dict[str, Mapping[str, Any]]:
    """The options of each judge, by the name of its file."""
    found: dict[str, Mapping[str, Any]] = {}
    for file in files:
        options = parse_yaml(file.read_text(encoding="utf-8"))
        if not isinstance(options, Mapping) or file.stem in {*found, *(each["name"] for each in REWARDS)}:
            raise SystemExit(f"--judge {file}: give a mapping of options, in a file that no other score is called like")
        found[file.stem] = options
    return found


def scores_by_reward(groups: Sequence[Group], functions: Sequence[RewardFunction]) -> dict[str, list[float]]:
    """Each reward's mean over the answers to every problem; what a function marks counts as its score."""
    grades = grade(groups, functions)
    totals = (grades.scores + grades.marked).numpy()
    return {
        name: [round(value, 4) for value in means_of_problems(row).tolist()]
        for name, row in zip(grades.names, totals, strict=True)
    }


def is_done(cell: Cell, setting: str, judges: Collection[str]) -> bool:
    """Whether nothing is left to do: a model is trained again where it is gone and not all of it was scored."""
    found, key = kept(), key_of(cell, setting)
    if setting:
        return key in found and set(judges) <= set(found[key]["scores"])
    scored = all(is_done(cell, each, judges) for each in SETTINGS)
    return scored or (key in found and Path(cell.model).is_dir())


def table(seed: int) -> str:
    """For each setting a table: rewards that trained in rows, rewards that score in columns."""
    scores = kept()
    parts = []
    for setting in SETTINGS:
        rows = {reward: scores[key] for reward in (BASE, *TRAINED) if (key := f"{reward}/{seed}/{setting}") in scores}
        if BASE not in rows:
            continue
        names = list(dict.fromkeys(name for row in rows.values() for name in row["scores"]))
        parts += [
            f"**{setting}**",
            "",
            f"| trained by | {' | '.join(names)} | length |",
            "|---" * (len(names) + 2) + "|",
        ]
        for reward, row in rows.items():
            base = {} if reward == BASE else rows[BASE]["scores"]
            cells = [
                difference(row["scores"][name], base.get(name)) if name in row["scores"] else "not asked"
                for name in names
            ]
            parts.append(f"| {reward} | {' | '.join(cells)} | {row['length']:.0f} |")
        parts.append("")
    return "\n".join([*parts, behaviour_table(seed)])


def behaviour_table(seed: int) -> str:
    """What searches look like on the task that was trained on."""
    scores = kept()
    names = list(SEARCH.rows)
    lines = [f"| trained by | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for reward in (BASE, *TRAINED):
        row = scores.get(f"{reward}/{seed}/as trained")
        if row is not None:
            shares = [f"{row['behaviours'][f'behaviour/{name}']:.3f}" for name in names]
            lines.append(f"| {reward} | {' | '.join(shares)} |")
    return "\n".join(lines)


def difference(values: Sequence[float], before: Sequence[float] | None) -> str:
    """A mean; beside that of the model before, the paired difference with its 95% interval over problems."""
    mean = f"{np.mean(values):.3f}"
    if before is None:
        low, high = bootstrap_interval(np.array(values))
        return f"{mean} [{low:.3f}, {high:.3f}]"
    low, high = bootstrap_interval(np.array(values) - np.array(before))
    return f"{mean} ({low:+.3f} to {high:+.3f})"


def cells(seeds: Sequence[int], rewards: Sequence[str]) -> Iterator[tuple[Cell, str]]:
    """What is to be done, in order: each reward's training, which has no setting, then its scores."""
    for seed in seeds:
        for reward in rewards:
            cell = Cell(reward, seed)
            if reward != BASE:
                yield cell, ""
            for setting in SETTINGS:
                yield cell, setting


def main() -> None:
    """Do what is not done yet, or show what there is."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--rewards", nargs="*", choices=[BASE, *TRAINED], default=[BASE, *TRAINED])
    parser.add_argument("--minutes", type=float, default=8.0, help="no cell is begun after so many")
    parser.add_argument("--judge", type=Path, nargs="*", default=[], help="YAML files, each of a reward `judge`")
    parser.add_argument("--table", action="store_true", help="gather what is there, and show it")
    given = parser.parse_args()
    judges = judges_in(given.judge)
    began = time.monotonic()
    for cell, setting in cells(given.seeds, given.rewards):
        late = time.monotonic() - began > 60 * given.minutes
        if given.table or late or is_done(cell, setting, judges):
            continue
        print(f"{time.monotonic() - began:.0f} s: {key_of(cell, setting)}", flush=True)
        keep(key_of(cell, setting), score(cell, setting, judges) if setting else train(cell))
    if given.table:
        RESULTS.write_text(json.dumps(kept(), indent=1) + "\n", encoding="utf-8")
        for seed in given.seeds:
            print(table(seed))


if __name__ == "__main__":
    main()
