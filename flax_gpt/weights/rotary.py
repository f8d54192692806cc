"""Between the two layouts of rotary positions: the same rotation once the columns of W_Q and W_K are permuted."""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from flax_gpt.errors import require

Layout = Literal["rope_half", "rope_interleaved"]


def permute_rotary(
    weights: Mapping[str, np.ndarray], *, to: Layout, num_heads: int, num_kv_heads: int, query: str = "W_Q", key: str = "W_K"
) -> dict[str, np.ndarray]:
    """Weights by file name for the other layout; every projection named `query` or `key` is permuted, biases too, the rest is passed on.

    A head's row 2i of the interleaved layout is its row i of the half-split one, and its row 2i + 1 is row i + Dh/2. Arrays are (out, in) as in
    files. Scores, and so everything after them, stay the same (https://github.com/huggingface/transformers/issues/25199 has the symptom).
    Raises InputError for a projection whose rows are not an even number a head.
    """
    require(to in ("rope_half", "rope_interleaved"), "to", to, "must be 'rope_half' or 'rope_interleaved'")
    heads = {query: num_heads, key: num_kv_heads}
    return {name: _permute(name, array, heads[part], to) if (part := _part(name)) in heads else array for name, array in weights.items()}


def _part(name: str) -> str:
    return name.split(".")[-2] if "." in name else name


def _permute(name: str, array: np.ndarray, heads: int, to: Layout) -> np.ndarray:
    require(array.shape[0] % (2 * heads) == 0, name, list(array.shape), f"must have an even number of rows for each of {heads} heads")
    pair, half = (2, -1) if to == "rope_interleaved" else (-1, 2)
    rows = array.reshape(heads, pair, half, *array.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(array.shape)
