"""Spectra of attention maps and of their scores."""

import os
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from flax_gpt.experiments.rank import Rank, Spectra
from flax_gpt.figures import parts, style


def draw(numbers: Rank, out_path: str | os.PathLike[str]) -> Path:
    """Singular values of the maps, those of the scores, and a table of ranks."""
    single, multi = numbers.single, numbers.multi
    named = {_name(single): single, _name(multi): multi}
    with style.labels(""):
        figure = Figure(figsize=(12, 7), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=[2.4, 1])
        maps, scores = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        for colour, (name, spectra) in zip(parts.COLOURS, named.items(), strict=False):
            for axes, lines in ((maps, spectra.map_singular_values), (scores, spectra.score_singular_values)):
                for number, line in enumerate(lines):
                    index = np.arange(1, len(line) + 1)
                    axes.plot(index, np.maximum(line, 1e-18), color=colour, linewidth=1.3, alpha=0.75, label=name if number == 0 else None)
        maps.plot(
            np.arange(1, numbers.length + 1),
            multi.mean_map_singular_values,
            color="black",
            linewidth=1.5,
            linestyle=":",
            label=f"mean of the {multi.heads} maps",
        )
        for axes, title in ((maps, "Maps, after the softmax"), (scores, "Scores, before the softmax")):
            axes.axhline(numbers.threshold, color="#555555", linewidth=1, linestyle="--")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.0e}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set(xlabel="index of the singular value", ylabel="singular value", title=title, xlim=(0, numbers.length + 1))
            parts.tidy(axes)
            axes.legend(frameon=False, loc="lower left" if axes is maps else "upper right", bbox_to_anchor=(0, 0.17) if axes is maps else None)
        maps.set_ylim(numbers.threshold / 10)
        maps.text(2, numbers.threshold / 1.15, f"counts as rank above {numbers.threshold:g}", ha="left", va="top", fontsize=8.5)
        rows = [
            [name, _span(s.score_rank), _span(s.map_rank), _span(s.map_effective_rank), f"{s.mean_map_rank}", f"{s.mean_map_effective_rank:.1f}"]
            for name, s in named.items()
        ]
        header = ["", "rank of\nthe scores", "rank of\na map", "effective rank\nof a map", "rank of\nthe mean map", "effective rank\nof the mean map"]
        parts.table(figure.add_subplot(grid[1, :]), header, rows)
        figure.suptitle(f"Rank of attention maps (T = {numbers.length}, q and k from N(0, 1), float64)")
        return style.save(figure, out_path)


def _name(spectra: Spectra) -> str:
    return f"{spectra.heads} head{'s' if spectra.heads > 1 else ''} of width {spectra.width}"


def _span(values: list[int] | list[float]) -> str:
    """The smallest and the largest of the heads' values."""
    ends = [f"{value:.1f}" if isinstance(value, float) else f"{value}" for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))
