"""The uniform numbers of one completion."""

from jaxtyping import Float64
from numpy import ndarray

from posttrain.generation.request import StreamKey, uniform_table


def uniforms(key: StreamKey, draw: int, sample: int, start: int, count: int) -> Float64[ndarray, " position"]:
    """Those at positions start .. start + count - 1; see `uniform_table`."""
    return uniform_table(key, [(draw, sample, start)], count=count)[0]
