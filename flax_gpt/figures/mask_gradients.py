"""Where gradients go under each mask."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from flax_gpt.experiments.mask_gradients import MaskGradients
from flax_gpt.figures import parts, style


def draw(numbers: MaskGradients, out_path: str | os.PathLike[str]) -> Path:
    """A heat map of influence a mask, and below them the gradients' sizes."""
    kinds = list(numbers.influence)
    titles = {
        "none": "no mask",
        "padding": f"padding ({numbers.real} real tokens)",
        "combined": "padding and causal",
        "permutation": f"permutation ({' '.join(map(str, numbers.order))})",
    }
    limit = max(float(np.max(numbers.influence[kind])) for kind in kinds)
    with style.labels(""):
        figure = Figure(figsize=(15, 7.4), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=[1, 1.05])
        above, below = halves
        grid = above.subplots(1, len(kinds))
        for axes, kind in zip(grid, kinds, strict=True):
            image = parts.heat(axes, numbers.influence[kind], signed=False, limit=limit, hidden=np.asarray(numbers.influence[kind]) == 0)
            parts.token_axes(axes, numbers.length)
            axes.set(title=titles.get(kind, kind), xlabel="input position s", ylabel="output position t")
        parts.colour_bar(above, image, grid, "‖∂ Σ out[t] / ∂ x[s]‖₂")
        setting = f"T = {numbers.length}, D = {numbers.d_model}, x from N(0, 1)"
        above.suptitle(f"What each output of one head sends back to each input; grey: exactly nothing ({setting})")
        left, right = below.subplots(1, 2, width_ratios=[1.3, 1])
        for colour, kind in zip(parts.COLOURS, kinds, strict=True):
            left.plot(
                range(numbers.length),
                numbers.position_norm[kind],
                color=colour,
                marker="o",
                markersize=4,
                linewidth=1.4,
                label=titles.get(kind, kind),
            )
        left.set(xlabel="input position s", ylabel="‖∂ Σ out / ∂ x[s]‖₂", title="Gradient at each position, all outputs together", ylim=(0, None))
        left.set_xticks(range(numbers.length))
        parts.tidy(left)
        left.legend(frameon=False, ncols=2)
        values = {
            "norm": [numbers.norm[kind] for kind in kinds],
            "distance from the gradient without a mask": [numbers.distance[kind] for kind in kinds],
        }
        short = titles | {kind: kind for kind in ("padding", "permutation")}
        equal = [short.get(kind, kind) for kind in kinds if numbers.equal[kind] and kind != "none"]
        parts.bars(right, [short.get(kind, kind).replace(" and ", "\nand ") for kind in kinds], values)
        title = f"Whole gradient: {'equal to none under ' + ', '.join(equal) if equal else 'every mask changes it'}"
        right.set(ylabel="2-norm", title=title, ylim=(0, 1.3 * max(max(v) for v in values.values())))
        right.legend(frameon=False, loc="upper left")
        return style.save(figure, out_path)
