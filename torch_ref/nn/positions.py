"""Positions."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flax_gpt.errors import require
from torch_ref.nn.linear import dtype_of, embedding


def sinusoidal_table(length: int, d_model: int) -> np.ndarray:
    """pe[p, 2i] = sin(p / 10000^(2i/D)), pe[p, 2i+1] = cos(same angle): (length, d_model) float64 (Vaswani et al. 2017, section 3.5).

    Raises InputError for an odd d_model.
    """
    require(d_model % 2 == 0, "d_model", d_model, "must be even: sinusoidal positions fill pairs of columns")
    angles = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, d_model, 2) / d_model)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, d_model)


class LearnedPositions(nn.Module):
    """Adds a trained row for each position (Gehring et al. 2017; GPT-2 and BERT)."""

    def __init__(self, config: Any):
        super().__init__()
        self.embedding = embedding(config, config.max_len)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """x (B, T, D) plus the rows 0 … T - 1, or those at `positions` (B, T)."""
        rows = torch.arange(x.shape[1], device=x.device)[None] if positions is None else positions
        return x + self.embedding(rows)


class SinusoidalPositions(nn.Module):
    """Adds the sinusoidal table; computed in float64 on the host and rounded once to max(float32, compute dtype)."""

    table: Tensor

    def __init__(self, config: Any):
        super().__init__()
        dtype = torch.promote_types(dtype_of(config.dtype), torch.float32)
        self.register_buffer("table", torch.from_numpy(sinusoidal_table(config.max_len, config.d_model)).to(dtype)[None])

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """x (B, T, D) plus the rows 0 … T - 1, or those at `positions` (B, T)."""
        rows = self.table[:, : x.shape[1]] if positions is None else self.table[0][positions]
        return (x.to(self.table.dtype) + rows).to(x.dtype)


def added_positions(config: Any) -> LearnedPositions | SinusoidalPositions | None:
    """The positions that are added to the embedding; None where `config.positions` names another kind."""
    if config.positions == "learned":
        return LearnedPositions(config)
    return SinusoidalPositions(config) if config.positions == "sinusoidal" else None
