"""A run of inverse RL, from its config to its folder: world, demonstrations, features, fit, measures, pictures.

The folder; reading it does not need posttrain:

config.yaml         the resolved configuration; running it again gives the same run
metrics.jsonl       one line per iteration of the fit
summary.json        the results
reward.npz          weights, the learned reward, the policy and its visits, with the number of each state; of a
                    grid also its `shape` (width, height), the `moves` (x, y) of its actions, and whether y grows
                    `upwards`
demonstrations.npz  the episodes, as `Demonstrations.save` writes them
plots/              rewards.png, policy.png, visits.png, convergence.png
"""

import io
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from posttrain.config import IrlConfig
from posttrain.errors import StoppedAtOnce
from posttrain.irl.counting import in_world
from posttrain.irl.demonstrations import FIELDS
from posttrain.irl.minimisers import Watch
from posttrain.irl_runs import methods
from posttrain.irl_runs.expert_episodes import ExpertEpisodes, make_expert_episodes
from posttrain.irl_runs.irl_report import evaluation_words, irl_plan_lines, irl_result_lines, warnings_as_lines
from posttrain.irl_runs.worlds import World, make_world
from posttrain.options.irl import CourseOptions
from posttrain.runs.files import LineJournal
from posttrain.runs.folder import Folder, saved_recipe, shown
from posttrain.runs.interruption import NOTHING_KEPT, interruptible, stopped_with_a_word
from posttrain.runs.progress import Clock, Progress, StageDisplay, peak_memory_bytes

if TYPE_CHECKING:
    from posttrain.runs.watchers import Watcher
CONTENTS = (
    "summary.json",
    "metrics.jsonl",
    "reward.npz",
    "demonstrations.npz",
    "plots",
    "config.yaml",  # last: a half cleared folder is still recognised as a run's
)
"""What overwriting removes; anything else in the folder stays."""


class IrlFolder(Folder):
    """The folder of a run of inverse RL."""

    contents = CONTENTS
    journals = ()
    folders = ()
    content_files = ("metrics.jsonl",)
    foreign = ("checkpoints", "scores.jsonl")
    resumed_by = ""

    def write_curve(self, curve: Sequence[Mapping[str, float]]) -> None:
        """Write metrics.jsonl: the numbers of each iteration, counted from 0, before the first step."""
        lines = [{"iteration": index, **without_infinities(numbers)} for index, numbers in enumerate(curve)]
        LineJournal(self.path / "metrics.jsonl").append(lines)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        super().write_summary(without_infinities(summary))

    def write_arrays(self, name: str, arrays: Mapping[str, ndarray]) -> None:
        content = io.BytesIO()
        named: dict[str, Any] = dict(arrays)
        np.savez_compressed(content, **named)
        self.write(name, content.getvalue())


def without_infinities(numbers: Mapping[str, object]) -> dict[str, object]:
    """The same with null for NaN and infinity, which JSON does not have."""

    def finite(value: object) -> object:
        if isinstance(value, Mapping):
            return without_infinities(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: finite(value) for name, value in numbers.items()}


