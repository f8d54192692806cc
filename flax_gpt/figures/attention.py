"""What a model attends to in one text: every layer's mean over its heads, every head of the last layer, or any layer and head."""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from flax_gpt.errors import is_integer, require
from flax_gpt.figures import style
from flax_gpt.models.encoder_decoder import EncoderDecoder
from flax_gpt.training.tokenizer import check_text

MARGIN = 1.0
"""Inches a panel beside its cells, for labels and title."""

WIDTH = 16.0
"""Inches up to which panels stand in one row; beyond, rows and columns come near a square."""

TICKS = (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1)


class Picture(NamedTuple):
    """Panels of one picture."""

    name: str
    """What its file's name ends in."""
    maps: list[np.ndarray]
    titles: list[str]
    title: str


def attention_maps(model: nnx.Module, ids: np.ndarray) -> list[np.ndarray]:
    """The maps of one pass without dropout over ids (T,), of an encoder-decoder those of its encoder: one (H, T, T) float array a layer.

    The model's own mode stays as it is.
    """
    copy = nnx.merge(*nnx.split(model), copy=True)
    copy.eval()
    forward = copy.encode if isinstance(copy, EncoderDecoder) else copy
    _, maps = forward(jnp.asarray(ids, jnp.int32)[None], return_attention=True)
    return [np.asarray(layer[0], np.float64) for layer in maps]


def check_choice(config: Any, layer: int | None, head: int | None) -> None:
    """Raises InputError for a layer or a head, both counted from 1, that a model of `config` does not have, and for a head of no layer."""
    for name, value, count in (("layer", layer, config.num_layers), ("head", head, config.num_heads)):
        require(value is None or (is_integer(value) and 1 <= value <= count), name, value, f"must be an integer in [1, {count}]")
    require(head is None or layer is not None, "head", head, "needs the layer that it belongs to")


def pictures(maps: list[np.ndarray], what: str, layer: int | None = None, head: int | None = None) -> list[Picture]:
    """One head of a layer, or all of them; without a layer every layer's mean over its heads, and every head of the last."""
    heads = range(1, len(maps[0]) + 1)
    if layer is None:
        means = [one.mean(axis=0) for one in maps]
        return [
            Picture("layers", means, [f"layer {i}" for i in range(1, len(maps) + 1)], f"{what}, mean over {len(heads)} heads"),
            Picture("heads", list(maps[-1]), [f"head {h}" for h in heads], f"{what} heads of the last layer ({len(maps)})"),
        ]
    chosen = list(heads) if head is None else [head]
    name = f"layer-{layer}" if head is None else f"layer-{layer}-head-{head}"
    return [Picture(name, [maps[layer - 1][h - 1] for h in chosen], [f"head {h}" for h in chosen], f"{what}, layer {layer} of {len(maps)}")]


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


def draw(run: Any, text: str, out_folder: str | os.PathLike[str], *, layer: int | None = None, head: int | None = None) -> list[Path]:
    """Draws attention-layers.png and attention-heads.png for `text`, or attention-layer-L[-head-H].png, and returns their paths.

    `run` has a `model` and a `tokenizer`: a GPT's, a classifier's, or an encoder-decoder's, whose encoder is drawn. The attention is computed once.
    Raises InputError for a text that is empty, no string, longer than the model's max_len or has unknown characters, and for what `check_choice`
    refuses.
    """
    config = run.model.config
    check_choice(config, layer, head)
    check_text("text", text, smallest=1)
    translates = isinstance(run.model, EncoderDecoder)
    ids = run.tokenizer.encode_source(text, "text") if translates else run.tokenizer.encode(text, "text")
    require(len(ids) <= config.max_len, "text", f"{len(ids)} tokens", f"must be at most max_len = {config.max_len} tokens long")
    what = "Attention of the encoder" if translates else "Attention"
    return draw_maps(attention_maps(run.model, ids), list(text), out_folder, what=what, layer=layer, head=head)


def draw_maps(
    maps: list[np.ndarray],
    tokens: list[str],
    out_folder: str | os.PathLike[str],
    *,
    what: str = "Attention",
    layer: int | None = None,
    head: int | None = None,
) -> list[Path]:
    """The pictures of `draw` from one map (H, T, T) a layer and its T tokens, of whatever model they are."""
    with style.labels("".join(tokens)) as label:
        names = [label(token) for token in tokens]
        figures = [(picture.name, panels(picture.maps, picture.titles, names, picture.title)) for picture in pictures(maps, what, layer, head)]
        return [style.save(figure, Path(out_folder) / f"attention-{name}.png") for name, figure in figures]
