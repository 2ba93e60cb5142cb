"""A run of inverse RL, from its config to its folder: world, demonstrations, features, fit, measures, pictures."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from posttrain.config import IrlConfig
from posttrain.irl.counting import in_world
from posttrain.irl.demonstrations import FIELDS
from posttrain.irl_runs.expert_episodes import Demonstrated, make_demonstrations
from posttrain.irl_runs.irl_folder import begin, claimed, write_arrays, write_curve, write_summary
from posttrain.irl_runs.irl_progress import Teller
from posttrain.irl_runs.measures import demonstrated_visits, measured, visits_of
from posttrain.irl_runs.methods import Found, find, least_gap, linear_reward
from posttrain.irl_runs.worlds import World, make_world
from posttrain.runs.clock import Clock
from posttrain.runs.summary import peak_memory_bytes

PACKAGES = ("posttrain", "numpy", "scipy", "gymnasium")
"""What a run's numbers can depend on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recovery:
    """A finished run."""

    folder: Path
    world: World
    demonstrated: Demonstrated
    found: Found
    summary: Mapping[str, object]
    """The content of summary.json."""


def recover(config: IrlConfig) -> Recovery:
    """Find the reward behind demonstrations; `posttrain irl` in Python."""
    clock = Clock()
    with claimed(config) as folder, Teller() as teller:
        with clock("world"):
            world = make_world(config.world)
        with clock("demonstrations"), teller.stage("demonstrations"):
            demonstrated = make_demonstrations(config.demonstrations, world)
            in_world(demonstrated.episodes, world.mdp)  # for its errors, before anything long begins
            features = linear_reward(config.features, world)
            num_features = features.bound(world.mdp).num_features
        teller.plan(config, world, demonstrated, num_features)
        with clock("fit"), teller.stage("fit") as tell:
            found = find(config.method, world, features, demonstrated.episodes, tell)
        with clock("measures"), teller.stage("measures"):
            numbers = measured(world, demonstrated, found)
            numbers["least_gap"] = least_gap(found) if config.run.least_gap else None
        begin(folder, config)  # only now: neither a mistake nor an interruption costs an earlier run
        keep(folder, world, demonstrated, found)
        if config.run.plots:
            with clock("plots"), teller.stage("plots"):
                draw(folder, world, demonstrated, found)
        summary = summarised(config, world, demonstrated, found, {**numbers, **found.measures})
        summary |= {"seconds": {**clock.seconds, "total": clock.total}, "peak_memory_bytes": peak_memory_bytes()}
        write_summary(folder, summary)
        teller.result(summary, folder)
    return Recovery(folder=folder, world=world, demonstrated=demonstrated, found=found, summary=summary)


def keep(folder: Path, world: World, demonstrated: Demonstrated, found: Found) -> None:
    """Write what was found."""
    write_curve(folder, found.curve)
    episodes = demonstrated.episodes
    write_arrays(folder, "demonstrations.npz", {name: getattr(episodes, name) for name in FIELDS})
    visits = visits_of(world.mdp, found.policy)
    arrays = {
        "weights": found.weights,
        "reward": found.reward,
        "policy": found.policy,
        "expected": found.expected,
        "moments": found.moments,
        "states": world.mdp.states,
        "demonstrated_visits": demonstrated_visits(world, demonstrated),
    }
    arrays |= {} if visits is None else {"visits": visits}
    arrays |= {} if demonstrated.reward is None else {"expert_reward": np.asarray(demonstrated.reward)}
    write_arrays(folder, "reward.npz", arrays)


def draw(folder: Path, world: World, demonstrated: Demonstrated, found: Found) -> None:
    """Write the pictures."""
    from posttrain.irl_runs.pictures import draw_all

    draw_all(folder / "plots", world, demonstrated, found)


def summarised(
    config: IrlConfig, world: World, demonstrated: Demonstrated, found: Found, numbers: Mapping[str, object]
) -> dict[str, object]:
    """The content of summary.json, but for what the clock says."""
    mdp, lengths = world.mdp, demonstrated.episodes.lengths
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
            "terminated": int(demonstrated.episodes.terminated.sum()),
        },
        "features": len(found.weights),
        "iterations": len(found.curve) - (0 if config.method.name == "course" else 1),
        "converged": found.converged,
        **numbers,
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Python's version and those of the packages that numbers depend on; null for those that are not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
