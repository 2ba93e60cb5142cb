"""Arithmetic that a model wrote: parsed, never evaluated as code, and exact.

The language: non-negative integers in the digits 0-9, `+ - * /`, parentheses and U+0020 between them, nothing else.

    sum = product {("+" | "-") product}      product = factor {("*" | "/") factor}
    factor = {"+" | "-"} (digits | "(" sum ")")

Both loops associate to the left.  Leading zeros are ignored.  Two literals side by side, implicit multiplication
(`2(3)`), `**`, `//` and `()` are not in the language.  An expression of more than MAX_CHARACTERS is rejected unread.

The parser is Dijkstra's shunting yard (1961): two stacks and no recursion, so that depth only costs memory.  It makes
no integers: a caller checks the literals first and evaluates only those it expects, so no big number is ever built.
"""

import re

MAX_CHARACTERS = 10_000
"""Longest expression that is read.  An honest one over six numbers has about 30."""
ALPHABET = re.compile(r"[0-9+\-*/() ]+")
TOKEN = re.compile(r"[0-9]+|[-+*/()]")
NEGATE = "~"
"""The sign of -x in postfix."""
PRECEDENCE = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2, NEGATE: 3}


def postfix(expression: str) -> list[str] | None:
    """The expression in postfix order, literals without leading zeros; None if it is not in the language."""
    if len(expression) > MAX_CHARACTERS or not ALPHABET.fullmatch(expression):
        return None
    output: list[str] = []
    waiting: list[str] = []
    operand_next = True
    for token in TOKEN.findall(expression):
        if operand_next:
            if token == "(":
                waiting.append(token)
            elif token == "-":
                waiting.append(NEGATE)
            elif token not in PRECEDENCE and token != ")":
                output.append(token.lstrip("0") or "0")
                operand_next = False
            elif token != "+":
                return None
        elif token == ")":
            while waiting and waiting[-1] != "(":
                output.append(waiting.pop())
            if not waiting:
                return None
            waiting.pop()
        elif token in PRECEDENCE and token != "(":
            level = PRECEDENCE[token]
            while waiting and PRECEDENCE[waiting[-1]] >= level:
                output.append(waiting.pop())
            waiting.append(token)
            operand_next = True
        else:
            return None
    if operand_next or "(" in waiting:
        return None
    output.extend(reversed(waiting))
    return output


def literals(tokens: list[str]) -> list[str]:
    return [token for token in tokens if token not in PRECEDENCE]


def value(tokens: list[str]) -> tuple[int, int] | None:
    """Exact value as (numerator, denominator ≠ 0), not reduced; None for a division by zero.  Check literals first."""
    stack: list[tuple[int, int]] = []
    for token in tokens:
        if token not in PRECEDENCE:
            stack.append((int(token), 1))
            continue
        c, d = stack.pop()
        if token == NEGATE:
            stack.append((-c, d))
            continue
        a, b = stack.pop()
        if token == "+":
            stack.append((a * d + c * b, b * d))
        elif token == "-":
            stack.append((a * d - c * b, b * d))
        elif token == "*":
            stack.append((a * c, b * d))
        elif c == 0:
            return None
        else:
            stack.append((a * d, b * c))
    return stack[0]


def apply(operator: str, a: int, b: int) -> int | None:
    """The result of `a operator b` if it is a non-negative integer."""
    match operator:
        case "+":
            return a + b
        case "-":
            return a - b if a >= b else None
        case "*":
            return a * b
        case "|":
            return abs(a - b)
        case _:
            return a // b if b and a % b == 0 else None