PACKAGES = ("posttrain", "numpy", "scipy", "gymnasium")
"""Packages that results depend on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class IrlRun:
    """A finished run."""

    folder: Path
    world: World
    expert: ExpertEpisodes
    recovered: methods.RecoveredReward
    summary: Mapping[str, object]
    """The content of summary.json."""


def recover(config: IrlConfig, *, watchers: Sequence["Watcher"] = ()) -> IrlRun:
    """Find the reward that explains demonstrations; `posttrain irl` in Python.

    `watchers` get `on_step` with the numbers of each evaluation of the fit, counted from 1, and `on_end` with the
    summary.  Evaluations are not lines of metrics.jsonl, so the return value of `on_step` is ignored.
    """
    if watchers:
        from posttrain.runs.watchers import require_watchers  # it loads torch, which inverse RL does without

        watchers = require_watchers(watchers)
    clock = Clock()
    claimed = IrlFolder.claim(config.run.folder, overwrite=config.run.overwrite)
    with (
        claimed as folder,
        stopped_with_a_word(lambda: NOTHING_KEPT),
        Progress() as progress,
        warnings_as_lines(progress.note),
    ):
        with clock("world"):
            world = make_world(config.world)
        with clock("demonstrations"), progress.stage("demonstrations"):
            expert = make_expert_episodes(config.demonstrations, world)
            in_world(expert.episodes, world.mdp)  # for its errors, before anything slow begins
            features = methods.linear_reward(config.features, world)
            num_features = features.bound(world.mdp).num_features
        progress.start(irl_plan_lines(config, world, expert, num_features))
        most = None if isinstance(config.method, CourseOptions) else config.method.max_iterations
        with clock("fit"), progress.stage("fit", most=most) as stage:
            seen = watched_by(watchers, stage)
            recovered = methods.fit_reward(config.method, world, features, expert.episodes, seen)
        with clock("measures"), progress.stage("measures"):
            numbers = methods.policy_measures(world, expert, recovered)
            numbers["least_gap"] = methods.least_gap(recovered) if config.run.least_gap else None
        with interruptible(lambda: "the run ends when its results are written.") as interruption:
            folder.begin(saved_recipe(config))  # only now: neither a mistake nor an interruption costs an earlier run
            write_irl_results(folder, world, expert, recovered)
            if config.run.plots:
                with clock("plots"), progress.stage("plots"):
                    from posttrain.irl_runs.pictures import draw_all

                    draw_all(folder.path / "plots", world, expert, recovered)
            summary = run_summary(config, world, expert, recovered, {**numbers, **recovered.measures})
            seconds = {**clock.seconds, "total": sum(clock.seconds.values())}
            summary |= {"seconds": seconds, "peak_memory_bytes": peak_memory_bytes()}
            folder.write_summary(summary)
        if interruption:
            says = f"{interruption.reason}: interrupted.  The run is finished: all results are in {shown(folder.path)}."
            raise StoppedAtOnce(says)
        for watcher in watchers:
            from posttrain.runs.reports import EndReport

            watcher.on_end(EndReport(step=len(recovered.curve), folder=folder.path, summary=summary))
        progress.finish([*irl_result_lines(summary, folder.path)])
    return IrlRun(folder=folder.path, world=world, expert=expert, recovered=recovered, summary=summary)


def watched_by(watchers: Sequence["Watcher"], stage: StageDisplay) -> Watch:
    """Show each evaluation of a fit, and have a user's watchers see it too."""
    counter = count(1)

    def show(numbers: Mapping[str, float]) -> None:
        stage(says=evaluation_words(stage.done + 1, numbers))

    if not watchers:
        return show
    from posttrain.runs.reports import StepReport

    def both(numbers: Mapping[str, float]) -> None:
        show(numbers)
        report = StepReport(step=next(counter), metrics=dict(numbers))
        for watcher in watchers:
            watcher.on_step(report)

    return both


def write_irl_results(
    folder: IrlFolder, world: World, expert: ExpertEpisodes, recovered: methods.RecoveredReward
) -> None:
    """Write the curve of the fit, the episodes, and the reward with its policy and visits."""
    folder.write_curve(recovered.curve)
    episodes = expert.episodes
    folder.write_arrays("demonstrations.npz", {name: getattr(episodes, name) for name in FIELDS})
    visits = methods.expected_visits(world.mdp, recovered.policy)
    arrays = {
        "weights": recovered.weights,
        "reward": recovered.reward,
        "policy": recovered.policy,
        "expected": recovered.expected,
        "moments": recovered.moments,
        "states": world.mdp.states,
        "demonstrated_visits": methods.demonstrated_visits(world, expert),
    }
    arrays |= {} if visits is None else {"visits": visits}
    arrays |= {} if expert.reward is None else {"expert_reward": np.asarray(expert.reward)}
    arrays |= {} if expert.policy is None else {"expert_policy": expert.policy}
    if world.layout is not None:
        layout = world.layout
        arrays |= {"shape": np.array([layout.width, layout.height]), "moves": np.array(layout.moves)}
        arrays |= {"upwards": np.array(layout.upwards), "terminal": world.mdp.terminal}
    folder.write_arrays("reward.npz", arrays)


def run_summary(
    config: IrlConfig,
    world: World,
    expert: ExpertEpisodes,
    recovered: methods.RecoveredReward,
    numbers: Mapping[str, object],
) -> dict[str, object]:
    mdp, lengths = world.mdp, expert.episodes.lengths
    return {
        "method": config.method.name,
        "world": {
            "name": config.world.name,
            "states": mdp.num_states,
            "actions": mdp.num_actions,
            "transitions": int(mdp.transitions.nnz),
        },
        "demonstrations": {
            "episodes": len(lengths),
            "steps": int(lengths.sum()),
            "steps_per_episode": float(lengths.mean()),
            "terminated": int(expert.episodes.terminated.sum()),
        },
        "features": len(recovered.weights),
        "iterations": len(recovered.curve) - (0 if config.method.name == "course" else 1),
        "converged": recovered.converged,
        **numbers,
        "versions": package_versions(),
    }


def package_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that numbers depend on; null for missing ones."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
