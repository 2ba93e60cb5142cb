"""A calculator that answers at random, for controls: it answers where the true one does, and teaches nothing."""

from random import Random

from posttrain.environments.calculator import ending_sum


def random_calculator(said: str) -> str | None:
    """Writes a number from 0 to 99 behind an expression.

    Args:
        said: the text that ends with it
    """
    return None if ending_sum(said) is None else str(Random(said).randrange(100))
