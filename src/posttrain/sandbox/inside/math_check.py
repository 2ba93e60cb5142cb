"""Comparing mathematical answers with math-verify; run once in the fork-server of the maths reward, as `prepared`.

Sealed processes can import nothing more, and sympy imports inside its functions: all of it is imported here, and every
way of comparing is run once before any fork.
"""

import importlib
import pkgutil

import latex2sympy2_extended
import math_verify
import mpmath
import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig

DIGITS = 60
LATEX = [LatexExtractionConfig()]
BOXED_FIRST = LatexExtractionConfig(
    normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
)
SHOWN = 200
"""Characters of what was read that are passed on."""
SKIPPED = {"tests", "benchmarks", "plotting", "testing", "this", "autolev", "conftest", "interactive", "__main__"}
PAIRS = (
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"(x+1)^2", r"x^2+2x+1"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    (r"(1,2)", r"(1,3)"),
    (r"x=3", r"x=4"),
    (r"\sin(x)^2+\cos(x)^2", r"1"),
    (r"x<5", r"5>x"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"\text{yes}", r"\text{no}"),
    (r"\log_2 8", r"3"),
    (r"e^{i\pi}", r"-1"),
    (r"(-\infty,2)", r"(-\infty,2]"),
    (r"\sqrt{3}+x", r"x+\sqrt{3}"),
    (r"\frac{x^2-1}{x-1}", r"x+1"),
)


def parse_text(text: str) -> list[object]:
    found: list[object] = math_verify.parse(
        f"${text}$", extraction_config=LATEX, parsing_timeout=None, fallback_mode="no_fallback"
    )
    return found


def compare_answers(gold: str, answer: str) -> str:
    """Whether an answer says the same as the gold one: same, different, unreadable or no_gold."""
    expected = parse_text(gold)
    if not expected:
        return "no_gold"
    given = parse_text(answer)
    if not given:
        return "unreadable"
    if not math_verify.verify(expected, given, timeout_seconds=None, strict=True):
        return "different"
    return "different" if differ_precisely(expected[0], given[0]) else "same"


def compare_first_latex(gold: str, text: str) -> list[str]:
    """Whether the first LaTeX of a text is the gold answer, as TRL's accuracy_reward reads both; and what was read."""
    expected = math_verify.parse(gold, parsing_timeout=None)
    if not expected:
        return ["no_gold", "", ""]
    given = math_verify.parse(
        text, extraction_config=[BOXED_FIRST], extraction_mode="first_match", parsing_timeout=None
    )
    same = math_verify.verify(expected, given, timeout_seconds=None)
    return ["same" if same else "different", str(expected)[:SHOWN], str(given)[:SHOWN] if given else ""]


def differ_precisely(gold: object, answer: object) -> bool:
    """Whether two values that math-verify takes for the same, at its 15 digits, differ within `DIGITS` of them.

    Parts of tuples, matrices, equations and the like are compared one by one; sets by looking for each other's parts.
    """
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        difference = sympy.expand(gold - answer)
        if not difference.is_number or difference.is_zero:
            return False
        size = abs(sympy.N(difference, DIGITS, maxn=4 * DIGITS))
        scale = 1 + abs(sympy.N(gold, DIGITS)) if gold.is_number else 1
        return bool(size.is_finite and size > scale * sympy.Rational(10) ** -(DIGITS - 10))
    if isinstance(gold, sympy.FiniteSet) and isinstance(answer, sympy.FiniteSet):
        return any(all(differ_precisely(one, other) for other in answer.args) for one in gold.args)
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        return any(differ_precisely(one, other) for one, other in zip(gold, answer, strict=True))
    if isinstance(gold, sympy.Basic) and isinstance(answer, sympy.Basic) and type(gold) is type(answer):
        parts = zip(gold.args, answer.args, strict=True) if len(gold.args) == len(answer.args) else ()
        return any(differ_precisely(one, other) for one, other in parts)
    return False


def warm_up() -> None:
    """Import everything, and compare in every way."""
    for package in (math_verify, latex2sympy2_extended, mpmath, sympy):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
            if not SKIPPED & set(found.name.split(".")):
                try:
                    importlib.import_module(found.name)
                except ImportError:  # an optional dependency
                    continue
    for gold, answer in PAIRS:
        compare_answers(gold, answer)
    for gold, answer in PAIRS[:2]:
        compare_first_latex(gold, rf"So \boxed{{{answer}}}")


if __name__ == "prepared":
    warm_up()
