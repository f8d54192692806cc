"""Rotary positions (Su et al. 2021) in the two layouts that are in use."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_gpt.config import TransformerConfig
from flax_gpt.nn import rope_tables


class Rotation(NamedTuple):
    """cos and sin (1 or B, T, Dh/2) of the angles of each position and pair."""

    cos: jax.Array
    sin: jax.Array


class RotaryPositions(nnx.Module):
    """Gives the rotation of a sequence. Angles are computed in float64 on the host and rounded once to max(float32, compute dtype)."""

    def __init__(self, config: TransformerConfig):
        self.config = config

    def __call__(self, length: int, positions: jax.Array | None = None, span: jax.Array | int | None = None) -> Rotation:
        """The rotation at positions 0 … length - 1, or at `positions` (B, T); traced positions are clamped to max_len - 1.

        `span` is the sequence length that sets a dynamic scaling's factor, one for all or (B,); by default `length`. Other scalings ignore it.
        """
        config = self.config
        dtype = jnp.promote_types(config.dtype, jnp.float32)
        span = span if config.rope.scaling in rope_tables.DYNAMIC else None
        if isinstance(span, jax.Array | np.ndarray):
            span = jnp.asarray(span)
            where = jnp.arange(length, dtype=jnp.int32)[None] if positions is None else positions
            return _dynamic(config, where, jnp.broadcast_to(span, (span.size,)), dtype)
        size = length if positions is None else config.max_len
        cos, sin = (jnp.asarray(table.astype(dtype)) for table in rope_tables.tables(config, size, span or length))
        if positions is None:
            return Rotation(cos[None], sin[None])
        return Rotation(cos.at[positions].get(mode="clip"), sin.at[positions].get(mode="clip"))


def rotate_half(x: jax.Array, rotation: Rotation) -> jax.Array:
    """x (B, T, H, Dh) with the pair (x[i], x[i + Dh/2]) turned: x·cos + rotate_half(x)·sin, the layout of LLaMA and Qwen checkpoints."""
    cos, sin = (table[:, :, None, :] for table in rotation)
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rotate_interleaved(x: jax.Array, rotation: Rotation) -> jax.Array:
    """x (B, T, H, Dh) with the pair (x[2i], x[2i + 1]) turned: a complex number times e^{imθ} (Su et al. 2021, equation 12)."""
    cos, sin = (table[:, :, None, :] for table in rotation)
    first, second = x[..., 0::2].astype(cos.dtype), x[..., 1::2].astype(cos.dtype)
    return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape).astype(x.dtype)


ROTATE = {"rope_half": rotate_half, "rope_interleaved": rotate_interleaved}


def _dynamic(config: TransformerConfig, positions: jax.Array, span: jax.Array, dtype: jnp.dtype) -> Rotation:
    """The rotation when the span (B,) is traced; whole turns are dropped from exact products, see rope_tables.turns."""
    table = jnp.asarray(rope_tables.turns(config)).astype(dtype)
    pieces = table.at[span].get(mode="clip")[:, None]
    products = jnp.clip(positions, 0, config.max_len - 1).astype(dtype)[:, :, None, None] * pieces
    part = jnp.sum(products - jnp.round(products), axis=2)
    angle = (part - jnp.round(part)) * np.asarray(2 * np.pi, dtype)
    factor = np.asarray(rope_tables.attention_factor(config), dtype)
    return Rotation(jnp.cos(angle) * factor, jnp.sin(angle) * factor)
