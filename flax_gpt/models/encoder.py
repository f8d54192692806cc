"""TinyTransformer: an encoder that classifies a sequence."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_gpt.config import EncoderConfig
from flax_gpt.models.inputs import check_inputs
from flax_gpt.nn.block import Block
from flax_gpt.nn.dropout import DropoutStream, dropout
from flax_gpt.nn.linear import embedding, linear
from flax_gpt.nn.norm import norm
from flax_gpt.nn.positions import added_positions
from flax_gpt.nn.rotary import RotaryPositions


class TinyTransformer(nnx.Module):
    """Embedding + positions, N bidirectional blocks, the mean over positions, a linear head."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.token_embed = embedding(config, config.vocab_size, rngs=rngs)
        self.positions = added_positions(config, rngs=rngs)
        self.rotary = RotaryPositions(config) if config.positions.startswith("rope") else None
        self.blocks = nnx.List([Block(config, f"blocks.{i}", causal=False, rngs=rngs) for i in range(config.num_layers)])
        self.final_norm = norm(config, rngs=rngs) if config.norm_placement == "pre" else None
        self.head = linear(config, config.d_model, config.num_classes, use_bias=True, rngs=rngs)
        self.dropout = DropoutStream(rngs=rngs)

    def __call__(
        self, tokens: jax.Array, *, lengths: jax.Array | None = None, return_attention: bool = False
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """Logits (B, C) and, on request, one map (B, H, T, T) a layer.

        tokens (B, T) integers; lengths (B,): tokens from there on are padding, neither attended to nor averaged.
        Raises InputError for what `check_inputs` refuses.
        """
        check_inputs(self.config, tokens, lengths)
        draw = self.dropout.draw()
        rotation = None if self.rotary is None else self.rotary(tokens.shape[1], span=lengths)
        x = self.token_embed(tokens)
        x = x * math.sqrt(self.config.d_model) if self.config.scale_embeddings else x
        x = x if self.positions is None else self.positions(x)
        x = dropout(x, self.config.dropout, draw, "embedding")
        maps: list[Any] = []
        for block in self.blocks:
            x, weights = block(x, lengths=lengths, rotation=rotation, draw=draw, return_attention=return_attention)
            maps.append(weights)
        x = x if self.final_norm is None else self.final_norm(x)
        self.dropout.advance()
        return self.head(mean_over_tokens(x, lengths)), tuple(maps) if return_attention else None


def mean_over_tokens(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """x (B, T, D) → its mean over the first lengths[b] positions (B, D); 0 where there are none."""
    if lengths is None:
        return x.mean(axis=1)
    real = jnp.arange(x.shape[1])[None, :, None] < lengths[:, None, None]
    return jnp.where(real, x, jnp.zeros_like(x)).sum(axis=1) / jnp.maximum(lengths, 1)[:, None].astype(x.dtype)
