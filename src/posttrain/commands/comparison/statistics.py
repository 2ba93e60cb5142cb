"""Results of cells, and their means over seeds, with intervals that account for few seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from posttrain.errors import RunError
from posttrain.runs.summary import LEFT_OUT, REWARD, SCORE

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """The content of a cell's cell.json."""

    variant: str
    seed: int
    recipe_digest: str
    """SHA-256 of its recipe."""
    before: Mapping[str, Any]
    """Held-out results, as in summary.json."""
    after: Mapping[str, Any]
    steps: int
    sampled_tokens: int
    seconds: float
    """Of the whole run, its evaluations included."""
    training_seconds: float
    """Without evaluations."""
    peak_memory_bytes: int
    kl: Mapping[str, float]
    """KL(π‖π₀) on held-out prompts; see `drift.Drift`."""
    curve: Sequence[tuple[int, float, float]]
    """(tokens sampled, seconds of training, held-out accuracy) along the way."""
    device: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its 95% interval; both ends are None for a single number."""

    mean: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """One row of the table."""

    variant: str
    seeds: tuple[int, ...]
    before: Estimate
    """Held-out accuracy at temperature 1 before training, as the next two."""
    after: Estimate
    gain_over_first: Estimate | None
    """Accuracy beyond that of the first variant with the same seed; None for the first variant itself."""
    greedy: float | None
    pass_at_8: float | None
    mean_length: float
    kl_per_completion: float
    """KL(π‖π₀) on held-out prompts, in nats."""
    kl_per_token: float
    steps: float
    sampled_tokens: float
    training_seconds: float
    seconds: float
    peak_memory_bytes: int


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """The mean, with Student's t interval over seeds; one value, or equal ones, have no interval.

        x̄ ± t_{n-1, .975} s / √n

    Seeds differ in prompts and samples of training, not in the held-out problems: the interval covers what another
    seed may reach on the same problems.
    """
    mean = fmean(values)
    if len({*values}) < 2:
        return Estimate(mean=mean)
    half = student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean=mean, low=mean - half, high=mean + half)


def student_quantile(degrees: int) -> float:
    """The t within which Student's variable lies with a chance of `CONFIDENCE`: 12.7 for 1 degree, 4.30 for 2.

        P(|T| <= t) at θ = atan(t / √n), Abramowitz & Stegun 1964, 26.7.3 and 26.7.4:
        n even: sin θ (1 + 1/2 cos²θ + 1·3/(2·4) cos⁴θ + ... up to cos^(n-2) θ)
        n odd:  2/π (θ + sin θ (cos θ + 2/3 cos³θ + 2·4/(3·5) cos⁵θ + ... up to cos^(n-2) θ))

    Solved for θ by halving, to the last bits: a table of seeds needs no library for it.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle, degrees) < CONFIDENCE else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def share_within(angle: float, degrees: int) -> float:
    """P(|T| <= √n tan θ) of Student's variable with n degrees of freedom."""
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    inner = math.sin(angle) * total
    return 2 / math.pi * (angle + inner) if odd else inner


def variant_results(results: Sequence[CellResult]) -> list[VariantResult]:
    """A row for every variant, in the order in which they first come."""
    by_variant: dict[str, dict[int, CellResult]] = {}
    for result in results:
        by_variant.setdefault(result.variant, {})[result.seed] = result
    first = next(iter(by_variant.values()), {})
    return [
        variant_result(name, cells, first if number else None)
        for number, (name, cells) in enumerate(by_variant.items())
    ]


def variant_result(name: str, cells: Mapping[int, CellResult], first: Mapping[int, CellResult] | None) -> VariantResult:
    """The row of one variant, compared with the cells of `first` seed by seed."""
    runs, first = list(cells.values()), first or {}
    gains = [accuracy(cells[seed]) - accuracy(first[seed]) for seed in sorted(cells.keys() & first.keys())]
    return VariantResult(
        variant=name,
        seeds=tuple(sorted(cells)),
        before=mean_over_seeds([cell_accuracy(run, run.before) for run in runs]),
        after=mean_over_seeds([accuracy(run) for run in runs]),
        gain_over_first=mean_over_seeds(gains) if gains else None,
        greedy=mean_or_none([run.after["accuracy_greedy"] for run in runs]),
        pass_at_8=mean_or_none([run.after["pass_at_8"] for run in runs]),
        mean_length=fmean(run.after["mean_length"] for run in runs),
        kl_per_completion=fmean(run.kl["per_completion"] for run in runs),
        kl_per_token=fmean(run.kl["per_token"] for run in runs),
        steps=fmean(run.steps for run in runs),
        sampled_tokens=fmean(run.sampled_tokens for run in runs),
        training_seconds=fmean(run.training_seconds for run in runs),
        seconds=fmean(run.seconds for run in runs),
        peak_memory_bytes=max(run.peak_memory_bytes for run in runs),
    )


def accuracy(run: CellResult) -> float:
    return cell_accuracy(run, run.after)


def cell_accuracy(run: CellResult, results: Mapping[str, Any]) -> float:
    names = ("accuracy_sampled",) if quantity([run]) == "accuracy" else (SCORE, REWARD)
    value = next((results[name] for name in names if results.get(name) is not None), None)
    if value is None:
        rule = "no held-out accuracy was measured: no problem is held out, or nothing scored their completions"
        raise RunError(f"{run.variant} seed {run.seed}: {rule}.  See `before` and `after` in its summary.json.")
    return float(value)


def quantity(runs: Sequence[CellResult]) -> str:
    """The measure of runs: `accuracy`, or `reward` if theirs counts something."""
    return "reward" if any(LEFT_OUT in each for run in runs for each in (run.before, run.after)) else "accuracy"


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """The mean, or None if some run did not measure it."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) and known else None
