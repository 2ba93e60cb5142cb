"""One frozen record for all that decides a run, made from recipe files and flags: see sections.py and reading.py."""

from posttrain.config.reading import build, load_recipe
from posttrain.config.sections import AnyConfig, Config, IrlConfig, SftConfig, as_recipe

__all__ = ["AnyConfig", "Config", "IrlConfig", "SftConfig", "as_recipe", "build", "load_recipe"]
