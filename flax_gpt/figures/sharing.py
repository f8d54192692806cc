"""Four ways to share projections, trained alike."""

import math
import os
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from flax_gpt.experiments.sharing import Sharing
from flax_gpt.figures import parts, style

NAMES = {"separate": "separate Q, K, V", "key_value": "K = V", "query_key": "Q = K", "none": "no projection"}


def draw(numbers: Sharing, out_path: str | os.PathLike[str]) -> Path:
    """Training curves, a table, and each variant's scores before the mask."""
    guess = math.log(numbers.letters)
    with style.labels(""):
        figure = Figure(figsize=(14.5, 8.4), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=[1, 1])
        above, below = halves
        left, right = above.subplots(1, 2, width_ratios=[1, 1.15])
        for colour, (name, variant) in zip(parts.COLOURS, numbers.variants.items(), strict=False):
            left.plot(variant.train["step"], variant.train["loss"], color=colour, linewidth=1.5, label=NAMES[name])
        left.axhline(guess, color="#555555", linewidth=1, linestyle="--", label=f"guessing: ln {numbers.letters} = {guess:.2f}")
        left.set_yscale("log")
        left.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        left.yaxis.set_minor_formatter(NullFormatter())
        left.set(xlabel="step (optimizer updates)", ylabel="cross-entropy (nats a copied letter)", title="Training loss")
        parts.tidy(left)
        left.legend(frameon=False, loc="lower left")
        header = ["", "parameters", "of them\nin attention", "loss on\nfresh strings", "letters right", "symmetry\nof scores"]
        rows = [
            [NAMES[name], f"{v.parameters:,}", f"{v.attention_parameters:,}", f"{v.loss:.4f}", f"{v.accuracy:.1%}", f"{v.symmetry:.3f}"]
            for name, v in numbers.variants.items()
        ]
        parts.table(right, header, rows)
        right.set_title(f"After {numbers.steps} steps of {numbers.batch_size} strings")
        above.suptitle(
            f"Copying {numbers.length} letters out of {numbers.letters}: decoders with D = {numbers.d_model}, "
            f"{numbers.num_layers} block{'s' if numbers.num_layers > 1 else ''} of {numbers.num_heads} heads, trained alike"
        )
        grid = below.subplots(1, len(numbers.variants))
        for axes, (name, variant) in zip(grid, numbers.variants.items(), strict=True):
            image = parts.heat(axes, variant.scores, signed=True)
            parts.token_axes(axes, len(variant.scores))
            axes.set_title(f"{NAMES[name]}: symmetry {variant.symmetry:.3f}")
            parts.colour_bar(below, image, axes, "q · k / √Dh")
        below.suptitle("Scores before the mask, first head of the first block, on one string")
        return style.save(figure, out_path)
