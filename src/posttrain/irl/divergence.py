"""The one way in which a well-posed question about a world can have no answer."""

from posttrain.errors import RunError


class Divergence(RunError):
    """No finite values exist, or none that double precision can tell from infinite ones."""
