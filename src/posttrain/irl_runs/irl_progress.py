"""Progress of a recovery: a live line in a terminal, plain lines anywhere else."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from posttrain.config import IrlConfig
from posttrain.irl.linear_solvers import ConvergenceWarning
from posttrain.irl_runs.expert_episodes import ExpertEpisodes
from posttrain.irl_runs.worlds import World
from posttrain.runs.folder import shown

PLAIN_SECONDS = 5.0
"""Seconds between lines of a stage, without a terminal."""
ROUNDING = 1e-8
"""Differences of values below this are errors of value iteration."""

RESULTS = (
    ("gap", "gap", "largest difference of a feature from the demonstrations"),
    ("least_gap", "least gap", "that any policy can reach"),
    ("visits_gap", "visits gap", "largest difference in visits of a state, the policy carried out"),
    ("steps_per_episode", "steps", "of an episode of the policy"),
    ("log_likelihood", "log-likelihood", "nats per demonstrated action"),
    ("value_lost", "value lost", "by the policy, of what the expert is after"),
    ("value_lost_greedy", "value lost, greedy", "by its likeliest actions"),
    ("value_lost_by_expert", "value lost, expert", "by the expert itself"),
)
"""Key in summary.json, label and meaning of the numbers that are printed at the end."""


class IrlProgress:
    """Shows stages as they go, and warnings as lines.  A context manager: leaving it gives the terminal back."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(highlight=False)
        self._clock = clock
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[tail]}"),
        )
        self._bars = Progress(*columns, console=self._console, transient=True) if live else None
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> "IrlProgress":
        self._warnings.__enter__()
        warnings.simplefilter("ignore", ConvergenceWarning)  # `finish` says it, with the options of the recipe
        warnings.showwarning = lambda message, *_, **__: self.note(f"Warning: {message}")
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._warnings.__exit__(*error)
        if self._bars is not None:
            self._bars.stop()

    @contextmanager
    def stage(self, name: str) -> Iterator[Callable[[Mapping[str, float]], None]]:
        """Show a stage; the caller is given a `watch(numbers)`, to be called at each evaluation."""
        bar = None if self._bars is None else self._bars.add_task(name, total=None, tail="")
        began = spoke = self._clock()
        count = 0

        def watch(numbers: Mapping[str, float]) -> None:
            nonlocal count, spoke
            count += 1
            said = f"evaluation {count}  " + "  ".join(
                f"{label.replace('_', ' ')} {value:.4g}" for label, value in numbers.items()
            )
            if self._bars is not None and bar is not None:
                self._bars.update(bar, tail=said)
            elif self._clock() - spoke >= PLAIN_SECONDS:
                spoke = self._clock()
                self.note(f"{name}: {said}")

        try:
            yield watch
        finally:
            if self._bars is not None and bar is not None:
                self._bars.remove_task(bar)
        self.note(f"{name}: done in {self._clock() - began:.1f} s")

    def start(self, config: IrlConfig, world: World, expert: ExpertEpisodes, num_features: int) -> None:
        lengths = expert.episodes.lengths
        for line in (
            f"world           {config.world.name}, {world.mdp.num_states:,} states, {world.mdp.num_actions} actions",
            f"demonstrations  {len(lengths):,} episodes, {lengths.mean():.1f} steps each",
            f"features        {config.features.name}, {num_features:,}",
            f"method          {config.method.name}",
            f"folder          {config.run.folder}",
        ):
            self.note(line)

    def finish(self, summary: Mapping[str, object], folder: Path) -> None:
        for key, label, meaning in RESULTS:
            value = summary.get(key)
            if isinstance(value, float):
                shown_value = 0.0 if key.startswith("value") and abs(value) < ROUNDING else value
                self.note(f"{label:<20}{shown_value:<12.5g}{meaning}")
        if summary.get("best_states"):
            self.note(f"{'best states':<20}{' '.join(map(str, summary['best_states']))}")  # type: ignore[call-overload]
        if not summary["converged"]:
            self.note("Not converged: the gradient is above method.tolerance.  Raise method.max_iterations or .l2.")
        pictures = ", plots/" if (folder / "plots").is_dir() else ""
        self.note(f"run folder          {shown(folder)}  (summary.json, reward.npz, metrics.jsonl{pictures})")

    def note(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
