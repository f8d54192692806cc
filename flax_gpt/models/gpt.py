"""MiniGPT: a decoder-only Transformer with tied embeddings."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_gpt.config import GPTConfig
from flax_gpt.generation.cache import KVCache
from flax_gpt.models.inputs import check_inputs
from flax_gpt.nn.block import PreLNBlock
from flax_gpt.nn.dropout import DropoutStream, dropout
from flax_gpt.nn.linear import embedding
from flax_gpt.nn.norm import layer_norm
from flax_gpt.nn.positions import SinusoidalPositions


class MiniGPT(nnx.Module):
    """Token embedding × √D + sinusoidal positions, dropout, N causal pre-LN blocks, LayerNorm, and the embedding again as the head."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.token_embed = embedding(config, rngs=rngs)
        self.positions = SinusoidalPositions(config)
        self.blocks = nnx.List([PreLNBlock(config, f"blocks.{i}", rngs=rngs) for i in range(config.num_layers)])
        self.final_norm = layer_norm(config, rngs=rngs)
        self.dropout = DropoutStream(rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        lengths: jax.Array | None = None,
        positions: jax.Array | None = None,
        return_attention: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """Logits (B, T, V) and, on request, one map (B, H, T, T) a layer, taken before dropout.

        tokens (B, T) integers; lengths (B,): tokens from there on are padding, hidden from every query; positions (B, T), default 0 … T - 1.
        Raises InputError for what `check_inputs` refuses.
        """
        check_inputs(self.config, tokens, lengths, positions)
        draw = self.dropout.draw()
        x = dropout(self.embed(tokens, positions), self.config.dropout, draw, "embedding")
        maps: list[Any] = []
        for block in self.blocks:
            x, weights = block(x, lengths=lengths, draw=draw, return_attention=return_attention)
            maps.append(weights)
        self.dropout.advance()
        return self.head(x), tuple(maps) if return_attention else None

    def step(self, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Logits (B, T, V) of tokens (B, T) appended to the cache, and the longer cache; never drops out.

        The caller keeps lengths + T within the cache's size and max_len: a traced position beyond them is clamped.
        """
        x = self.embed(tokens, cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None])
        keys, values = list(cache.keys), list(cache.values)
        for i, block in enumerate(self.blocks):
            x, keys[i], values[i] = block.step(x, keys[i], values[i], cache.lengths)
        return self.head(x), KVCache(tuple(keys), tuple(values), cache.lengths + tokens.shape[1])

    def embed(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """tokens (B, T) → (B, T, D)."""
        return self.positions(self.token_embed(tokens) * math.sqrt(self.config.d_model), positions)

    def head(self, x: jax.Array) -> jax.Array:
        """(B, T, D) → logits (B, T, V)."""
        return self.token_embed.attend(self.final_norm(x))
