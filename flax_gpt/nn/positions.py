"""Positions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_gpt.errors import require
from flax_gpt.nn.linear import embedding


class Buffer(nnx.Variable):
    """A constant that belongs to a model and travels with its weights; never trained."""


def sinusoidal_table(length: int, d_model: int) -> np.ndarray:
    """pe[p, 2i] = sin(p / 10000^(2i/D)), pe[p, 2i+1] = cos(same angle): (length, d_model) float64 (Vaswani et al. 2017, section 3.5).

    Raises InputError for an odd d_model.
    """
    require(d_model % 2 == 0, "d_model", d_model, "must be even: sinusoidal positions fill pairs of columns")
    angles = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, d_model, 2) / d_model)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, d_model)


class LearnedPositions(nnx.Module):
    """Adds a trained row for each position (Gehring et al. 2017; GPT-2 and BERT)."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.embedding = embedding(config, config.max_len, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """x (B, T, D) plus the rows 0 … T - 1, or those at `positions` (B, T); traced positions are clamped to the table."""
        last = self.embedding.num_embeddings - 1
        rows = jnp.arange(x.shape[1], dtype=jnp.int32)[None] if positions is None else jnp.minimum(positions, last)
        return x + self.embedding(rows)


class SinusoidalPositions(nnx.Module):
    """Adds the sinusoidal table; computed in float64 on the host and rounded once to max(float32, compute dtype)."""

    def __init__(self, config: Any):
        dtype = jnp.promote_types(config.dtype, jnp.float32)
        self.table = Buffer(jnp.asarray(sinusoidal_table(config.max_len, config.d_model).astype(dtype)[None]))

    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """x (B, T, D) plus the rows 0 … T - 1, or those at `positions` (B, T); traced positions are clamped to the table."""
        table = self.table[...]
        rows = table[:, : x.shape[1]] if positions is None else table[0].at[positions].get(mode="clip")
        return (x.astype(table.dtype) + rows).astype(x.dtype)


def added_positions(config: Any, *, rngs: nnx.Rngs) -> LearnedPositions | SinusoidalPositions | None:
    """The positions that are added to the embedding; None where `config.positions` names another kind."""
    if config.positions == "learned":
        return LearnedPositions(config, rngs=rngs)
    return SinusoidalPositions(config) if config.positions == "sinusoidal" else None
