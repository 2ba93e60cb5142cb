"""The progress of every long command: a live display in a terminal, plain lines elsewhere; its time and memory."""

import math
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress as Bars, TextColumn
from rich.text import Text

LENGTH, SAMPLED_TOKENS = "completions/mean_length", "num_sampled_tokens"
SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("eval/accuracy_sampled", "held-out accuracy", "{:.3f}"),
    ("eval/score", "held-out score", "{:.3f}"),
    ("eval/reward", "held-out reward", "{:.3f}"),
    ("pairs/accuracy", "pairs ranked right", "{:.3f}"),
    ("eval/pairs/accuracy", "held-out pairs ranked right", "{:.3f}"),
    ("loss", "loss", "{:.4f}"),
    ("eval/loss", "held-out loss", "{:.4f}"),
    (LENGTH, "length", "{:.0f}"),
    ("kl", "KL to reference", "{:.4f}"),
    ("kl_behaviour", "KL to behaviour", "{:.4f}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
)
"""Metric, label and format of the displayed numbers, in order."""

COMPARED = ("eval/accuracy_sampled", "eval/reward", "eval/score", "eval/pairs/accuracy", "eval/loss")
"""Held-out metrics shown together with their first value."""

FEW_STEPS = 8
"""Minimum number of steps to tell whether steps take longer and longer."""
SPARK = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32
PLAIN_SECONDS = 5.0
"""Without a terminal: seconds between lines; the first, last and evaluated steps always get a line."""


