"""Attention modules."""

from typing import Any

from torch import Tensor, nn

from torch_ref.kernels.api import attend
from torch_ref.nn.dropout import Draw, attention_keys, dropout
from torch_ref.nn.linear import linear
from torch_ref.nn.rotary import ROTATE, Rotation


class SingleHeadAttention(nn.Module):
    """One head: bias-free projections D → Dh, softmax(Q Kᵀ / √Dh) V (Vaswani et al. 2017, section 3.2.1)."""

    def __init__(self, config: Any, head_dim: int):
        super().__init__()
        self.query = linear(config, config.d_model, head_dim, use_bias=False)
        self.key = linear(config, config.d_model, head_dim, use_bias=False)
        self.value = linear(config, config.d_model, head_dim, use_bias=False)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """x (B, T, D) → output (B, T, Dh) and map (B, T, T); mask (T, T) or (B, 1, T, T), True = may attend; options as in `attend`."""
        q, k, v = (project(x)[:, :, None, :] for project in (self.query, self.key, self.value))
        out, weights = attend(q, k, v, mask=mask, return_weights=True, **options)
        return out[:, :, 0], weights[:, 0]


class MultiHeadAttention(nn.Module):
    """H heads of width Dh = D / H over K key/value heads (Vaswani et al. 2017, section 3.2.2; K < H: Ainslie et al. 2023).

    Self-attention, or cross-attention when a memory is given.
    """

    def __init__(self, config: Any, place: str):
        super().__init__()
        self.num_heads, self.kv_heads = config.num_heads, config.kv_heads
        D, kv_width, use_bias = config.d_model, config.kv_heads * config.head_dim, config.attention_bias
        self.query = linear(config, D, D, use_bias=use_bias)
        self.key = linear(config, D, kv_width, use_bias=use_bias)
        self.value = linear(config, D, kv_width, use_bias=use_bias)
        self.output = linear(config, D, D, use_bias=use_bias, to_residual=True)
        self.layout, self.place = config.positions, place
        self.rate = config.attention_dropout
        self.output_rate = config.dropout if config.double_attention_dropout else 0.0

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        causal: bool = False,
        lengths: Tensor | None = None,
        rotation: Rotation | None = None,
        draw: Draw | None = None,
        return_attention: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
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

    def queries(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """x (B, T, D) → (B, T, H, Dh), rotated."""
        return self._rotate(_split(self.query(x), self.num_heads), rotation)

    def keys_values(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        """x (B, S, D) → keys, rotated, and values, each (B, S, K, Dh)."""
        return self._rotate(_split(self.key(x), self.kv_heads), rotation), _split(self.value(x), self.kv_heads)

    def merge(self, heads: Tensor) -> Tensor:
        """(B, T, H, Dh) → (B, T, D) through the output projection."""
        return self.output(heads.reshape(*heads.shape[:2], -1))

    def _rotate(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        return x if rotation is None else ROTATE[self.layout](x, rotation)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.reshape(*x.shape[:2], heads, -1)
