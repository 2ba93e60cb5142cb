"""The tool `calculator`: exact arithmetic over + - * / and parentheses, parsed and never evaluated as code."""

from fractions import Fraction

from posttrain.rewards.parsing.arithmetic import ALPHABET, literals, postfix, value

MOST_CHARACTERS = 200
"""Longest expression.  The language has no powers, so a value has at most as many digits as its expression."""


def calculator(expression: str) -> str:
    """Computes exact arithmetic with + - * / and parentheses.

    Args:
        expression: whole numbers with operators between them, such as (17 - 5) * 3
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, and at most {MOST_CHARACTERS} are allowed")
    tokens = postfix(expression)
    if tokens is None:
        raise ValueError("not an expression of whole numbers, + - * / and parentheses")
    result = value(tokens)
    if result is None:
        raise ZeroDivisionError("division by zero")
    return str(Fraction(*result))


def ending_sum(said: str) -> str | None:
    """The value of the expression that a text ends with; None if it ends without one, or with just a number."""
    begin = len(said)
    while begin > 0 and len(said) - begin <= MOST_CHARACTERS and ALPHABET.fullmatch(said[begin - 1]):
        begin -= 1
    ending = said[begin:]
    tokens = postfix(ending) if len(ending) <= MOST_CHARACTERS else None
    if tokens is None or len(literals(tokens)) < 2 or (result := value(tokens)) is None:
        return None
    return str(Fraction(*result))
