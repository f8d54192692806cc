"""Scores beside the weights that come of them."""

import os
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from flax_gpt.experiments.scores import Scores
from flax_gpt.figures import parts, style


def draw(numbers: Scores, out_path: str | os.PathLike[str]) -> Path:
    """Two heat maps with their values: all scores, and the weights of what the causal mask leaves visible."""
    hidden = np.triu(np.ones((numbers.length, numbers.length), bool), 1)
    with style.labels(""):
        figure = Figure(figsize=(13.4, 6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for axes, values, signed, mask, title, label in (
            (left, numbers.scores, True, None, "Scores, before the mask", "q · k / √d_k"),
            (right, numbers.weights, False, hidden, "Weights, after mask and softmax (grey: hidden, weight 0)", "attention weight"),
        ):
            image = parts.heat(axes, values, signed=signed, hidden=mask)
            if numbers.length <= 16:
                parts.write_values(axes, values, image, hidden=mask)
            parts.token_axes(axes, numbers.length)
            axes.set_title(title)
            parts.colour_bar(figure, image, axes, label)
        figure.suptitle(f"One head under the causal mask (T = {numbers.length}, d_k = {numbers.width}, q and k from N(0, 1))")
        return style.save(figure, out_path)
