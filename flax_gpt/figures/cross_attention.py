"""What an encoder-decoder looks at in the source as it writes: every layer's mean over its heads, and every head of the last layer."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_gpt.errors import require
from flax_gpt.figures import style
from flax_gpt.figures.attention import panels
from flax_gpt.generation.translate import translate

END = "end"
"""Label of the row that writes eos."""


def cross_maps(model: nnx.Module, source: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
    """The cross-attention of one pass without dropout over ids source (S,) and target (T,), bos first: one (H, T, S) float array a layer."""
    copy = nnx.merge(*nnx.split(model), copy=True)
    copy.eval()
    _, maps = copy(jnp.asarray(source, jnp.int32)[None], jnp.asarray(target, jnp.int32)[None], return_attention=True)
    return [np.asarray(layer[0], np.float64) for layer in maps["cross"]]


def draw(run: Any, source: str, out_folder: str | os.PathLike[str], *, target: str | None = None) -> list[Path]:
    """Draws cross-attention-layers.png and cross-attention-heads.png and returns their paths.

    Columns are the source's characters, rows those that the decoder writes there: `target`, or its greedy translation. Raises InputError for a text
    that is empty, too long for the model's max_len, or has unknown characters.
    """
    config, tokenizer = run.model.config, run.tokenizer
    ids = tokenizer.encode_source(source)
    require(len(ids) <= config.max_len, "source", f"{len(ids)} tokens", f"must be at most max_len = {config.max_len} tokens long")
    if target is None:
        target = translate(run, [source], beams=1)[0][0].text
        require("\ufffd" not in target and target != "", "source", source, f"is translated as {target!r}, which cannot be drawn; give a target")
    written = tokenizer.encode_target(target)
    require(len(written) < config.max_len, "target", f"{len(written)} tokens", f"must leave room for its end: max_len = {config.max_len}")
    maps = cross_maps(run.model, ids, np.append(config.bos, written))
    heads = len(maps[0])
    with style.labels(source + target) as label:
        columns, rows = [label(c) for c in source], [label(c) for c in target] + [END]
        axes = "source (looked at)", "target (written)"
        layers = panels(
            [layer.mean(axis=0) for layer in maps],
            [f"layer {i}" for i in range(1, len(maps) + 1)],
            columns,
            f"Cross-attention, mean over {heads} heads",
            queries=rows,
            axes=axes,
        )
        names = [f"head {h}" for h in range(1, heads + 1)]
        last = panels(list(maps[-1]), names, columns, f"Cross-attention heads of the last layer ({len(maps)})", queries=rows, axes=axes)
        folder = Path(out_folder)
        return [style.save(layers, folder / "cross-attention-layers.png"), style.save(last, folder / "cross-attention-heads.png")]
