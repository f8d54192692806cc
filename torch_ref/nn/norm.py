"""Layer normalisation."""

from typing import Any

import torch
from torch import nn

from torch_ref.nn.linear import dtype_of


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm with statistics in float32 or better and the result in the configuration's compute dtype."""

    def __init__(self, config: Any):
        super().__init__(config.d_model, eps=config.norm_eps, dtype=dtype_of(config.param_dtype))
        self.compute_dtype = dtype_of(config.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = nn.functional.layer_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.bias.to(wide), self.eps)
        return y.to(self.compute_dtype)


def layer_norm(config: Any) -> LayerNorm:
    """(x - mean) / √(var + eps) · weight + bias over D (Ba et al. 2016), statistics in float32 or better."""
    return LayerNorm(config)
