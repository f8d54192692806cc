"""Attention with shared projections: what is left when queries, keys and values are no longer three. Mirrors `flax_gpt/nn/sharing.py`."""

from typing import Any

import torch
from torch import Tensor

from flax_gpt.errors import require
from torch_ref.nn.attention import MultiHeadAttention
from torch_ref.nn.rotary import Rotation


class SeparateAttention(MultiHeadAttention):
    """Q = x W_Q, K = x W_K, V = x W_V: 4 D² weights with the output map, without biases and with as many key/value heads as heads."""


class SharedKeyValueAttention(MultiHeadAttention):
    """K = V = x W_K: 3 D² weights. RoPE turns the keys alone."""

    def __init__(self, config: Any, place: str):
        super().__init__(config, place)
        del self.value

    def keys_values(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        """x (B, S, D) → keys, rotated, and the same not rotated, each (B, S, K, Dh)."""
        shared = split_heads(self.key(x), self.kv_heads)
        return self._rotate(shared, rotation), shared


class SharedQueryKeyAttention(MultiHeadAttention):
    """Q = K = x W_Q: 3 D² weights, symmetric scores. Raises InputError unless there are as many key/value heads as heads."""

    def __init__(self, config: Any, place: str):
        _require_equal_heads(config)
        super().__init__(config, place)
        del self.key

    def keys_values(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        """x (B, S, D) → the queries' projection, rotated, and values, each (B, S, H, Dh)."""
        return self.queries(x, rotation), split_heads(self.value(x), self.kv_heads)


class UnprojectedAttention(MultiHeadAttention):
    """Q = K = V = x, cut into heads: D² weights, those of the output map; symmetric scores. Raises InputError as SharedQueryKeyAttention."""

    def __init__(self, config: Any, place: str):
        _require_equal_heads(config)
        super().__init__(config, place)
        del self.query, self.key, self.value

    def queries(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """x (B, T, D) → (B, T, H, Dh), rotated."""
        return self._rotate(split_heads(x, self.num_heads), rotation)

    def keys_values(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        """x (B, S, D) → itself twice, (B, S, H, Dh), the first rotated."""
        return self.queries(x, rotation), split_heads(x, self.num_heads)


SHARING: dict[str, type[MultiHeadAttention]] = {
    "separate": SeparateAttention,
    "key_value": SharedKeyValueAttention,
    "query_key": SharedQueryKeyAttention,
    "none": UnprojectedAttention,
}


def share(model: Any, sharing: str) -> None:
    """Puts attention of the kind `sharing` (a name in SHARING) into every block of a MiniGPT or TinyTransformer, with fresh weights, in place."""
    require(sharing in SHARING, "sharing", sharing, f"must be one of {', '.join(SHARING)}")
    for block in model.blocks:
        block.attention = SHARING[sharing](model.config, block.attention.place)


def scores(attention: MultiHeadAttention, x: Tensor, rotation: Rotation | None = None) -> Tensor:
    """Q Kᵀ / √Dh of x (B, T, D) before any mask: (B, H, T, T)."""
    q, (k, _) = attention.queries(x, rotation), attention.keys_values(x, rotation)
    k = torch.repeat_interleave(k, attention.num_heads // attention.kv_heads, dim=2)
    return torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5


def symmetry(matrices: Tensor) -> Tensor:
    """Share of the squared size of matrices (…, T, T) that lies in their symmetric part: 1 symmetric, 0 antisymmetric, near ½ neither. Mean over …"""
    even = (matrices + matrices.transpose(-1, -2)) / 2
    return torch.mean((even * even).sum(dim=(-2, -1)) / (matrices * matrices).sum(dim=(-2, -1)))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, H · Dh) → (B, T, H, Dh)."""
    return x.reshape(*x.shape[:2], heads, -1)


def _require_equal_heads(config: Any) -> None:
    same = config.kv_heads == config.num_heads
    require(same, "num_kv_heads", config.kv_heads, f"must equal num_heads = {config.num_heads} where queries and keys are the same")
