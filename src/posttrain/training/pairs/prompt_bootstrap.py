"""How sure a mean over pairs is: 95% percentile bootstrap intervals over prompts.

Pairs of one prompt are not drawn independently; an interval over pairs would be too narrow where a prompt has several.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from posttrain.training.evaluation import RESAMPLES

Interval = tuple[float, float]


def resampled_sums(
    prompts: Sequence[object], columns: Float64[ndarray, "pair column"]
) -> Float64[ndarray, "resample column"]:
    """Sums of columns over resamples of prompts, each with all its pairs; the same numbers give the same ones."""
    number: dict[object, int] = {}
    of_pair = [number.setdefault(prompt, len(number)) for prompt in prompts]
    of_prompt = np.zeros((len(number), columns.shape[1]))
    np.add.at(of_prompt, of_pair, columns)
    random = np.random.default_rng(0)
    found = []
    for _ in range(RESAMPLES):  # one at a time: all draws together would be large where pairs are many
        drawn = np.bincount(random.integers(len(number), size=len(number)), minlength=len(number))
        found.append(drawn @ of_prompt)
    return np.stack(found)


def percentiles(values: Float64[ndarray, " resample"]) -> Interval:
    """The middle 95%."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def mean_intervals(prompts: Sequence[object], columns: Float64[ndarray, "pair column"]) -> list[Interval]:
    """The interval of the mean over pairs of each column."""
    sums = resampled_sums(prompts, np.concatenate([np.ones((len(prompts), 1)), columns], axis=1))
    return [percentiles(each) for each in (sums[:, 1:] / sums[:, :1]).T]
