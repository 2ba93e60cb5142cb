"""What can go wrong with a well-posed question about a world: it has no answer, or one that was not reached."""

from posttrain.errors import RunError


class Divergence(RunError):
    """No finite values exist, or none that double precision can tell from infinite ones."""


class ConvergenceWarning(UserWarning):
    """A fit ended before its gradient fell to the tolerance.

    The fit says so itself (`converged`): who reads that may silence this with
    `warnings.simplefilter("ignore", ConvergenceWarning)`.
    """
