"""Attention as the formula reads: the whole map in memory. Every feature, every dtype; the reference for the others.

softmax(scale · Q Kᵀ + bias) V over what is visible (Vaswani et al. 2017, equation 1).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flax_gpt import masks, random
from flax_gpt.kernels.case import Case, Inputs, clean


def refusal(case: Case) -> str | None:
    """Why this implementation cannot serve `case`, or None: it serves all."""
    return None


def attend(case: Case, q: Array, k: Array, v: Array, given: Inputs) -> tuple[Array, Array, Array]:
    """q (B, T, H, Dh), k (B, S, K, Dh), v (B, S, K, Dv) → out (B, T, H, Dv), weights (B, H, T, S) before dropout, lse (B, T, H)."""
    dtype = case.accumulator
    (q, bad_q), (k, bad_k), (v, bad_v) = (clean(x, dtype, case.assume_finite) for x in (q, k, v))
    bad_keys = _to_heads(case, bad_k + bad_v)

    scored = scores(case, q, k) + bad_q.transpose(0, 2, 1)[:, :, :, None] + bad_keys
    if given.bias is not None:
        scored = scored + given.bias.astype(dtype)

    seen = visible(case, given)
    some = jnp.any(seen, axis=-1, keepdims=True)
    scored = jnp.where(seen, scored, jnp.where(some, -jnp.inf, _fill(case, bad_keys)))

    peak = jax.lax.stop_gradient(jnp.max(scored, axis=-1, keepdims=True))
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    powers = jnp.exp(scored - peak)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    nothing = total == 0.0
    weights = jnp.where(seen | ~some, powers / jnp.where(nothing, 1.0, total), 0.0)
    lse = jnp.where(nothing | ~some, -jnp.inf, peak + jnp.log(jnp.where(nothing, 1.0, total)))

    dropped = weights
    if case.dropout_rate > 0.0:
        dropped = jnp.where(keep(case, given), weights / (1.0 - case.dropout_rate), 0.0)
    return mix(case, dropped, v), weights, lse[..., 0].transpose(0, 2, 1)


def scores(case: Case, q: Array, k: Array) -> Array:
    """Scaled products of q (B, T, H, Dh) and k (B, S, K, Dh), (B, H, T, S), before bias and mask."""
    products = _product("btkgd,bskd->bkgts", _split_heads(case, q), k, case.accumulator)
    return _merge_heads(case, products) * case.scale


def mix(case: Case, weights: Array, v: Array) -> Array:
    """Sums of v (B, S, K, Dv) by weights (B, H, T, S), (B, T, H, Dv)."""
    grouped = weights.reshape(case.batch, case.kv_heads, case.group, case.queries, case.keys)
    out = _product("bkgts,bskd->btkgd", grouped.astype(v.dtype), v, case.accumulator)
    return out.reshape(case.batch, case.queries, case.heads, case.value_width).astype(v.dtype)


def visible(case: Case, given: Inputs) -> Array:
    """What may be attended to, (B or 1, H or 1, T or 1, S) booleans. A bias of −∞ hides as a mask does."""
    seen = jnp.ones((1, 1, 1, case.keys), bool)
    if case.causal:
        seen = seen & _four_axes(masks.causal_mask(case.queries, case.keys, given.query_offset))
    if case.window is not None:
        seen = seen & _four_axes(masks.window_mask(case.queries, case.keys, given.query_offset, window=case.window))
    if given.kv_lengths is not None:
        seen = seen & masks.padding_mask(given.kv_lengths, case.keys)
    if given.mask is not None:
        seen = seen & given.mask
    if given.bias is not None:
        seen = seen & (given.bias != -jnp.inf)
    return seen


def keep(case: Case, given: Inputs) -> Array:
    """Which weights dropout keeps, (B, H, T, S): drawn at (row, head, position of the query, position of the key)."""
    assert given.dropout_key is not None
    rows = jnp.asarray(given.query_offset, jnp.int32).reshape(-1, 1, 1) + jnp.arange(case.queries, dtype=jnp.int32)[None, None, :]
    keys = random.fold(given.dropout_key[:, :, None, :], rows)
    columns = jnp.arange(case.keys, dtype=jnp.int32)[None, None, None, :]
    return random.bits(keys[..., None, :], columns) >= np.uint32(random.threshold(case.dropout_rate))


def _fill(case: Case, bad_keys: Array) -> Any:
    """Score of every key for a query that sees nothing: equal scores give the uniform row of the originals' −1e9 fill."""
    return {"zero": -jnp.inf, "uniform": 0.0 * bad_keys, "nan": jnp.nan}[case.empty_rows]


def _product(pattern: str, a: Array, b: Array, dtype: Any) -> Array:
    return jnp.einsum(pattern, a, b, preferred_element_type=dtype)


def _split_heads(case: Case, q: Array) -> Array:
    return q.reshape(case.batch, case.queries, case.kv_heads, case.group, case.width)


def _merge_heads(case: Case, scores: Array) -> Array:
    return scores.reshape(case.batch, case.heads, case.queries, case.keys)


def _to_heads(case: Case, per_key: Array) -> Array:
    """(B, S, K) → (B, H, 1, S)."""
    return jnp.repeat(per_key.transpose(0, 2, 1), case.group, axis=1)[:, :, None, :]


def _four_axes(mask: Array) -> Array:
    return mask if mask.ndim == 4 else mask[None, None]
