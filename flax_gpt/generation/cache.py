"""The key/value caches of generation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flax_gpt.config import TransformerConfig
from flax_gpt.errors import require


class KVCache(NamedTuple):
    """One pair of arrays (B, K, S, Dh) a layer, and the number of positions filled in each row, (B,) int32."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array
    spans: jax.Array
    """(B,) int32: the sequence length that a dynamic RoPE scaling goes by. It holds for the whole generation: keys that were rotated for one length
    do not fit queries that are rotated for another."""


class CrossCache(NamedTuple):
    """A decoder's own cache, and the memory's keys and values (B, K, S, Dh) a layer with their lengths (B,)."""

    own: KVCache
    memory_keys: tuple[jax.Array, ...]
    memory_values: tuple[jax.Array, ...]
    memory_lengths: jax.Array


def init_cache(config: TransformerConfig, batch: int, size: int | None = None, spans: jax.Array | None = None) -> KVCache:
    """An empty cache of `size` positions (default max_len) in the compute dtype. Raises InputError when size exceeds max_len."""
    size = config.max_len if size is None else size
    require(1 <= size <= config.max_len, "size", size, f"must lie in [1, max_len = {config.max_len}]")
    shape = (batch, config.kv_heads, size, config.head_dim)

    def empty() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, config.dtype) for _ in range(config.num_layers))

    return KVCache(empty(), empty(), jnp.zeros(batch, jnp.int32), jnp.full(batch, size, jnp.int32) if spans is None else spans)
