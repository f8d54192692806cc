"""What an encoder-decoder looks at in the source as it writes: all layers and the heads of the last one, or any layer and head."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_gpt.errors import require
from flax_gpt.figures import style
from flax_gpt.figures.attention import check_choice, panels, pictures
from flax_gpt.generation.prompts import check_translator
from flax_gpt.generation.translate import translate

END = "end"
"""Label of the row that writes eos."""


def cross_maps(model: nnx.Module, source: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
    """The cross-attention of one pass without dropout over ids source (S,) and target (T,), bos first: one (H, T, S) float array a layer."""
    copy = nnx.merge(*nnx.split(model), copy=True)
    copy.eval()
    _, maps = copy(jnp.asarray(source, jnp.int32)[None], jnp.asarray(target, jnp.int32)[None], return_attention=True)
    return [np.asarray(layer[0], np.float64) for layer in maps["cross"]]


def draw(
    run: Any,
    source: str,
    out_folder: str | os.PathLike[str],
    *,
    target: str | None = None,
    layer: int | None = None,
    head: int | None = None,
) -> list[Path]:
    """Draws cross-attention-layers.png and cross-attention-heads.png, or cross-attention-layer-L[-head-H].png, and returns their paths.

    Columns are the source's characters, rows those that the decoder writes there: `target`, or its greedy translation. Raises InputError for a run of
    another kind, a text that is empty, no string, too long for the model's max_len, or has unknown characters, and for what `check_choice` refuses.
    """
    check_translator(run)
    config, tokenizer = run.model.config, run.tokenizer
    check_choice(config, layer, head)
    ids = tokenizer.encode_source(source)
    require(len(ids) <= config.max_len, "source", f"{len(ids)} tokens", f"must be at most max_len = {config.max_len} tokens long")
    if target is None:
        target = translate(run, [source], beams=1)[0][0].text
        require("\ufffd" not in target and target != "", "source", source, f"is translated as {target!r}, which cannot be drawn; give a target")
    written = tokenizer.encode_target(target)
    require(len(written) < config.max_len, "target", f"{len(written)} tokens", f"must leave room for its end: max_len = {config.max_len}")
    maps = cross_maps(run.model, ids, np.append(config.bos, written))
    with style.labels(source + target) as label:
        columns, rows = [label(c) for c in source], [label(c) for c in target] + [END]
        axes = "source (looked at)", "target (written)"
        figures = [
            (picture.name, panels(picture.maps, picture.titles, columns, picture.title, queries=rows, axes=axes))
            for picture in pictures(maps, "Cross-attention", layer, head)
        ]
        return [style.save(figure, Path(out_folder) / f"cross-attention-{name}.png") for name, figure in figures]
