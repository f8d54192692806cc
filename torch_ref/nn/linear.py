"""Linear layers and embeddings with the two named initialisations."""

from typing import Any

import torch
from torch import nn

from flax_gpt.config import INIT_STD


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of a configuration's name, such as 'float32'."""
    return getattr(torch, name)


class Linear(nn.Linear):
    """nn.Linear that computes in the configuration's dtype while its parameters keep theirs."""

    def __init__(self, config: Any, in_features: int, out_features: int, *, bias: bool):
        super().__init__(in_features, out_features, bias=bias, dtype=dtype_of(config.param_dtype))
        self.std: float | None = None  # of the normal initialisation; None for torch's own
        self.compute_dtype = dtype_of(config.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return nn.functional.linear(x.to(self.compute_dtype), self.weight.to(self.compute_dtype), bias)


def linear(config: Any, in_features: int, out_features: int, *, use_bias: bool, to_residual: bool = False) -> Linear:
    """x Wᵀ + b with W (out_features, in_features).

    'scaled': W ~ N(0, 0.02²), or N(0, 0.02² / 2N) for a projection that writes to the residual stream, b = 0 (Radford et al. 2019, section 2.3).
    'torch': W and b uniform within ±1/√in_features, as nn.Linear draws them.
    """
    layer = Linear(config, in_features, out_features, bias=use_bias)
    if config.init == "scaled":
        layer.std = config.residual_std if to_residual else INIT_STD
        nn.init.normal_(layer.weight, std=layer.std)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return layer


class Embedding(nn.Embedding):
    """nn.Embedding read in the configuration's compute dtype, and used again as a head."""

    def __init__(self, config: Any, size: int):
        super().__init__(size, config.d_model, dtype=dtype_of(config.param_dtype))
        self.std = INIT_STD if config.init == "scaled" else 1.0  # of the normal initialisation
        self.compute_dtype = dtype_of(config.dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens.long()).to(self.compute_dtype)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, D) → x Eᵀ (B, T, V)."""
        return nn.functional.linear(x, self.weight.to(self.compute_dtype))


def embedding(config: Any, size: int) -> Embedding:
    """A table (size, D): N(0, 0.02²) when 'scaled', N(0, 1) when 'torch', as nn.Embedding draws it."""
    layer = Embedding(config, size)
    if config.init == "scaled":
        nn.init.normal_(layer.weight, std=layer.std)
    return layer
