"""Attention masks: boolean, True = may attend, broadcasting to (B, H, T, S). The only place that builds one.

`lengths`, `offset` and the sizes that are known on the host are checked there; traced lengths are clamped to [0, S].
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_gpt.errors import describe, require

Array = jax.Array


def _positions(T: int, S: int | None, offset: Any) -> tuple[Array, Array]:
    """Absolute positions of queries (T, 1) or (B, 1, T, 1) for a batch of offsets, and of keys with as many axes (…, S)."""
    require(T >= 1, "T", T, "must be at least 1")
    require(S is None or S >= 1, "S", S, "must be at least 1")
    require(offset is not None or S is None or S == T, "offset", offset, f"is required when S = {S} differs from T = {T}")
    offset = jnp.asarray(0 if offset is None else offset, jnp.int32)
    queries = jnp.arange(T, dtype=jnp.int32)[:, None]
    queries = queries[None, None] + offset[:, None, None, None] if offset.ndim else queries + offset
    return queries, jnp.arange(S or T, dtype=jnp.int32).reshape((1,) * (queries.ndim - 1) + (-1,))


def causal_mask(T: int, S: int | None = None, offset: Any = None) -> Array:
    """Each query sees the keys up to its own position: (T, S), or (B, 1, T, S) for offsets (B,).

    `offset` is the position of the first query among the keys; it is required when S differs from T.
    """
    queries, keys = _positions(T, S, offset)
    return keys <= queries


def window_mask(T: int, S: int | None = None, offset: Any = None, *, window: tuple[int | None, int | None]) -> Array:
    """Each query sees `window` = (left, right) neighbours beside itself; None leaves that side open. Shapes as in causal_mask.

    Raises InputError for a negative side.
    """
    queries, keys = _positions(T, S, offset)
    distance = keys - queries
    left, right = window
    for side in window:
        require(side is None or side >= 0, "window", window, "must be (left, right), integers of at least 0 or None for an open side")
    mask = jnp.ones_like(distance, dtype=bool)
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right
    return mask


def padding_mask(lengths: Any, S: int) -> Array:
    """Only the first lengths[b] keys of row b are seen: (B, 1, 1, S) from lengths (B,) integers; any batch, where the original's helper raises.

    Raises InputError when lengths known on the host lie outside [0, S]; traced ones are clamped.
    """
    check_lengths("lengths", lengths, S)
    return (jnp.arange(S)[None, :] < jnp.asarray(lengths)[:, None])[:, None, None, :]


def combined_mask(lengths: Any, T: int) -> Array:
    """Causal and padding: (B, 1, T, T)."""
    return causal_mask(T)[None, None] & padding_mask(lengths, T)


def permutation_mask(order: Any) -> Array:
    """Position p sees the positions that stand before p in `order` (XLNet: Yang et al. 2019, section 2.2).

    (T, T) for one order (T,), (B, 1, T, T) for an order a row (B, T), both known on the host. The first position in an order sees nothing; for
    [2, 0, 3, 1] position 3 sees 2 and 0, as in the original's function, from which its printed example differs.
    Raises InputError when an order is not a permutation of 0 … T - 1.
    """
    order = np.asarray(order)
    integers = order.ndim in (1, 2) and order.size >= 1 and np.issubdtype(order.dtype, np.integer)
    is_permutation = integers and bool((np.sort(order, axis=-1) == np.arange(order.shape[-1])).all())
    require(is_permutation, "order", order.tolist(), "must be a permutation of 0 … T - 1, or one a row")
    rank = np.argsort(order, axis=-1)
    mask = rank[..., None, :] < rank[..., :, None]
    return jnp.asarray(mask if order.ndim == 1 else mask[:, None])


def bidirectional_mask(T: int, S: int | None = None) -> Array:
    """Everything sees everything: (T, S)."""
    require(T >= 1, "T", T, "must be at least 1")
    require(S is None or S >= 1, "S", S, "must be at least 1")
    return jnp.ones((T, S or T), dtype=bool)


def visible_counts(mask: Any) -> Array:
    """Number of keys that each query sees: the mask's shape without its last axis, int32."""
    return jnp.sum(mask, axis=-1, dtype=jnp.int32)


def host_array(argument: str, values: Any) -> Any:
    """`values`, as a numpy array unless they are one. Raises InputError for what makes none, such as rows of different lengths."""
    if hasattr(values, "dtype"):
        return values
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        array = np.empty(0, object)
    require(array.dtype.kind in "biufc", argument, describe(values), "must be an array of numbers, its rows of one length")
    return array


def check_lengths(argument: str, lengths: Any, limit: int) -> None:
    """Raises InputError unless `lengths` is (B,) integers within [0, limit]; values that are traced are not looked at."""
    integers = hasattr(lengths, "dtype") and jnp.issubdtype(lengths.dtype, jnp.integer)
    require(integers and np.ndim(lengths) == 1, argument, describe(lengths), "must be integers of shape (B,)")
    if isinstance(lengths, jax.core.Tracer):
        return
    values = np.asarray(lengths)
    require(bool(((values >= 0) & (values <= limit)).all()), argument, values.tolist(), f"must lie in [0, {limit}]")
