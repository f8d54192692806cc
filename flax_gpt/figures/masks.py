"""Every kind of mask."""

import os
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from flax_gpt.experiments.masks import Masks
from flax_gpt.figures import parts, style

SEEN = "#4477aa"


def draw(numbers: Masks, out_path: str | os.PathLike[str]) -> Path:
    """A panel a kind, and one a row of the batch where the rows differ."""
    notes = {
        "window": f", {numbers.window[0]} to the left, {numbers.window[1]} to the right",
        "permutation": f", order {' '.join(map(str, numbers.order))}",
    }
    panels = []
    for kind, rows in numbers.kinds.items():
        for row, rows_mask in enumerate(rows):
            note = f", {numbers.lengths[row]} real tokens" if len(rows) > 1 else notes.get(kind, "")
            panels.append((kind + note, np.asarray(rows_mask), numbers.visible[kind][row]))
    with style.labels(""):
        figure = Figure(figsize=(14.4, 8.9), layout=ConstrainedLayoutEngine(hspace=0.06))
        grid = figure.subplots(2, -(-len(panels) // 2))
        for axes, (title, mask, visible) in zip(grid.flat, panels, strict=True):
            axes.imshow(mask, cmap=ListedColormap([parts.HIDDEN, SEEN]), vmin=0, vmax=1, interpolation="nearest")
            parts.token_axes(axes, numbers.length)
            axes.set_xticks(np.arange(-0.5, numbers.length), minor=True)
            axes.set_yticks(np.arange(-0.5, numbers.length), minor=True)
            axes.grid(which="minor", color="white", linewidth=1)
            axes.tick_params(which="minor", length=0)
            axes.set_title(f"{title}\nsees {np.mean(visible):.1f} keys on average ({min(visible)} to {max(visible)})", fontsize=9.5)
        patches = [Patch(color=SEEN, label="may attend"), Patch(color=parts.HIDDEN, label="hidden")]
        figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)
        figure.suptitle("Masks: which keys (columns) a query (row) may attend to")
        return style.save(figure, out_path)
