"""TinyTransformer: a post-LN encoder that classifies a sequence."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_gpt.config import EncoderConfig
from flax_gpt.models.inputs import check_inputs
from flax_gpt.nn.block import PostLNBlock
from flax_gpt.nn.linear import embedding, linear
from flax_gpt.nn.positions import SinusoidalPositions


class TinyTransformer(nnx.Module):
    """Embedding + sinusoidal positions, N bidirectional post-LN blocks, the mean over positions, a linear head."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.token_embed = embedding(config, rngs=rngs)
        self.positions = SinusoidalPositions(config)
        self.blocks = nnx.List([PostLNBlock(config, f"blocks.{i}", rngs=rngs) for i in range(config.num_layers)])
        self.head = linear(config, config.d_model, config.num_classes, use_bias=True, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, *, lengths: jax.Array | None = None, return_attention: bool = False
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """Logits (B, C) and, on request, one map (B, H, T, T) a layer.

        tokens (B, T) integers; lengths (B,): tokens from there on are padding, neither attended to nor averaged.
        Raises InputError for what `check_inputs` refuses.
        """
        check_inputs(self.config, tokens, lengths)
        x = self.positions(self.token_embed(tokens))
        maps: list[Any] = []
        for block in self.blocks:
            x, weights = block(x, lengths=lengths, return_attention=return_attention)
            maps.append(weights)
        return self.head(mean_over_tokens(x, lengths)), tuple(maps) if return_attention else None


def mean_over_tokens(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """x (B, T, D) → its mean over the first lengths[b] positions (B, D); 0 where there are none."""
    if lengths is None:
        return x.mean(axis=1)
    real = jnp.arange(x.shape[1])[None, :, None] < lengths[:, None, None]
    return jnp.where(real, x, jnp.zeros_like(x)).sum(axis=1) / jnp.maximum(lengths, 1)[:, None].astype(x.dtype)
