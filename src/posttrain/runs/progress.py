"""A live display of a run in a terminal, plain lines anywhere else; the time of its stages, and its memory."""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bars, TextColumn
from rich.text import Text

SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("eval/accuracy_sampled", "held-out accuracy", "{:.3f}"),
    ("eval/score", "held-out score", "{:.3f}"),
    ("eval/reward", "held-out reward", "{:.3f}"),
    ("pairs/accuracy", "pairs ranked right", "{:.3f}"),
    ("eval/pairs/accuracy", "held-out pairs ranked right", "{:.3f}"),
    ("completions/mean_length", "length", "{:.0f}"),
    ("kl", "KL to reference", "{:.4f}"),
    ("kl_behaviour", "KL to behaviour", "{:.4f}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
)
"""Metric, label and format of the displayed numbers, in order."""

COMPARED = ("eval/accuracy_sampled", "eval/reward", "eval/score", "eval/pairs/accuracy")
"""Held-out metrics that are shown with their first value."""

SPARK = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32
PLAIN_SECONDS = 5.0
"""Without a terminal, one line per this time; first, last and evaluated steps always have one."""


class Clock:
    """Sums the wall time of named stages: `with clock("rollout"): ...`."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - began


class Progress:
    """Shows a run's plan, its steps and its long stages.  A context manager: leaving it releases the terminal.

    Texts are printed without markup; control characters, which model output may hold, are escaped.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        first_step: int = 1,
        time_limit_seconds: float | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Steps are numbered `first_step` (above 1 in a resumed run) to `num_steps`."""
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._num_steps, self._done, self._resumed_from = num_steps, first_step - 1, first_step - 1
        self._time_limit = time_limit_seconds
        self._latest: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._own: tuple[str, ...] = ()
        self._rewards: list[float] = []
        self._began = self._last_line = clock()
        self._live: Live | None = None
        self._bars = Bars(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tail]}")
        )
        self._run_bar = self._bars.add_task("step", total=num_steps, completed=self._done, tail="")

    def start(self, plan: Sequence[str]) -> None:
        for line in plan:
            self.note(line)
        self._began = self._last_line = self._clock()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._display, refresh_per_second=4)
            self._live.start()

    def step(self, step: int, metrics: Mapping[str, float], *, own: Collection[str] = ()) -> None:
        """Show a finished step; missing numbers keep their last value.  `own` are further metrics to show."""
        self._done = step
        self._own = tuple(own)
        self._latest |= metrics
        if "reward" in metrics:
            self._rewards.append(metrics["reward"])
        self.compare_with(metrics)
        self._bars.update(self._run_bar, completed=step)
        due = self._clock() - self._last_line >= PLAIN_SECONDS
        ends = step in (self._resumed_from + 1, self._num_steps)
        evaluated = any(name in metrics for name in COMPARED)
        if self._live is None and (due or ends or evaluated):
            self._last_line = self._clock()
            numbers = "  ".join(f"{label} {text}" for label, text in self._numbers(metrics))
            self.note(f"step {step}/{self._num_steps}  {numbers}  {duration(self._seconds_left())} left")

    def compare_with(self, metrics: Mapping[str, float]) -> None:
        """Show these values next to later evaluations, unless there are earlier ones."""
        self._first = {name: value for name, value in metrics.items() if name in COMPARED} | self._first

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a long stage within or before a step, such as an evaluation; yields `advance(count)`."""
        if total == 0:
            yield lambda count: None
            return
        began = spoke = self._clock()
        done = 0
        bar = self._bars.add_task(name, total=total, tail="")
        if self._live is None:
            self.note(f"{name}: {total} to do")

        def advance(count: int) -> None:
            nonlocal done, spoke
            done += count
            self._bars.update(bar, completed=done)
            if self._live is None and self._clock() - spoke >= PLAIN_SECONDS and done < total:
                spoke = self._clock()
                self.note(f"{name}: {done}/{total}")

        try:
            yield advance
        finally:
            self._bars.remove_task(bar)
        if self._live is None:
            self.note(f"{name}: done in {self._clock() - began:.1f} s")

    def note(self, text: str) -> None:
        self._console.print(Text(visible(text)), soft_wrap=True)

    def finish(self, lines: Sequence[str]) -> None:
        self.close()
        for line in lines:
            self.note(line)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _seconds_left(self) -> float | None:
        """By the mean pace of this process, evaluations included; at most until the time limit."""
        elapsed = self._clock() - self._began
        done = self._done - self._resumed_from
        if done == 0:
            return self._time_limit
        left = elapsed / done * (self._num_steps - self._done)
        return left if self._time_limit is None else max(0.0, min(left, self._time_limit - elapsed))

    def _numbers(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        accuracy, reward = COMPARED[:2]
        # One of the two: the reward where no held-out answer was ever right.
        right = any(each.get(accuracy) or reward not in each for each in (metrics, self._first))
        left_out = reward if right else accuracy
        shown = []
        for name, label, form in SHOWN:
            if name in metrics and name != left_out:
                first = f" (first {form.format(self._first[name])})" if name in self._first else ""
                shown.append((label, form.format(metrics[name]) + first))
        return shown + [(name, f"{metrics[name]:.4g}") for name in self._own if name in metrics]

    def _display(self) -> Group:
        elapsed, left = self._clock() - self._began, self._seconds_left()
        self._bars.update(self._run_bar, tail=f"{duration(elapsed)} elapsed, {duration(left)} left")
        numbers = Text()
        for label, text in self._numbers(self._latest):
            numbers.append(f"{label} ", style="dim").append(text, style="bold").append("   ")
        rewards = Text("reward by step ", style="dim").append(sparkline(self._rewards), style="green")
        return Group(self._bars, numbers, rewards)


def duration(seconds: float | None) -> str:
    """h:mm:ss, or `?` while unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float]) -> str:
    """A row of bars between the smallest and largest value; long histories are averaged into `SPARK_WIDTH` bars."""
    if not values:
        return ""
    count = min(len(values), SPARK_WIDTH)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if low == high:
        return SPARK[0] * count
    return "".join(SPARK[round((mean - low) / (high - low) * (len(SPARK) - 1))] for mean in means)


def visible(text: str) -> str:
    """The text with control characters, which could steer a terminal, escaped as \\x1b and the like."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def peak_memory_bytes() -> int:
    """Peak physical memory of this process so far, without graphics memory."""
    status = Path("/proc/self/status")
    if status.is_file():  # on Linux, getrusage also counts the parent process
        (peak,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(peak) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # kilobytes elsewhere
