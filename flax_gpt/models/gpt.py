"""MiniGPT: a decoder-only Transformer with tied embeddings."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_gpt.config import GPTConfig
from flax_gpt.errors import require
from flax_gpt.generation.cache import KVCache
from flax_gpt.models.inputs import check_inputs
from flax_gpt.nn.block import Block
from flax_gpt.nn.dropout import DropoutStream, dropout
from flax_gpt.nn.linear import embedding, logits
from flax_gpt.nn.norm import norm
from flax_gpt.nn.positions import added_positions
from flax_gpt.nn.rotary import RotaryPositions, Rotation


class MiniGPT(nnx.Module):
    """Token embedding × √D + positions, dropout, N causal blocks, a final norm, and the embedding again as the head.

    `causal=False` lets every position see what follows it, the very token that it has to predict: for experiments.leak alone.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs, causal: bool = True):
        self.config, self.causal = config, causal
        self.token_embed = embedding(config, config.vocab_size, rngs=rngs)
        self.positions = added_positions(config, rngs=rngs)
        self.rotary = RotaryPositions(config) if config.positions.startswith("rope") else None
        self.blocks = nnx.List([Block(config, f"blocks.{i}", causal=causal, rngs=rngs) for i in range(config.num_layers)])
        self.final_norm = norm(config, rngs=rngs) if config.norm_placement == "pre" else None
        self.dropout = DropoutStream(rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        lengths: jax.Array | None = None,
        positions: jax.Array | None = None,
        span: jax.Array | int | None = None,
        return_attention: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """Logits (B, T, V) and, on request, one map (B, H, T, T) a layer, taken before dropout.

        tokens (B, T) integers; lengths (B,): tokens from there on are padding, hidden from every query; positions (B, T), default 0 … T - 1;
        span, an integer or (B,): the sequence length that a dynamic RoPE scaling goes by, default lengths, or T.
        Raises InputError for what `check_inputs` refuses.
        """
        check_inputs(self.config, tokens, lengths, positions, span)
        draw = self.dropout.draw()
        rotation = self.rotation(tokens.shape[1], positions, lengths if span is None else span)
        x = dropout(self.embed(tokens, positions), self.config.dropout, draw, "embedding")
        maps: list[Any] = []
        for block in self.blocks:
            x, weights = block(x, lengths=lengths, rotation=rotation, draw=draw, return_attention=return_attention)
            maps.append(weights)
        self.dropout.advance()
        return self.head(x), tuple(maps) if return_attention else None

    def step(self, tokens: jax.Array, cache: KVCache, *, empty: bool = False) -> tuple[jax.Array, KVCache]:
        """Logits (B, T, V) of tokens (B, T) appended to the cache, and the longer cache; never drops out.

        The caller keeps lengths + T within the cache's size and max_len: a traced position beyond them is clamped. `empty`: the caller knows that the
        cache holds nothing yet, which makes a long prompt cheaper.
        Raises InputError for a model that is not causal: a new token would change the keys that the cache holds.
        """
        require(self.causal, "causal", self.causal, "must be True: only a causal model can be read with a cache")
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        rotation = self.rotation(tokens.shape[1], positions, cache.spans)
        x = self.embed(tokens, positions)
        keys, values = list(cache.keys), list(cache.values)
        for i, block in enumerate(self.blocks):
            x, keys[i], values[i] = block.step(x, keys[i], values[i], cache.lengths, rotation, empty=empty)
        return self.head(x), cache._replace(keys=tuple(keys), values=tuple(values), lengths=cache.lengths + tokens.shape[1])

    def embed(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """tokens (B, T) → (B, T, D), added positions included."""
        x = self.token_embed(tokens)
        x = x * math.sqrt(self.config.d_model) if self.config.scale_embeddings else x
        return x if self.positions is None else self.positions(x, positions)

    def rotation(self, length: int, positions: jax.Array | None, span: jax.Array | int | None) -> Rotation | None:
        """What rotates queries and keys; None without RoPE."""
        return None if self.rotary is None else self.rotary(length, positions, span)

    def head(self, x: jax.Array) -> jax.Array:
        """(B, T, D) → logits (B, T, V)."""
        return logits(self.token_embed, x if self.final_norm is None else self.final_norm(x))
