"""Parts that several pictures have: heat maps with the colour scale that fits their data, bars with their values, tidy axes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

COLOURS = ("#4477aa", "#cc3311", "#228833", "#aa3377", "#997700")
"""For series side by side; told apart in common colour blindness (Tol's bright and vibrant sets)."""

HIDDEN = "#d9d9d9"
"""Of cells that a mask hides."""


def heat(axes: Axes, values: Any, *, signed: bool, limit: float | None = None, hidden: Any = None, aspect: Any = "equal") -> Any:
    """A heat map (rows, columns): from 0 on a sequential scale, or, signed, on a diverging one with 0 in its middle.

    `limit` is the largest size of a value on the scale, by default that of the values. Cells where `hidden` is True are grey.
    """
    values = np.ma.masked_array(np.asarray(values, float), mask=False if hidden is None else hidden)
    top = float(np.abs(values).max()) if limit is None else limit
    axes.set_facecolor(HIDDEN)
    return axes.imshow(
        values, cmap="RdBu_r" if signed else "viridis", vmin=-top if signed else 0.0, vmax=top or 1.0, interpolation="nearest", aspect=aspect
    )


def write_values(axes: Axes, values: Any, image: Any, *, pattern: str = "{:.2f}", hidden: Any = None, fontsize: float = 7.5) -> None:
    """Each cell's value on it, dark on light and light on dark."""
    for (row, column), value in np.ndenumerate(np.asarray(values, float)):
        if hidden is None or not hidden[row][column]:
            red, green, blue, _ = image.cmap(image.norm(value))
            colour = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 else "white"
            axes.text(column, row, pattern.format(value), ha="center", va="center", fontsize=fontsize, color=colour)


def token_axes(axes: Axes, length: int) -> None:
    """Positions on both axes: rows ask, columns are looked at."""
    axes.set_xticks(range(length))
    axes.set_yticks(range(length))
    axes.tick_params(length=0, pad=2, labelsize=8)
    axes.set(xlabel="key position", ylabel="query position")


def bars(axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]], *, pattern: str = "{:.2f}", fontsize: float = 8.5) -> None:
    """Bars side by side, a colour a series, their values on top."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = np.arange(len(groups)) + (number - (len(series) - 1) / 2) * width
        drawn = axes.bar(places, values, width * 0.94, color=COLOURS[number], label=name)
        axes.bar_label(drawn, [pattern.format(value) for value in values], padding=2, fontsize=fontsize)
    axes.set_xticks(range(len(groups)), groups)
    tidy(axes)
    axes.set_axisbelow(True)


def tidy(axes: Axes) -> None:
    axes.grid(axis="y", alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def table(axes: Axes, header: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[float] | None = None) -> None:
    """A table in place of the axes."""
    axes.set_axis_off()
    made = axes.table(cellText=rows, colLabels=header, cellLoc="center", loc="center", colWidths=widths)
    made.auto_set_font_size(False)
    made.set_fontsize(9)
    made.scale(1, 1.5)
    lines = max(name.count("\n") + 1 for name in header)
    for (row, _), cell in made.get_celld().items():
        cell.set_edgecolor("#bbbbbb")
        if row == 0:
            cell.set_text_props(weight="bold")
            cell.set_height(cell.get_height() * (0.4 + 0.6 * lines))


def colour_bar(figure: FigureBase, image: Any, axes: Any, label: str) -> None:
    figure.colorbar(image, ax=axes, pad=0.02, aspect=25, fraction=0.05).set_label(label)
