"""What a GPT attends to in one text: every layer's mean over its heads, and every head of the last layer."""

import math
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from flax_gpt.errors import require
from flax_gpt.figures import style

MARGIN = 1.0
"""Inches a panel beside its cells, for labels and title."""

WIDTH = 16.0
"""Inches up to which panels stand in one row; beyond, rows and columns come near a square."""

TICKS = (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1)


def attention_maps(model: nnx.Module, ids: np.ndarray) -> list[np.ndarray]:
    """The maps of one pass without dropout over ids (T,): one (H, T, T) float array a layer. The model's own mode stays as it is."""
    copy = nnx.merge(*nnx.split(model), copy=True)
    copy.eval()
    _, maps = copy(jnp.asarray(ids, jnp.int32)[None], return_attention=True)
    return [np.asarray(layer[0], np.float64) for layer in maps]


def panels(
    maps: list[np.ndarray],
    titles: list[str],
    tokens: list[str],
    title: str,
    *,
    queries: list[str] | None = None,
    axes: tuple[str, str] = ("key (looked at)", "query (looking)"),
) -> Figure:
    """One heat map (T, S) a panel, rows asking and columns looked at. Call it within `style.labels`.

    All share one colour scale from 0, by the square root of the weight: most weights are small. `tokens` label the columns and, without `queries`,
    the rows.
    """
    queries = tokens if queries is None else queries
    across_name, down_name = axes
    T = max(len(tokens), len(queries))
    longest = max(map(len, tokens))
    font = 9.0 if T <= 24 else 7.5
    across = font / 72 * max(1.35, 0.7 * longest)  # inches that the longest label takes
    cell = max(font / 72 * 1.4, 2.4 / T)
    side, height = cell * len(tokens), cell * len(queries)
    columns = min(len(maps), max(math.floor(WIDTH / (side + MARGIN)), math.ceil(math.sqrt(len(maps)))))
    rows = math.ceil(len(maps) / columns)
    columns = math.ceil(len(maps) / rows)  # four panels that do not fit in a row stand two by two
    figure = Figure(figsize=(columns * (side + MARGIN + across) + 0.8, rows * (height + MARGIN + across) + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    largest = max(float(m.max()) for m in maps)
    scale = PowerNorm(0.5, vmin=0.0, vmax=largest)
    for panel, weights, name in zip(grid.flat, maps, titles, strict=False):
        image = panel.imshow(weights, cmap="viridis", norm=scale, interpolation="nearest", aspect="equal")
        panel.set_title(name)
        panel.set_xticks(range(len(tokens)), tokens, fontsize=font, rotation=90 if longest > 1 else 0)
        panel.set_yticks(range(len(queries)), queries, fontsize=font)
        panel.tick_params(length=0, pad=2)
        panel.set(xlabel=across_name, ylabel=down_name)
    for panel in grid.flat[len(maps) :]:
        panel.set_visible(False)
    bar = figure.colorbar(image, ax=grid, fraction=0.04 / columns, pad=0.02, aspect=30)
    bar.set_ticks([tick for tick in TICKS if tick <= largest])
    bar.set_label("attention weight (colours by its square root)")
    figure.suptitle(title)
    return figure


def draw(run: Any, text: str, out_folder: str | os.PathLike[str]) -> list[Path]:
    """Draws attention-layers.png and attention-heads.png for `text` and returns their paths; the attention is computed once.

    `run` has a `model` and a `tokenizer`. Raises InputError for an empty text, one longer than the model's max_len, and one with unknown characters.
    """
    require(len(text) > 0, "text", text, "must hold at least one character")
    ids = np.asarray(run.tokenizer.encode(text))
    limit = run.model.config.max_len
    require(len(ids) <= limit, "text", f"{len(ids)} tokens", f"must be at most max_len = {limit} tokens long")
    maps = attention_maps(run.model, ids)
    tokens = [run.tokenizer.decode(ids[i : i + 1]) for i in range(len(ids))]
    heads = len(maps[0])
    with style.labels("".join(tokens)) as label:
        names = [label(token) for token in tokens]
        layers = panels(
            [layer.mean(axis=0) for layer in maps],
            [f"layer {i}" for i in range(1, len(maps) + 1)],
            names,
            f"Attention, mean over {heads} heads",
        )
        last = panels(list(maps[-1]), [f"head {h}" for h in range(1, heads + 1)], names, f"Attention heads of the last layer ({len(maps)})")
        folder = Path(out_folder)
        return [style.save(layers, folder / "attention-layers.png"), style.save(last, folder / "attention-heads.png")]
