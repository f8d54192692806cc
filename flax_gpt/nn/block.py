"""Transformer blocks: residual sublayers with the norm before or after."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_gpt.config import TransformerConfig
from flax_gpt.nn.attention import MultiHeadAttention
from flax_gpt.nn.dropout import Draw, dropout
from flax_gpt.nn.feed_forward import FeedForward
from flax_gpt.nn.norm import norm
from flax_gpt.nn.rotary import Rotation

Maps = jax.Array | None


class Residual(nnx.Module):
    """How a block adds a sublayer f. Pre-LN: x + drop(f(norm(x))) (Xiong et al. 2020); post-LN: norm(x + drop(f(x))) (Vaswani et al. 2017)."""

    def __init__(self, config: TransformerConfig, place: str):
        self.placement, self.rate, self.place = config.norm_placement, config.dropout, place

    def add(self, x: jax.Array, norm: nnx.Module, f: Callable[..., Any], draw: Draw | None = None, place: str = "") -> tuple[jax.Array, Any]:
        """x (B, T, D) → x with f's first result added, and the rest of f's results."""
        # The copy, which a compiled program does not make, sums what the norm sends back before the residual stream's own gradient is added: XLA then
        # keeps that sum, where one that ends in a broadcast is computed anew by all that reads it, in ever longer chains (docs/performance.md).
        y, rest = f(norm(jnp.copy(x)) if self.placement == "pre" else x)
        x = x + dropout(y, self.rate, draw, f"{self.place}.{place}")
        return x if self.placement == "pre" else norm(x), rest


class Block(Residual):
    """Self-attention and feed-forward: a layer of an encoder, or, causal, of a decoder-only model."""

    def __init__(self, config: TransformerConfig, place: str, *, causal: bool, rngs: nnx.Rngs):
        super().__init__(config, place)
        self.causal = causal
        self.norm1 = norm(config, rngs=rngs)
        self.attention = MultiHeadAttention(config, f"{place}.attention", rngs=rngs)
        self.norm2 = norm(config, rngs=rngs)
        self.feed_forward = FeedForward(config, f"{place}.feed_forward", rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        rotation: Rotation | None = None,
        draw: Draw | None = None,
        return_attention: bool = False,
    ) -> tuple[jax.Array, Maps]:
        """x (B, T, D) → (B, T, D) and, on request, the maps (B, H, T, T)."""

        def attention(x: jax.Array) -> tuple[jax.Array, Maps]:
            return self.attention(x, causal=self.causal, lengths=lengths, rotation=rotation, draw=draw, return_attention=return_attention)

        x, maps = self.add(x, self.norm1, attention, draw, "residual1")
        x, _ = self.add(x, self.norm2, lambda x: (self.feed_forward(x, draw), None), draw, "residual2")
        return x, maps

    def step(
        self, x: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array, rotation: Rotation | None = None, *, empty: bool = False
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The same without dropout, over a key/value cache; see MultiHeadAttention.step."""

        def attention(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            y, new_keys, new_values = self.attention.step(x, keys, values, lengths, rotation, empty=empty)
            return y, (new_keys, new_values)

        x, caches = self.add(x, self.norm1, attention)
        x, _ = self.add(x, self.norm2, lambda x: (self.feed_forward(x), None))
        return x, caches[0], caches[1]


class DecoderBlock(Residual):
    """Causal self-attention, cross-attention to an encoder's output, feed-forward (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: TransformerConfig, place: str, *, rngs: nnx.Rngs):
        super().__init__(config, place)
        self.norm1 = norm(config, rngs=rngs)
        self.attention = MultiHeadAttention(config, f"{place}.attention", rngs=rngs)
        self.norm2 = norm(config, rngs=rngs)
        self.cross_attention = MultiHeadAttention(config, f"{place}.cross_attention", rngs=rngs)
        self.norm3 = norm(config, rngs=rngs)
        self.feed_forward = FeedForward(config, f"{place}.feed_forward", rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array,
        *,
        lengths: jax.Array | None = None,
        memory_lengths: jax.Array | None = None,
        rotation: Rotation | None = None,
        draw: Draw | None = None,
        return_attention: bool = False,
    ) -> tuple[jax.Array, Maps, Maps]:
        """x (B, T, D), memory (B, S, D) → (B, T, D) and, on request, the maps (B, H, T, T) and (B, H, T, S)."""

        def attention(x: jax.Array) -> tuple[jax.Array, Maps]:
            return self.attention(x, causal=True, lengths=lengths, rotation=rotation, draw=draw, return_attention=return_attention)

        def cross(x: jax.Array) -> tuple[jax.Array, Maps]:
            return self.cross_attention(x, memory, lengths=memory_lengths, draw=draw, return_attention=return_attention)

        x, maps = self.add(x, self.norm1, attention, draw, "residual1")
        x, cross_maps = self.add(x, self.norm2, cross, draw, "residual2")
        x, _ = self.add(x, self.norm3, lambda x: (self.feed_forward(x, draw), None), draw, "residual3")
        return x, maps, cross_maps

    def step(
        self,
        x: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        lengths: jax.Array,
        memory: tuple[jax.Array, jax.Array],
        memory_lengths: jax.Array | None,
        rotation: Rotation | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The same without dropout, over a key/value cache and the memory's keys and values (B, K, S, Dh), which are computed once."""

        def attention(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            y, new_keys, new_values = self.attention.step(x, keys, values, lengths, rotation)
            return y, (new_keys, new_values)

        x, caches = self.add(x, self.norm1, attention)
        x, _ = self.add(x, self.norm2, lambda x: (self.cross_attention.read(x, *memory, memory_lengths), None))
        x, _ = self.add(x, self.norm3, lambda x: (self.feed_forward(x), None))
        return x, caches[0], caches[1]
