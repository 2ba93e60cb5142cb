"""What `posttrain irl` prints: its plan, a line for each evaluation of the fit, warnings, and its results."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from posttrain.config import IrlConfig
from posttrain.irl.linear_solvers import ConvergenceWarning
from posttrain.irl_runs.expert_episodes import ExpertEpisodes
from posttrain.irl_runs.worlds import World
from posttrain.runs.folder import shown

ROUNDING = 1e-8
"""Differences of values below this are errors of value iteration."""

RESULTS = (
    ("gap", "gap", "largest difference of a feature from the demonstrations"),
    ("least_gap", "least gap", "that any policy can reach"),
    ("visits_gap", "visits gap", "largest difference in visits of a state, with the policy carried out"),
    ("steps_per_episode", "steps", "of an episode of the policy"),
    ("log_likelihood", "log-likelihood", "nats per demonstrated action"),
    ("value_lost", "value lost", "by the policy, under the expert's reward"),
    ("value_lost_greedy", "value lost, greedy", "by its likeliest actions"),
    ("value_lost_by_expert", "value lost, expert", "by the expert itself"),
)
"""Key in summary.json, label and meaning of the numbers that are printed at the end."""


@contextmanager
def warnings_as_lines(note: Callable[[str], None]) -> Iterator[None]:
    """Show warnings as lines, without the code that raised them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the results say it, with the options of the recipe
        warnings.showwarning = lambda message, *_, **__: note(f"Warning: {message}")
        yield


def evaluation_words(count: int, numbers: Mapping[str, float]) -> str:
    """The numbers of an evaluation of the fit."""
    parts = (f"{label.replace('_', ' ')} {value:.4g}" for label, value in numbers.items())
    return "  ".join([f"evaluation {count}", *parts])


def irl_plan_lines(config: IrlConfig, world: World, expert: ExpertEpisodes, num_features: int) -> list[str]:
    lengths = expert.episodes.lengths
    return [
        f"world           {config.world.name}, {world.mdp.num_states:,} states, {world.mdp.num_actions} actions",
        f"demonstrations  {len(lengths):,} episodes, {lengths.mean():.1f} steps each",
        f"features        {config.features.name}, {num_features:,}",
        f"method          {config.method.name}",
        f"folder          {config.run.folder}",
    ]


def irl_result_lines(summary: Mapping[str, object], folder: Path) -> Iterator[str]:
    """The numbers of a finished run, and where its files are."""
    for key, label, meaning in RESULTS:
        value = summary.get(key)
        if isinstance(value, float):
            shown_value = 0.0 if key.startswith("value") and abs(value) < ROUNDING else value
            yield f"{label:<20}{shown_value:<12.5g}{meaning}"
    if summary.get("best_states"):
        yield f"{'best states':<20}{' '.join(map(str, summary['best_states']))}"  # type: ignore[call-overload]
    if not summary["converged"]:
        yield "Not converged: the gradient is above method.tolerance.  Raise method.max_iterations or .l2."
    pictures = ", plots/" if (folder / "plots").is_dir() else ""
    yield f"run folder          {shown(folder)}  (summary.json, reward.npz, metrics.jsonl{pictures})"
