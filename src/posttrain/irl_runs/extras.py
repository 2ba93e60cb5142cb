"""The optional libraries of inverse RL: a missing one is an error before anything begins."""

from importlib import import_module

from posttrain.errors import UserError

EXTRA = "`pip install posttrain[irl]`"
LIBRARIES = {
    "scipy": ("inverse RL", EXTRA),
    "gymnasium": ("this world or environment", EXTRA),
    "matplotlib": ("run.plots", "`pip install matplotlib`, or set run.plots = false (--run.no-plots)"),
}
"""Library -> what needs it, and how to do without or to install it."""


def require_library(name: str) -> None:
    what, remedy = LIBRARIES[name]
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{what} needs {name}, which is not installed; {remedy}") from error
