"""The optional libraries of inverse RL: one that is missing is named before anything begins, with how to install it."""

from importlib import import_module

from posttrain.errors import UserError

EXTRA = "`pip install posttrain[irl]`"


def require_scipy() -> None:
    """Refuse to begin without scipy."""
    require_library("scipy", "inverse RL", EXTRA)


def require_gymnasium() -> None:
    """Refuse to begin without gymnasium."""
    require_library("gymnasium", "this world or environment", EXTRA)


def require_matplotlib() -> None:
    require_library(
        "matplotlib", "run.plots", "`pip install matplotlib`, or leave them out by run.plots = false (--run.no-plots)"
    )


def require_library(name: str, what: str, remedy: str) -> None:
    """Refuse to begin without a library."""
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{what} needs {name}, which is not installed; {remedy}") from error
