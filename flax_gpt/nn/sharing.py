"""Attention with shared projections: what is left when queries, keys and values are no longer three.

Each is MultiHeadAttention with projections taken away, so that masks, RoPE, dropout, maps and the cache are its own. Scores Q Kᵀ with Q = K
are symmetric before the mask, RoPE or not: position t weighs s as s weighs t (Kitaev et al. 2020, section 2, use that sharing in the Reformer).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_gpt.errors import require
from flax_gpt.nn.attention import MultiHeadAttention
from flax_gpt.nn.rotary import Rotation


class SeparateAttention(MultiHeadAttention):
    """Q = x W_Q, K = x W_K, V = x W_V: 4 D² weights with the output map, without biases and with as many key/value heads as heads."""


class SharedKeyValueAttention(MultiHeadAttention):
    """K = V = x W_K: 3 D² weights. RoPE turns the keys alone."""

    def __init__(self, config: Any, place: str, *, rngs: nnx.Rngs):
        super().__init__(config, place, rngs=rngs)
        del self.value

    def keys_values(self, x: jax.Array, rotation: Rotation | None = None) -> tuple[jax.Array, jax.Array]:
        """x (B, S, D) → keys, rotated, and the same not rotated, each (B, S, K, Dh)."""
        shared = split_heads(self.key(x), self.kv_heads)
        return self._rotate(shared, rotation), shared


class SharedQueryKeyAttention(MultiHeadAttention):
    """Q = K = x W_Q: 3 D² weights, symmetric scores. Raises InputError unless there are as many key/value heads as heads."""

    def __init__(self, config: Any, place: str, *, rngs: nnx.Rngs):
        _require_equal_heads(config)
        super().__init__(config, place, rngs=rngs)
        del self.key

    def keys_values(self, x: jax.Array, rotation: Rotation | None = None) -> tuple[jax.Array, jax.Array]:
        """x (B, S, D) → the queries' projection, rotated, and values, each (B, S, H, Dh)."""
        return self.queries(x, rotation), split_heads(self.value(x), self.kv_heads)


class UnprojectedAttention(MultiHeadAttention):
    """Q = K = V = x, cut into heads: D² weights, those of the output map; symmetric scores. Raises InputError as SharedQueryKeyAttention."""

    def __init__(self, config: Any, place: str, *, rngs: nnx.Rngs):
        _require_equal_heads(config)
        super().__init__(config, place, rngs=rngs)
        del self.query, self.key, self.value

    def queries(self, x: jax.Array, rotation: Rotation | None = None) -> jax.Array:
        """x (B, T, D) → (B, T, H, Dh), rotated."""
        return self._rotate(split_heads(x, self.num_heads), rotation)

    def keys_values(self, x: jax.Array, rotation: Rotation | None = None) -> tuple[jax.Array, jax.Array]:
        """x (B, S, D) → itself twice, (B, S, H, Dh), the first rotated."""
        return self.queries(x, rotation), split_heads(x, self.num_heads)


SHARING: dict[str, type[MultiHeadAttention]] = {
    "separate": SeparateAttention,
    "key_value": SharedKeyValueAttention,
    "query_key": SharedQueryKeyAttention,
    "none": UnprojectedAttention,
}


def share(model: Any, sharing: str, *, rngs: nnx.Rngs) -> None:
    """Puts attention of the kind `sharing` (a name in SHARING) into every block of a MiniGPT or TinyTransformer, with fresh weights, in place."""
    require(sharing in SHARING, "sharing", sharing, f"must be one of {', '.join(SHARING)}")
    for block in model.blocks:
        block.attention = SHARING[sharing](model.config, block.attention.place, rngs=rngs)


def scores(attention: MultiHeadAttention, x: jax.Array, rotation: Rotation | None = None) -> jax.Array:
    """Q Kᵀ / √Dh of x (B, T, D) before any mask: (B, H, T, T)."""
    q, (k, _) = attention.queries(x, rotation), attention.keys_values(x, rotation)
    k = jnp.repeat(k, attention.num_heads // attention.kv_heads, axis=2)
    return jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5


def symmetry(matrices: jax.Array) -> jax.Array:
    """Share of the squared size of matrices (…, T, T) that lies in their symmetric part: 1 symmetric, 0 antisymmetric, near ½ neither. Mean over …"""
    even = (matrices + jnp.swapaxes(matrices, -1, -2)) / 2
    return jnp.mean(jnp.sum(even * even, axis=(-2, -1)) / jnp.sum(matrices * matrices, axis=(-2, -1)))


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """(B, T, H · Dh) → (B, T, H, Dh)."""
    return x.reshape(*x.shape[:2], heads, -1)


def _require_equal_heads(config: Any) -> None:
    same = config.kv_heads == config.num_heads
    require(same, "num_kv_heads", config.kv_heads, f"must equal num_heads = {config.num_heads} where queries and keys are the same")
