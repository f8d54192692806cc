"""Transformer blocks."""

from torch import Tensor, nn

from flax_gpt.config import EncoderConfig, GPTConfig
from torch_ref.nn.attention import MultiHeadAttention
from torch_ref.nn.dropout import Draw, dropout
from torch_ref.nn.feed_forward import FeedForward
from torch_ref.nn.norm import layer_norm


class PreLNBlock(nn.Module):
    """x + drop(attn(LN(x))); x + drop(ffn(LN(x))), causal (Xiong et al. 2020, figure 1b)."""

    def __init__(self, config: GPTConfig, place: str):
        super().__init__()
        self.norm1 = layer_norm(config)
        self.attention = MultiHeadAttention(
            config,
            f"{place}.attention",
            use_bias=False,
            dropout_rate=config.attention_dropout,
            output_dropout=config.dropout if config.double_attention_dropout else 0.0,
        )
        self.norm2 = layer_norm(config)
        self.feed_forward = FeedForward(config, f"{place}.feed_forward", activation="gelu_exact", dropout_rate=config.dropout)
        self.rate, self.place = config.dropout, place

    def forward(
        self, x: Tensor, *, lengths: Tensor | None = None, draw: Draw | None = None, return_attention: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """x (B, T, D) → (B, T, D) and, on request, the maps (B, H, T, T)."""
        y, weights = self.attention(self.norm1(x), causal=True, lengths=lengths, draw=draw, return_attention=return_attention)
        x = x + dropout(y, self.rate, draw, f"{self.place}.residual1")
        y = self.feed_forward(self.norm2(x), draw)
        return x + dropout(y, self.rate, draw, f"{self.place}.residual2"), weights


class PostLNBlock(nn.Module):
    """LN(x + attn(x)); LN(x + ffn(x)), bidirectional (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: EncoderConfig, place: str):
        super().__init__()
        self.attention = MultiHeadAttention(config, f"{place}.attention", use_bias=True)
        self.norm1 = layer_norm(config)
        self.feed_forward = FeedForward(config, f"{place}.feed_forward", activation="relu")
        self.norm2 = layer_norm(config)

    def forward(self, x: Tensor, *, lengths: Tensor | None = None, return_attention: bool = False) -> tuple[Tensor, Tensor | None]:
        """x (B, T, D) → (B, T, D) and, on request, the maps (B, H, T, T)."""
        y, weights = self.attention(x, lengths=lengths, return_attention=return_attention)
        x = self.norm1(x + y)
        return self.norm2(x + self.feed_forward(x)), weights
