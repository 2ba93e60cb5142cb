"""Recovers a reward from demonstrations, as `posttrain irl` does, and uses the result.

`recover` goes from a recipe to a run folder; `environment` trains other libraries on a learned reward; `pictures`
draws.  The mathematics is in `posttrain.irl`.  Nothing here needs torch; this file does not need scipy.
"""

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
