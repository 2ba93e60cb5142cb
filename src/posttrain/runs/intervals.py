"""95% intervals of means over problems or prompts.

Samples of one problem, and pairs of one prompt, are not independent: an interval over them would be too narrow.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

RESAMPLES = 2000
"""Number of bootstrap resamples for an interval."""
FEW = 10
"""With fewer successes or failures than this, a share's bootstrap interval is too narrow; it can shrink to a point."""
Interval = tuple[float, float]


def bootstrap_interval(values: Float64[ndarray, " problem"]) -> Interval:
    """Percentile bootstrap interval of the mean over problems (Efron 1979); a point if all values are equal."""
    rng = np.random.default_rng(0)
    means = rng.choice(values, size=(RESAMPLES, len(values))).mean(axis=1)
    return percentiles(means)


def share_interval(values: Float64[ndarray, " problem"]) -> Interval:
    """Interval of the mean of shares from 0 to 1, such as the share of correct answers per problem."""
    share = float(values.mean())
    return jeffreys_interval(share, len(values)) if is_rare(share, len(values)) else bootstrap_interval(values)


def score_interval(values: Float64[ndarray, " problem"], scores: Float64[ndarray, "problem sample"]) -> Interval | None:
    """Interval of the mean of scores, from the mean of each problem; a share's interval if all scores are 0 or 1.

    None if all problems have the same mean: resampling then gives a point, and no information about other problems.
    """
    if np.isin(scores[~np.isnan(scores)], (0, 1)).all():
        return share_interval(values)
    return None if np.ptp(values) == 0 else bootstrap_interval(values)


def is_rare(share: float, count: int) -> bool:
    """Whether a share is so close to 0 or 1, or its count so small, that a bootstrap interval misses the truth.

    With 8 problems and a true share of .02, this happens in 85% of cases.
    """
    return count * min(share, 1 - share) < FEW


def jeffreys_interval(share: float, count: int) -> Interval:
    """Interval of a share of `count` independent answers; also for a single answer, and never a point.

        the middle 95% of Beta(np + 1/2, n(1 - p) + 1/2); from 0 where p = 0, up to 1 where p = 1

    Brown, Cai and DasGupta 2001.  Wilson's covers a true share of .02 in 85% of cases with 8 problems, this one in 99%.
    For problems with several answers each, counting every problem as one answer gives the widest interval.
    """
    # Jeffreys' prior is uniform in θ with p = sin² θ, so the density there is sin^2np θ · cos^2n(1-p) θ.
    theta = np.linspace(0, np.pi / 2, 20001)[1:-1]
    logs = 2 * count * (share * np.log(np.sin(theta)) + (1 - share) * np.log(np.cos(theta)))
    below = np.cumsum(np.exp(logs - logs.max()))
    low, high = np.sin(np.interp([0.025, 0.975], below / below[-1], theta)) ** 2
    return 0.0 if share == 0 else float(low), 1.0 if share == 1 else float(high)


def resampled_sums(
    prompts: Sequence[object], columns: Float64[ndarray, "pair column"]
) -> Float64[ndarray, "resample column"]:
    """Sums of columns over resamples of prompts, each prompt with all its pairs; deterministic."""
    number: dict[object, int] = {}
    of_pair = [number.setdefault(prompt, len(number)) for prompt in prompts]
    of_prompt = np.zeros((len(number), columns.shape[1]))
    np.add.at(of_prompt, of_pair, columns)
    random = np.random.default_rng(0)
    found = []
    for _ in range(RESAMPLES):  # one at a time, to save memory
        drawn = np.bincount(random.integers(len(number), size=len(number)), minlength=len(number))
        found.append(drawn @ of_prompt)
    return np.stack(found)


def percentiles(values: Float64[ndarray, " resample"]) -> Interval:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def mean_intervals(prompts: Sequence[object], columns: Float64[ndarray, "pair column"]) -> list[Interval]:
    sums = resampled_sums(prompts, np.concatenate([np.ones((len(prompts), 1)), columns], axis=1))
    return [percentiles(each) for each in (sums[:, 1:] / sums[:, :1]).T]


def share_of_pairs_interval(prompts: Sequence[object], share: float, bootstrapped: Interval) -> Interval:
    """The interval of a share of pairs: bootstrapped, or Jeffreys' interval with one answer per prompt."""
    num_prompts = len(set(prompts))
    return jeffreys_interval(share, num_prompts) if is_rare(share, num_prompts) else bootstrapped
