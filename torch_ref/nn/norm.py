"""Normalisation over the width of the model."""

from typing import Any

import torch
from torch import Tensor, nn

from torch_ref.nn.linear import dtype_of


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm with statistics in float32 or better and the result in the configuration's compute dtype."""

    def __init__(self, config: Any):
        super().__init__(config.d_model, eps=config.norm_eps, dtype=dtype_of(config.param_dtype))
        self.compute_dtype = dtype_of(config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = nn.functional.layer_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.bias.to(wide), self.eps)
        return y.to(self.compute_dtype)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm with statistics in float32 or better and the result in the configuration's compute dtype."""

    def __init__(self, config: Any):
        super().__init__(config.d_model, eps=config.norm_eps, dtype=dtype_of(config.param_dtype))
        self.compute_dtype = dtype_of(config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = nn.functional.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps)
        return y.to(self.compute_dtype)


def norm(config: Any) -> LayerNorm | RMSNorm:
    """The norm that `config.norm` names, over D, statistics in float32 or better.

    'layer_norm': (x - mean) / √(var + eps) · weight + bias (Ba et al. 2016). 'rms_norm': x / √(mean(x²) + eps) · weight (Zhang & Sennrich 2019).
    """
    return RMSNorm(config) if config.norm == "rms_norm" else LayerNorm(config)
