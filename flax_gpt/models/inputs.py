"""What a model refuses before it computes: JAX would clamp, wrap or return NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_gpt.errors import require
from flax_gpt.masks import check_lengths


def check_inputs(
    config: Any,
    tokens: Any,
    lengths: Any = None,
    positions: Any = None,
    *,
    names: tuple[str, str] = ("tokens", "lengths"),
    vocab_size: int | None = None,
) -> None:
    """Raises InputError for ids outside the vocabulary, a sequence longer than max_len, and lengths or positions that do not fit.

    Shapes and dtypes are always checked; values only when they are known on the host.
    """
    name = names[0]
    shape = np.shape(tokens)
    require(len(shape) == 2 and min(shape) >= 1, name, list(shape), "must have the shape (B, T), both at least 1")
    _check_ids(name, tokens, config.vocab_size if vocab_size is None else vocab_size)
    require(shape[1] <= config.max_len, name, list(shape), f"has T = {shape[1]} tokens, more than max_len = {config.max_len}")
    if lengths is not None:
        check_lengths(names[1], lengths, shape[1])
        require(np.shape(lengths) == shape[:1], names[1], list(np.shape(lengths)), f"must have the shape ({shape[0]},)")
    if positions is not None:
        require(np.shape(positions) == shape, "positions", list(np.shape(positions)), f"must have the tokens' shape {list(shape)}")
        _check_ids("positions", positions, config.max_len)


def _check_ids(argument: str, ids: Any, limit: int) -> None:
    dtype = jnp.result_type(ids)
    require(jnp.issubdtype(dtype, jnp.integer), argument, str(dtype), "must be integers")
    if isinstance(ids, jax.core.Tracer):
        return
    values = np.asarray(ids)
    wrong = values[(values < 0) | (values >= limit)]
    require(wrong.size == 0, argument, int(wrong[0]) if wrong.size else None, f"must lie in [0, {limit})")
