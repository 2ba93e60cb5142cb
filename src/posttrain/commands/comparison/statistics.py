"""What the cells of a variant say together: means over seeds, with intervals that are honest about few of them."""

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
    """What came out of a cell: the content of its cell.json."""

    variant: str
    seed: int
    recipe_digest: str
    """SHA-256 of the recipe that it was made by."""
    before: Mapping[str, Any]
    """Held-out results, as in summary.json."""
    after: Mapping[str, Any]
    steps: int
    sampled_tokens: int
    seconds: float
    """Of the whole run, its evaluations included."""
    training_seconds: float
    """Of its steps alone."""
    peak_memory_bytes: int
    kl: Mapping[str, float]
    """KL(π‖π₀) on held-out prompts; see `drift.Drift`."""
    curve: Sequence[tuple[int, float, float]]
    """(tokens sampled, seconds of training, held-out accuracy) along the way."""
    device: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its 95% interval; both ends are None of a single number."""

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
    """Accuracy beyond that of the table's first variant with the same seed; None of that variant itself."""
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
    """The mean, with Student's t interval over seeds; of one value, or of equal ones, no interval.

        x̄ ± t_{n-1, .975} s / √n

    Seeds differ in prompts and samples of training, not in the held-out problems: the interval says what another seed
    may come to on the same problems.
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
    """A row for every variant, in the order in which they first come; variants with unequal seeds are told by them."""
    by_variant: dict[str, dict[int, CellResult]] = {}
    for result in results:
        by_variant.setdefault(result.variant, {})[result.seed] = result
    first = next(iter(by_variant.values()), {})
    return [
        variant_result(name, cells, first if number else None)
        for number, (name, cells) in enumerate(by_variant.items())
    ]


def variant_result(name: str, cells: Mapping[int, CellResult], first: Mapping[int, CellResult] | None) -> VariantResult:
    """The row of one variant; `first` are the cells that it is compared with, seed by seed."""
    runs = list(cells.values())
    both = sorted(cells.keys() & first.keys()) if first is not None else []
    gains = [accuracy(cells[seed]) - accuracy(first[seed]) for seed in both] if first is not None else []
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
    """Held-out accuracy at temperature 1 after training, or what stands for it.  Raises RunError where none was."""
    return cell_accuracy(run, run.after)


def cell_accuracy(run: CellResult, results: Mapping[str, Any]) -> float:
    """The accuracy in results before or after training; of a reward that counts something its mean."""
    names = ("accuracy_sampled",) if quantity([run]) == "accuracy" else (SCORE, REWARD)
    value = next((results[name] for name in names if results.get(name) is not None), None)
    if value is None:
        raise RunError(
            f"{run.variant} seed {run.seed}: no held-out accuracy was measured: no problem is held out, or nothing"
            " scored their completions.  Look at `before` and `after` in the summary.json of its folder."
        )
    return float(value)


def quantity(runs: Sequence[CellResult]) -> str:
    """What runs are compared by: `accuracy`, or `reward` where theirs counts something."""
    return "reward" if any(LEFT_OUT in each for run in runs for each in (run.before, run.after)) else "accuracy"


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """The mean, or None where some run did not measure it."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) and known else None
