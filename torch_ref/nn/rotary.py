"""Rotary positions (Su et al. 2021) in the two layouts that are in use."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flax_gpt.config import TransformerConfig
from flax_gpt.nn import rope_tables
from torch_ref.nn.linear import dtype_of


class Rotation(NamedTuple):
    """cos and sin (1 or B, T, Dh/2) of the angles of each position and pair."""

    cos: Tensor
    sin: Tensor


class RotaryPositions(nn.Module):
    """Gives the rotation of a sequence. Angles are computed in float64 on the host and rounded once to max(float32, compute dtype)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config

    def forward(self, length: int, positions: Tensor | None = None, span: Tensor | int | None = None) -> Rotation:
        """The rotation at positions 0 … length - 1, or at `positions` (B, T).

        `span` is the sequence length that sets a dynamic scaling's factor, one for all or (B,); by default `length`. Other scalings ignore it.
        """
        config = self.config
        dtype = torch.promote_types(dtype_of(config.dtype), torch.float32)
        span = span if config.rope.scaling in rope_tables.DYNAMIC else None
        if isinstance(span, Tensor):
            where = torch.arange(length)[None] if positions is None else positions
            return _dynamic(config, where, span.expand(span.numel()), dtype)
        size = length if positions is None else config.max_len
        cos, sin = (torch.from_numpy(table).to(dtype) for table in rope_tables.tables(config, size, span or length))
        return Rotation(cos[None], sin[None]) if positions is None else Rotation(cos[positions], sin[positions])


def rotate_half(x: Tensor, rotation: Rotation) -> Tensor:
    """x (B, T, H, Dh) with the pair (x[i], x[i + Dh/2]) turned: x·cos + rotate_half(x)·sin, the layout of LLaMA and Qwen checkpoints."""
    cos, sin = (table.to(x.device)[:, :, None, :] for table in rotation)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rotate_interleaved(x: Tensor, rotation: Rotation) -> Tensor:
    """x (B, T, H, Dh) with the pair (x[2i], x[2i + 1]) turned: a complex number times e^{imθ} (Su et al. 2021, equation 12)."""
    cos, sin = (table.to(x.device)[:, :, None, :] for table in rotation)
    first, second = x[..., 0::2].to(cos.dtype), x[..., 1::2].to(cos.dtype)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).reshape(x.shape).to(x.dtype)


ROTATE = {"rope_half": rotate_half, "rope_interleaved": rotate_interleaved}


def _dynamic(config: TransformerConfig, positions: Tensor, span: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation for a span of each row, (B,): one table a row, in float64, rounded once."""
    frequencies = [torch.from_numpy(rope_tables.inverse_frequencies(config, max(int(length), 1))) for length in span]
    angles = positions.double()[:, :, None] * torch.stack(frequencies)[:, None]
    factor = rope_tables.attention_factor(config)
    return Rotation((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))
