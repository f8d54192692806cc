"""Entropy and largest weight of the softmax, with and without 1/√d_k."""

import math
import os
from pathlib import Path

from matplotlib.figure import Figure

from flax_gpt.experiments.scaling import Scaling
from flax_gpt.figures import parts, style

NAMES = {"scaled": "scores / √d_k", "unscaled": "scores as they are"}


def draw(numbers: Scaling, out_path: str | os.PathLike[str]) -> Path:
    """Two bar charts over a table."""
    widths = [f"{width}" for width in numbers.widths]
    with style.labels(""):
        figure = Figure(figsize=(11, 6.6), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=[2, 1])
        left, right = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        parts.bars(left, widths, {NAMES[name]: values for name, values in numbers.entropy.items()})
        even = math.log(numbers.length)
        left.axhline(even, color="#555555", linewidth=1, linestyle="--")
        left.text(-0.45, even + 0.03, f"ln {numbers.length} = {even:.2f}: all weights equal", fontsize=8.5, color="#333333")
        left.set(
            xlabel="width of a head, d_k", ylabel="mean entropy of a row (nats)", title="Entropy of the attention weights", ylim=(0, even * 1.32)
        )
        left.legend(frameon=False, loc="upper right", ncols=2)
        parts.bars(right, widths, {NAMES[name]: values for name, values in numbers.largest.items()})
        right.set(xlabel="width of a head, d_k", ylabel="mean largest weight of a row", title="Largest attention weight", ylim=(0, 1.08))
        right.legend(frameon=False, loc="upper left")
        rows = [
            [width, *(f"{table[name][i]:.3f}" for table in (numbers.score_std, numbers.entropy, numbers.largest) for name in NAMES)]
            for i, width in enumerate(widths)
        ]
        header = ["d_k", *(f"{what},\n{how}" for what in ("std of scores", "entropy (nats)", "largest weight") for how in ("with 1/√d_k", "without"))]
        parts.table(figure.add_subplot(grid[1, :]), header, rows)
        figure.suptitle(f"Without 1/√d_k the softmax saturates (T = {numbers.length}, {numbers.draws} maps a width, q and k from N(0, 1))")
        return style.save(figure, out_path)
