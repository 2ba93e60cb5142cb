"""How far two raters agree beyond what chance would have them agree on."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of two raters, over what both have judged."""

    num_common: int
    raw: float | None
    """Share of equal verdicts; None where nothing is common."""
    kappa: float | None
    """Cohen's; None where nothing is common, or both always say one and the same."""

    def as_record(self) -> dict[str, object]:
        """Plain data for the summary."""
        return asdict(self)


def agreement(first: Sequence[Hashable], second: Sequence[Hashable]) -> Agreement:
    """Raw agreement and Cohen's kappa of two raters' verdicts, item by item.

        κ = (p_o - p_e) / (1 - p_e),   p_o = share of equal verdicts,   p_e = Σ_k p_1(k) p_2(k)

    Cohen 1960, "A coefficient of agreement for nominal scales".  1 is full agreement, 0 what chance gives to raters
    who say each thing as often as these do, below 0 less than that.  Undefined, here None, where p_e = 1.
    """
    assert len(first) == len(second)
    count = len(first)
    if not count:
        return Agreement(num_common=0, raw=None, kappa=None)
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / count
    of_first, of_second = Counter(first), Counter(second)
    expected = sum(of_first[verdict] * of_second[verdict] for verdict in of_first) / count**2
    kappa = None if expected == 1 else (observed - expected) / (1 - expected)
    return Agreement(num_common=count, raw=observed, kappa=kappa)
