"""The optional libraries of inverse RL: asked for where they are needed, and told how to get."""

from importlib.util import find_spec

from posttrain.errors import UserError


def require_scipy() -> None:
    """Refuse to begin without scipy."""
    require_library("scipy", "inverse RL")


def require_gymnasium() -> None:
    """Refuse to begin without gymnasium."""
    require_library("gymnasium", "this world or environment")


def require_library(name: str, what: str) -> None:
    """Refuse to begin without a library that an extra brings."""
    if find_spec(name) is None:
        raise UserError(f"{what} needs {name}, which is not installed; `pip install posttrain[irl]`")
