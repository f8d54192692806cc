"""Attention modules, with a key/value cache for generation."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_gpt.kernels.api import attend
from flax_gpt.nn.dropout import Draw, attention_keys, dropout
from flax_gpt.nn.linear import linear
from flax_gpt.nn.rotary import ROTATE, Rotation


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
    """H heads of width Dh = D / H over K key/value heads (Vaswani et al. 2017, section 3.2.2; K < H: Ainslie et al. 2023).

    Self-attention, or cross-attention when a memory is given.
    """

    def __init__(self, config: Any, place: str, *, rngs: nnx.Rngs):
        self.num_heads, self.kv_heads = config.num_heads, config.kv_heads
        D, kv_width, use_bias = config.d_model, config.kv_heads * config.head_dim, config.attention_bias
        self.query = linear(config, D, D, use_bias=use_bias, rngs=rngs)
        self.key = linear(config, D, kv_width, use_bias=use_bias, rngs=rngs)
        self.value = linear(config, D, kv_width, use_bias=use_bias, rngs=rngs)
        self.output = linear(config, D, D, use_bias=use_bias, to_residual=True, rngs=rngs)
        self.layout, self.place = config.positions, place
        self.rate = config.attention_dropout
        self.output_rate = config.dropout if config.double_attention_dropout else 0.0

    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None = None,
        *,
        causal: bool = False,
        lengths: jax.Array | None = None,
        rotation: Rotation | None = None,
        draw: Draw | None = None,
        return_attention: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """x (B, T, D), attending to memory (B, S, D) or to itself → output (B, T, D) and, on request, the maps (B, H, T, S).

        Keys from lengths (B,) on are hidden. Activations are taken to be finite: where weights are not, every row of the sequence may be spoilt.
        """
        q = self.queries(x, rotation)
        k, v = self.keys_values(x if memory is None else memory, rotation)
        keys = attention_keys(draw, f"{self.place}.weights", x.shape[0], self.num_heads) if self.rate > 0 else None
        rate = 0.0 if keys is None else self.rate
        out = attend(q, k, v, causal=causal, kv_lengths=lengths, dropout_rate=rate, dropout_key=keys, return_weights=return_attention,
                     assume_finite=True)  # fmt: skip
        out, weights = out if return_attention else (out, None)
        return dropout(self.merge(out), self.output_rate, draw, f"{self.place}.output"), weights

    def step(
        self, x: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array, rotation: Rotation | None = None, *, empty: bool = False
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Appends x (B, T, D) at positions lengths[b] … of the caches (B, K, S, Dh) and attends to all before: output and new caches.

        `empty`: all lengths are 0, so that x attends to itself alone, and no key above the diagonal is computed. Caches are taken to be finite
        too: weights or logits that are not end a generation.
        """
        k, v = self.keys_values(x, rotation)
        keys, values = _write(keys, k, lengths), _write(values, v, lengths)
        q = self.queries(x, rotation)
        if empty:
            return self.merge(attend(q, k, v, causal=True, assume_finite=True)), keys, values
        end = lengths + x.shape[1]
        out = attend(q, _turn(keys), _turn(values), causal=True, query_offset=lengths, kv_lengths=end, assume_finite=True)
        return self.merge(out), keys, values

    def remember(self, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        """memory (B, S, D) → keys and values (B, K, S, Dh), as `read` takes them."""
        k, v = self.keys_values(memory)
        return _turn(k), _turn(v)

    def read(self, x: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array | None) -> jax.Array:
        """Cross-attention of x (B, T, D) to keys and values (B, K, S, Dh) that were computed once.

        x may have n rows, one after the other, for each of theirs, (B·n, T, D), as the beams of a search do: nothing is copied for them.
        """
        grouped = x.reshape(keys.shape[0], -1, x.shape[-1])
        return self.merge(attend(self.queries(grouped), _turn(keys), _turn(values), kv_lengths=lengths, assume_finite=True)).reshape(x.shape)

    def queries(self, x: jax.Array, rotation: Rotation | None = None) -> jax.Array:
        """x (B, T, D) → (B, T, H, Dh), rotated."""
        return self._rotate(_split(self.query(x), self.num_heads), rotation)

    def keys_values(self, x: jax.Array, rotation: Rotation | None = None) -> tuple[jax.Array, jax.Array]:
        """x (B, S, D) → keys, rotated, and values, each (B, S, K, Dh)."""
        return self._rotate(_split(self.key(x), self.kv_heads), rotation), _split(self.value(x), self.kv_heads)

    def merge(self, heads: jax.Array) -> jax.Array:
        """(B, T, H, Dh) → (B, T, D) through the output projection."""
        return self.output(heads.reshape(*heads.shape[:2], -1))

    def _rotate(self, x: jax.Array, rotation: Rotation | None) -> jax.Array:
        return x if rotation is None else ROTATE[self.layout](x, rotation)


def _split(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:2], heads, -1)


def _turn(x: jax.Array) -> jax.Array:
    """(B, S, K, Dh) ↔ (B, K, S, Dh): caches hold a head's keys in one piece, which a product reads as they lie."""
    return x.swapaxes(1, 2)


def _write(cache: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    """`cache` (B, K, S, Dh) with new (B, T, K, Dh) at positions lengths[b] …"""
    zero = jnp.int32(0)  # a Python 0 would be int64 in double precision
    return jax.vmap(lambda row, part, start: jax.lax.dynamic_update_slice(row, part, (zero, start, zero)))(
        cache, _turn(new).astype(cache.dtype), lengths.astype(jnp.int32)
    )