class Clock:
    """Adds up the wall time of named stages: `with clock("rollout"): ...`."""

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        """`show` gets the name of each stage when it begins."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.show = show

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self.show is not None:
            self.show(stage)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - began


class Progress:
    """Shows a command's plan, its steps and its long stages.  A context manager: leaving it releases the terminal.

    Texts are printed without markup; control characters, which model output may contain, are escaped.
    """

    def __init__(
        self,
        num_steps: int = 0,
        *,
        first_step: int = 1,
        unit: str = "step",
        time_limit_seconds: float | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Steps are numbered `first_step` (above 1 in a resumed run) to `num_steps`; 0 shows stages only."""
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._num_steps, self._done, self._resumed_from = num_steps, first_step - 1, first_step - 1
        self._unit, self._stage, self._time_limit = unit, "", time_limit_seconds
        self._tokens_before, self._token_limit = 0, 0
        self.closing_seconds = 0.0
        """Seconds after the last step, such as for an evaluation, estimated from the one before training."""
        self._seconds: list[float] = []
        """Seconds of the steps so far."""
        self._latest: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._own: tuple[str, ...] = ()
        self._rewards: list[float] = []
        self._began = self._last_line = self._last_step = clock()
        self._live: Live | None = None
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            *map(TextColumn, ("{task.fields[of]}", "{task.fields[tail]}")),
        )
        self._bars = Bars(*columns)
        self._run_bar = self._bars.add_task(unit, total=num_steps, visible=num_steps > 0, of="", tail="")

    def start(self, plan: Sequence[str]) -> None:
        """Print the plan, and keep the display until `close`."""
        for line in plan:
            self.note(line)
        self._began = self._last_line = self._last_step = self._clock()
        self._go_live()

    def step(self, step: int, metrics: Mapping[str, float], *, own: Collection[str] = ()) -> None:
        """Show a finished step; missing numbers keep their last value.  `own` are more metrics to show."""
        now = self._clock()
        # The first one was begun before the start, or the evaluation before training came between.
        took = metrics.get("step_time", now - self._last_step)
        self._seconds += [max(took, now - self._last_step) if self._seconds else took] if step else []
        self._done, self._last_step, self._own = step, now, tuple(own)
        self._latest |= metrics
        if "reward" in metrics:
            self._rewards.append(metrics["reward"])
        self.compare_with(metrics)
        self._bars.update(self._run_bar, completed=step)
        due = now - self._last_line >= PLAIN_SECONDS
        ends = step in (self._resumed_from + 1, self._num_steps)
        evaluated = any(name in metrics for name in COMPARED)
        if self._live is None and (due or ends or evaluated):
            self._last_line = now
            numbers = "".join(f"  {label} {text}" for label, text in self._numbers(metrics))
            self.note(f"{self._unit} {step}/{self._num_steps}{numbers}  {self._time_left()} left")

    def compare_with(self, metrics: Mapping[str, float]) -> None:
        """Show these values next to later evaluations, unless earlier values exist."""
        self._first = {name: value for name, value in metrics.items() if name in COMPARED} | self._first

    def limit_tokens(self, sampled: int, limit: int | None) -> None:
        """The steps end when this many tokens are sampled, `sampled` of them before these steps."""
        self._tokens_before, self._token_limit = sampled, limit or 0

    def show_stage(self, name: str) -> None:
        """Show the current part of a step in the live display, if there is one."""
        self._stage = name

    @contextmanager
    def stage(self, name: str, total: int | None = None, *, most: int | None = None) -> Iterator["StageDisplay"]:
        """Show a long stage within or before a step, such as an evaluation; yields `advance(count, says)`.

        `total` is the known amount of work, `most` an upper limit.
        """
        alone = self._live is None
        bar = self._bars.add_task(name, total=total, visible=total != 0, of="", tail="")
        self._go_live()
        if self._live is None and total:
            self.note(f"{name}: {total} to do")
        display = StageDisplay(self, name, total, most)
        display.show = lambda of, tail: self._bars.update(bar, completed=display.done, of=of, tail=tail)
        try:
            yield display
        finally:
            self._bars.remove_task(bar)
            if alone:
                self.close()
        if self._live is None and total != 0:
            self.note(f"{name}: done in {display.seconds:.1f} s")

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

    def _go_live(self) -> None:
        if self._live is None and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._display, refresh_per_second=4)
            self._live.start()

    def _time_left(self) -> str:
        """Time left at this process's pace, evaluations included; at most until a limit of time or tokens."""
        limit = None if self._time_limit is None else max(0.0, self._time_limit - (self._clock() - self._began))
        if not self._seconds:
            return duration(limit)
        left, growing = forecast(self._seconds, self._num_steps - self._done)
        # Training may change the length of completions, and so the seconds of a step.
        growing = growing or (len(self._seconds) < FEW_STEPS and LENGTH in self._latest)
        sampled = self._latest.get(SAMPLED_TOKENS, 0.0)
        if self._token_limit and sampled > self._tokens_before:
            per_token = sum(self._seconds) / (sampled - self._tokens_before)
            by_tokens = per_token * max(0.0, self._token_limit - sampled)
            left, growing = min((left, growing), (by_tokens, False))
        if limit is not None and limit <= left:
            left, growing = limit, False
        at_least = "at least " if growing and left > 0 else ""
        return f"{at_least}{duration(left + self.closing_seconds)}"

    def _numbers(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        accuracy, reward = COMPARED[:2]
        # One of the two: the reward where no held-out answer was ever right.
        right = any(each.get(accuracy) or reward not in each for each in (metrics, self._first))
        left_out = {reward if right else accuracy, *(("loss",) if "reward" in metrics else ())}
        shown = []
        for name, label, form in SHOWN:
            if name in metrics and name not in left_out:
                first = f" (first {form.format(self._first[name])})" if name in self._first else ""
                shown.append((label, form.format(metrics[name]) + first))
        return shown + [(name, f"{metrics[name]:.4g}") for name in self._own if name in metrics]

    def _display(self) -> Group:
        parts: list[RenderableType] = [self._bars]
        elapsed, stage = duration(self._clock() - self._began), f"{self._stage}  " if self._stage else ""
        tail = f"{stage}{elapsed} elapsed, {self._time_left()} left"
        self._bars.update(self._run_bar, of=f"{self._done}/{self._num_steps}", tail=tail)
        if numbers := self._numbers(self._latest):
            line = Text()
            for label, text in numbers:
                line.append(f"{label} ", style="dim").append(text, style="bold").append("   ")
            parts.append(line)
        if self._rewards:
            parts.append(Text("reward by step ", style="dim").append(sparkline(self._rewards), style="green"))
        return Group(*parts)


class StageDisplay:
    """A displayed stage: `advance(count, says)`; `says` is what is known so far, shown until there is news."""

    def __init__(self, progress: Progress, name: str, total: int | None, most: int | None) -> None:
        self.progress, self.name, self.total, self.most = progress, name, total, most
        self.done = 0
        self.show: Callable[[str, str], None] = lambda of, tail: None
        """Takes the count and the rest of the line."""
        self._began = self._spoke = progress._clock()
        self._says = ""

    @property
    def seconds(self) -> float:
        return self.progress._clock() - self._began

    def __call__(self, count: int = 1, says: str = "") -> None:
        self.done += count
        self._says = says or self._says
        now, end = self.progress._clock(), self.total or self.most or 0
        of, left = f"{self.done}/{self.total}" if self.total else "", ""
        if 0 < self.done < end:
            seconds = (now - self._began) / self.done * (end - self.done)
            left = f"{'' if self.total else 'at most '}{duration(seconds)} left"
        tail = visible("  ".join(filter(None, (self._says, left))))
        self.show(of, tail)
        if self.progress._live is None and now - self._spoke >= PLAIN_SECONDS and (not self.total or self.done < end):
            self._spoke = now
            self.progress.note(f"{self.name}: {', '.join(filter(None, (of, tail)))}")


def forecast(seconds: Sequence[float], num_left: int) -> tuple[float, bool]:
    """Estimated seconds of the remaining steps, and whether steps take longer and longer.

    The estimate is half way between two others: steps as long as the recent ones, and steps on a line fitted to all of
    them.  If the line rises by less than two standard errors, or falls, the mean is used instead.
    """
    count, mean = len(seconds), sum(seconds) / len(seconds)
    if count < FEW_STEPS:
        return mean * num_left, False
    middle, spread = (count - 1) / 2, (count**3 - count) / 12
    rise = sum((index - middle) * each for index, each in enumerate(seconds)) / spread
    residual = sum((each - mean - rise * (index - middle)) ** 2 for index, each in enumerate(seconds))
    if rise <= 2 * math.sqrt(residual / (count - 2) / spread):
        return mean * num_left, False
    recent = seconds[-(count // 4) :]
    flat = sum(recent) / len(recent) * num_left
    risen = num_left * (mean + rise * (count + num_left / 2 - 0.5 - middle))
    return (flat + risen) / 2, True


def duration(seconds: float | None) -> str:
    """h:mm:ss, or `?` while unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float]) -> str:
    """A row of bars from the smallest to the largest value; long histories are averaged into `SPARK_WIDTH` bars."""
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
    """The text with control characters escaped, such as \\x1b, so that it cannot control the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def peak_memory_bytes() -> int:
    """Peak physical memory of this process so far, without graphics memory."""
    status = Path("/proc/self/status")
    if status.is_file():  # on Linux, getrusage also counts the parent process
        (peak,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(peak) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # kilobytes elsewhere
