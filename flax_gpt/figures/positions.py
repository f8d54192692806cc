"""The sinusoidal positions in three views."""

import os
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from flax_gpt.experiments.positions import Positions
from flax_gpt.figures import parts, style


def draw(numbers: Positions, out_path: str | os.PathLike[str]) -> Path:
    """The table as a heat map, some positions' curves over the columns, some columns' curves over the positions."""
    table = np.asarray(numbers.table)
    with style.labels(""):
        figure = Figure(figsize=(14, 7.6), layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=[1, 1.15])
        whole, rows, columns = figure.add_subplot(grid[:, 0]), figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
        image = parts.heat(whole, table, signed=True, limit=1.0, aspect="auto")
        whole.set(xlabel="column (even: sine, odd: cosine of the same angle)", ylabel="position (tokens)", title="The table")
        parts.colour_bar(figure, image, whole, "value added to the embedding")
        for colour, row in zip(parts.COLOURS, numbers.rows, strict=False):
            for first, line, kind in ((0, "-", "sine"), (1, "--", "cosine")):
                columns_of_kind = range(first, numbers.d_model, 2)
                rows.plot(columns_of_kind, table[row, first::2], line, color=colour, linewidth=1.3, label=f"position {row}, {kind} columns")
        rows.set(xlabel="column", ylabel="value", title="Positions over the columns", xlim=(0, numbers.d_model - 1), ylim=(-1.08, 1.08))
        for colour, column, wave in zip(parts.COLOURS, numbers.columns, numbers.wavelengths, strict=False):
            columns.plot(table[:, column], color=colour, linewidth=1.3, label=f"column {column}, wavelength {wave:,.1f} tokens")
        columns.set(xlabel="position (tokens)", ylabel="value", title="Columns over the positions", xlim=(0, numbers.length - 1), ylim=(-1.08, 1.08))
        for axes in (rows, columns):
            parts.tidy(axes)
            axes.legend(frameon=False, ncols=3 if axes is rows else 2, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.16))
        figure.suptitle(f"Sinusoidal positions ({numbers.length} positions, D = {numbers.d_model})")
        return style.save(figure, out_path)
