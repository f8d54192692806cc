"""The visible context of each position under the causal mask."""

import os
from pathlib import Path

from matplotlib.figure import Figure

from flax_gpt.experiments.visible import Visible
from flax_gpt.figures import parts, style


def draw(numbers: Visible, out_path: str | os.PathLike[str]) -> Path:
    """A bar a position, and the mean."""
    with style.labels(""):
        figure = Figure(figsize=(7.5, 4.4), layout="constrained")
        axes = figure.subplots()
        drawn = axes.bar(range(numbers.length), numbers.counts, 0.8, color=parts.COLOURS[0])
        if numbers.length <= 32:
            axes.bar_label(drawn, label_type="center", fontsize=8.5, color="white")
            axes.set_xticks(range(numbers.length))
        axes.axhline(numbers.mean, color=parts.COLOURS[1], linewidth=1.4, linestyle="--", label=f"mean {numbers.mean:g}")
        title = f"Visible context under the causal mask: from {numbers.smallest} to {numbers.largest} keys, mean {numbers.mean:g}"
        axes.set(xlabel="query position", ylabel="visible keys, its own included", title=title)
        parts.tidy(axes)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc="upper left")
        return style.save(figure, out_path)
