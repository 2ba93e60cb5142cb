"""Rates of behaviours over the steps of a run, as a picture.  Matplotlib is loaded only when one is drawn."""

from collections.abc import Sequence
from pathlib import Path

from posttrain.runs.curves import PALETTE, dress, running_mean
from posttrain.runs.files import save_figure
from posttrain.training.behaviours.behaviour_history import BehaviourHistory
from posttrain.training.behaviours.behaviour_reader import BehaviourReader


def draw_behaviours(history: BehaviourHistory, reader: BehaviourReader, picture: Path, title: str = "") -> None:
    """A line of panels for each kind of row: the share of completions that show it, and signs per 1000 tokens."""
    from matplotlib.figure import Figure

    seen = {name: row for name, row in reader.rows.items() if history.seen(name)} or reader.rows
    kinds = list(dict.fromkeys(row.kind for row in seen.values()))
    figure = Figure(figsize=(14, 4.5 * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), 2, squeeze=False)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    for (shares, signs), kind in zip(panels, kinds, strict=True):
        names = [name for name, row in seen.items() if row.kind == kind]
        draw_lines(shares, names, [history.shares(name) for name in names])
        draw_lines(signs, names, [history.signs(name) for name in names])
        shares.set_ylim(-0.02, 1.02)
        signs.set_ylim(bottom=0)
        dress(shares, f"Completions that show it: {kind}", "share of completions", legend="below")
        dress(signs, f"Signs: {kind}", "per 1000 completion tokens", legend="below")
    save_figure(figure, picture, dpi=110)


def draw_lines(axes: object, names: Sequence[str], told: Sequence[tuple[list[int], list[float]]]) -> None:
    """One line for each behaviour: what each step showed, and its running mean."""
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    for index, (name, (steps, values)) in enumerate(zip(names, told, strict=True)):
        colour = PALETTE[index % len(PALETTE)]
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
        axes.plot(steps, running_mean(values), color=colour, linewidth=2, label=name.replace("_", " "))
