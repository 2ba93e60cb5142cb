"""One completion with its tokens coloured by their advantages; matplotlib is only loaded to draw."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from posttrain.runs.curves import GREY, PALETTE, dress
from posttrain.runs.files import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable


LINE_CHARACTERS = 30
"""Characters in a line of a panel's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCredit:
    """One algorithm's credit for a completion's tokens."""

    advantages: Sequence[float]
    values: Sequence[float] | None = None
    """A critic's values before each token; None without one."""


PlacedToken = tuple[str, int, int]
"""A displayed token, its line and its column, in characters."""


def draw_token_advantages(
    tokens: Sequence[str], credits: Mapping[str, TokenCredit], picture: Path, title: str = ""
) -> None:
    """Draw the completion once for each algorithm, its tokens red below 0 and blue above, and all advantages as curves.

    All panels share one scale, symmetric around 0 (white), so that equal colours mean equal numbers.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    placed = laid_out(tokens)
    width, height = max(6.0, 4.2 * len(credits)), max(1.0, 0.2 * (placed[-1][1] + 1))
    figure = Figure(figsize=(width, height + 4.4), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=[height + 1.0, 3.4])
    upper, lower = halves
    panels = upper.subplots(1, len(credits), squeeze=False)[0]
    known = [abs(each) for credit in credits.values() for each in credit.advantages if not math.isnan(each)]
    largest = max(known, default=0.0) or 1.0
    colours = ScalarMappable(Normalize(-largest, largest), "RdBu")
    for axes, (name, credit) in zip(panels, credits.items(), strict=True):
        draw_text(axes, placed, credit.advantages, colours)
        axes.set_title("\n".join(wrap(name, 34)), fontsize=11, fontweight="bold")
    bar = upper.colorbar(colours, ax=list(panels), orientation="horizontal", shrink=0.5, aspect=50, pad=0.02)
    bar.set_label("advantage of the token", fontsize=9)
    bar.ax.tick_params(labelsize=9)
    draw_advantage_curves(lower.subplots(), credits)
    if title:
        figure.suptitle(title, fontsize=10)
    save_figure(figure, picture, dpi=130)


def laid_out(tokens: Sequence[str], width: int = LINE_CHARACTERS) -> list[PlacedToken]:
    """The tokens in lines; a line ends after a newline, or where it would exceed `width`."""
    placed: list[PlacedToken] = []
    line = column = 0
    for token in tokens:
        shown = token.replace("\n", "⏎").replace("\t", "⇥") or "∅"
        if column and column + len(shown) > width:
            line, column = line + 1, 0
        placed.append((shown, line, column))
        column += len(shown)
        if "\n" in token:
            line, column = line + 1, 0
    return placed


def draw_text(
    axes: "Axes", placed: Sequence[PlacedToken], advantages: Sequence[float], colours: "ScalarMappable"
) -> None:
    """Draw the tokens as coloured boxes."""
    import numpy as np
    from matplotlib.patches import Rectangle

    shades = colours.to_rgba(np.array(advantages, dtype=np.float64))
    for colour, (text, line, column) in zip(shades, placed, strict=True):
        axes.add_patch(Rectangle((column, line), len(text), 0.94, color=colour, linewidth=0))
        dark = colour[3] > 0 and 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] < 0.5  # NaN is transparent
        for place, character in enumerate(text):
            axes.text(
                column + place + 0.5,
                line + 0.47,
                character,
                parse_math=False,
                color="white" if dark else "black",
                fontsize=8,
                family="monospace",
                ha="center",
                va="center",
            )
    axes.set_xlim(0, max(column + len(text) for text, _, column in placed))
    axes.set_ylim(placed[-1][1] + 1, 0)
    axes.set_axis_off()


def draw_advantage_curves(axes: "Axes", credits: Mapping[str, TokenCredit]) -> None:
    """Advantages and values of critics against the token's number."""
    axes.axhline(0, color=GREY, linewidth=0.8)
    with_values = any(credit.values is not None for credit in credits.values())
    for colour, (name, credit) in zip(PALETTE, credits.items(), strict=False):
        axes.step(
            range(len(credit.advantages)), credit.advantages, where="mid", color=colour, linewidth=1.4, label=name
        )
        if credit.values is not None:
            label = f"V before the token, {name}"
            axes.plot(credit.values, color=colour, linewidth=1.2, linestyle=":", label=label)
    dress(axes, "", "advantage, and V in units of reward" if with_values else "advantage", legend="below")
    axes.set_xlabel("token of the completion", fontsize=9)
