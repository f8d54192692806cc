"""Multi-head self-attention, with a key/value cache for generation."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_gpt.kernels.api import attend
from flax_gpt.nn.dropout import Draw, attention_keys, dropout
from flax_gpt.nn.linear import linear


class SingleHeadAttention(nnx.Module):
    """One head: bias-free projections D → Dh, softmax(Q Kᵀ / √Dh) V (Vaswani et al. 2017, section 3.2.1)."""

    def __init__(self, config: Any, head_dim: int, *, rngs: nnx.Rngs):
        self.query = linear(config, config.d_model, head_dim, use_bias=False, rngs=rngs)
        self.key = linear(config, config.d_model, head_dim, use_bias=False, rngs=rngs)
        self.value = linear(config, config.d_model, head_dim, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, **options: Any) -> tuple[jax.Array, jax.Array]:
        """x (B, T, D) → output (B, T, Dh) and map (B, T, T); mask (T, T) or (B, 1, T, T), True = may attend; options as in `attend`."""
        q, k, v = (project(x)[:, :, None, :] for project in (self.query, self.key, self.value))
        out, weights = attend(q, k, v, mask=mask, return_weights=True, **options)
        return out[:, :, 0], weights[:, 0]


class MultiHeadAttention(nnx.Module):
    """H heads of width Dh = D / H over K key/value heads (Vaswani et al. 2017, section 3.2.2; K < H: Ainslie et al. 2023)."""

    def __init__(self, config: Any, place: str, *, use_bias: bool, dropout_rate: float = 0.0, output_dropout: float = 0.0, rngs: nnx.Rngs):
        self.num_heads, self.kv_heads = config.num_heads, config.kv_heads
        kv_width = config.kv_heads * config.head_dim
        self.query = linear(config, config.d_model, config.d_model, use_bias=use_bias, rngs=rngs)
        self.key = linear(config, config.d_model, kv_width, use_bias=use_bias, rngs=rngs)
        self.value = linear(config, config.d_model, kv_width, use_bias=use_bias, rngs=rngs)
        self.output = linear(config, config.d_model, config.d_model, use_bias=use_bias, to_residual=True, rngs=rngs)
        self.rate, self.output_rate, self.place = dropout_rate, output_dropout, place

    def __call__(
        self,
        x: jax.Array,
        *,
        causal: bool = False,
        lengths: jax.Array | None = None,
        draw: Draw | None = None,
        return_attention: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """x (B, T, D) → output (B, T, D) and, on request, the maps (B, H, T, T); keys from lengths (B,) on are hidden."""
        keys = attention_keys(draw, f"{self.place}.weights", x.shape[0], self.num_heads) if self.rate > 0 else None
        out = attend(
            *self.project(x),
            causal=causal,
            kv_lengths=lengths,
            dropout_rate=0.0 if keys is None else self.rate,
            dropout_key=keys,
            return_weights=return_attention,
        )
        out, weights = out if return_attention else (out, None)
        return dropout(self.merge(out), self.output_rate, draw, f"{self.place}.output"), weights

    def step(self, x: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Appends x (B, T, D) at positions lengths[b] … of the caches (B, S, K, Dh) and attends to all before: output and new caches."""
        q, k, v = self.project(x)
        keys, values = _write(keys, k, lengths), _write(values, v, lengths)
        out = attend(q, keys, values, causal=True, query_offset=lengths, kv_lengths=lengths + x.shape[1])
        return self.merge(out), keys, values

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x (B, T, D) → q (B, T, H, Dh), k and v (B, T, K, Dh)."""
        return _split(self.query(x), self.num_heads), _split(self.key(x), self.kv_heads), _split(self.value(x), self.kv_heads)

    def merge(self, heads: jax.Array) -> jax.Array:
        """(B, T, H, Dh) → (B, T, D) through the output projection."""
        return self.output(heads.reshape(*heads.shape[:2], -1))


def _split(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:2], heads, -1)


def _write(cache: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    zero = jnp.int32(0)  # a Python 0 would be int64 in double precision
    return jax.vmap(lambda row, part, start: jax.lax.dynamic_update_slice(row, part, (start, zero, zero)))(
        cache, new.astype(cache.dtype), lengths.astype(jnp.int32)
    )
