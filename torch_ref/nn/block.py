"""Transformer blocks: residual sublayers with the norm before or after."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from flax_gpt.config import TransformerConfig
from torch_ref.nn.attention import MultiHeadAttention
from torch_ref.nn.dropout import Draw, dropout
from torch_ref.nn.feed_forward import FeedForward
from torch_ref.nn.norm import norm
from torch_ref.nn.rotary import Rotation

Maps = Tensor | None


class Residual(nn.Module):
    """How a block adds a sublayer f. Pre-LN: x + drop(f(norm(x))) (Xiong et al. 2020); post-LN: norm(x + drop(f(x))) (Vaswani et al. 2017)."""

    def __init__(self, config: TransformerConfig, place: str):
        super().__init__()
        self.placement, self.rate, self.place = config.norm_placement, config.dropout, place

    def add(self, x: Tensor, norm: nn.Module, f: Callable[..., Any], draw: Draw | None = None, place: str = "") -> tuple[Tensor, Any]:
        """x (B, T, D) → x with f's first result added, and the rest of f's results."""
        y, rest = f(norm(x) if self.placement == "pre" else x)
        x = x + dropout(y, self.rate, draw, f"{self.place}.{place}")
        return x if self.placement == "pre" else norm(x), rest


class Block(Residual):
    """Self-attention and feed-forward: a layer of an encoder, or, causal, of a decoder-only model."""

    def __init__(self, config: TransformerConfig, place: str, *, causal: bool):
        super().__init__(config, place)
        self.causal = causal
        self.norm1 = norm(config)
        self.attention = MultiHeadAttention(config, f"{place}.attention")
        self.norm2 = norm(config)
        self.feed_forward = FeedForward(config, f"{place}.feed_forward")

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | None = None,
        rotation: Rotation | None = None,
        draw: Draw | None = None,
        return_attention: bool = False,
    ) -> tuple[Tensor, Maps]:
        """x (B, T, D) → (B, T, D) and, on request, the maps (B, H, T, T)."""

        def attention(x: Tensor) -> tuple[Tensor, Maps]:
            return self.attention(x, causal=self.causal, lengths=lengths, rotation=rotation, draw=draw, return_attention=return_attention)

        x, maps = self.add(x, self.norm1, attention, draw, "residual1")
        x, _ = self.add(x, self.norm2, lambda x: (self.feed_forward(x, draw), None), draw, "residual2")
        return x, maps


class DecoderBlock(Residual):
    """Causal self-attention, cross-attention to an encoder's output, feed-forward (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: TransformerConfig, place: str):
        super().__init__(config, place)
        self.norm1 = norm(config)
        self.attention = MultiHeadAttention(config, f"{place}.attention")
        self.norm2 = norm(config)
        self.cross_attention = MultiHeadAttention(config, f"{place}.cross_attention")
        self.norm3 = norm(config)
        self.feed_forward = FeedForward(config, f"{place}.feed_forward")

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        lengths: Tensor | None = None,
        memory_lengths: Tensor | None = None,
        rotation: Rotation | None = None,
        draw: Draw | None = None,
        return_attention: bool = False,
    ) -> tuple[Tensor, Maps, Maps]:
        """x (B, T, D), memory (B, S, D) → (B, T, D) and, on request, the maps (B, H, T, T) and (B, H, T, S)."""

        def attention(x: Tensor) -> tuple[Tensor, Maps]:
            return self.attention(x, causal=True, lengths=lengths, rotation=rotation, draw=draw, return_attention=return_attention)

        def cross(x: Tensor) -> tuple[Tensor, Maps]:
            return self.cross_attention(x, memory, lengths=memory_lengths, draw=draw, return_attention=return_attention)

        x, maps = self.add(x, self.norm1, attention, draw, "residual1")
        x, cross_maps = self.add(x, self.norm2, cross, draw, "residual2")
        x, _ = self.add(x, self.norm3, lambda x: (self.feed_forward(x, draw), None), draw, "residual3")
        return x, maps, cross_maps
