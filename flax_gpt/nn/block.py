"""Transformer blocks."""

import jax
from flax import nnx

from flax_gpt.config import EncoderConfig, GPTConfig
from flax_gpt.nn.attention import MultiHeadAttention
from flax_gpt.nn.dropout import Draw, dropout
from flax_gpt.nn.feed_forward import FeedForward
from flax_gpt.nn.norm import layer_norm


class PreLNBlock(nnx.Module):
    """x + drop(attn(LN(x))); x + drop(ffn(LN(x))), causal (Xiong et al. 2020, figure 1b)."""

    def __init__(self, config: GPTConfig, place: str, *, rngs: nnx.Rngs):
        self.norm1 = layer_norm(config, rngs=rngs)
        self.attention = MultiHeadAttention(
            config,
            f"{place}.attention",
            use_bias=False,
            dropout_rate=config.attention_dropout,
            output_dropout=config.dropout if config.double_attention_dropout else 0.0,
            rngs=rngs,
        )
        self.norm2 = layer_norm(config, rngs=rngs)
        self.feed_forward = FeedForward(config, f"{place}.feed_forward", activation="gelu_exact", dropout_rate=config.dropout, rngs=rngs)
        self.rate, self.place = config.dropout, place

    def __call__(
        self, x: jax.Array, *, lengths: jax.Array | None = None, draw: Draw | None = None, return_attention: bool = False
    ) -> tuple[jax.Array, jax.Array | None]:
        """x (B, T, D) → (B, T, D) and, on request, the maps (B, H, T, T)."""
        y, weights = self.attention(self.norm1(x), causal=True, lengths=lengths, draw=draw, return_attention=return_attention)
        x = x + dropout(y, self.rate, draw, f"{self.place}.residual1")
        y = self.feed_forward(self.norm2(x), draw)
        return x + dropout(y, self.rate, draw, f"{self.place}.residual2"), weights

    def step(self, x: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The same without dropout, over a key/value cache; see MultiHeadAttention.step."""
        y, keys, values = self.attention.step(self.norm1(x), keys, values, lengths)
        x = x + y
        return x + self.feed_forward(self.norm2(x)), keys, values


class PostLNBlock(nnx.Module):
    """LN(x + attn(x)); LN(x + ffn(x)), bidirectional (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: EncoderConfig, place: str, *, rngs: nnx.Rngs):
        self.attention = MultiHeadAttention(config, f"{place}.attention", use_bias=True, rngs=rngs)
        self.norm1 = layer_norm(config, rngs=rngs)
        self.feed_forward = FeedForward(config, f"{place}.feed_forward", activation="relu", rngs=rngs)
        self.norm2 = layer_norm(config, rngs=rngs)

    def __call__(self, x: jax.Array, *, lengths: jax.Array | None = None, return_attention: bool = False) -> tuple[jax.Array, jax.Array | None]:
        """x (B, T, D) → (B, T, D) and, on request, the maps (B, H, T, T)."""
        y, weights = self.attention(x, lengths=lengths, return_attention=return_attention)
        x = self.norm1(x + y)
        return self.norm2(x + self.feed_forward(x)), weights
