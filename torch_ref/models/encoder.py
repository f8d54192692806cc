"""TinyTransformer: a post-LN encoder that classifies a sequence."""

from typing import Any

import torch
from torch import Tensor, nn

from flax_gpt.config import EncoderConfig
from torch_ref.models.inputs import check_inputs
from torch_ref.nn.block import PostLNBlock
from torch_ref.nn.linear import embedding, linear
from torch_ref.nn.positions import SinusoidalPositions
from torch_ref.weights.tree import speak_file_names


class TinyTransformer(nn.Module):
    """Embedding + sinusoidal positions, N bidirectional post-LN blocks, the mean over positions, a linear head."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        self.token_embed = embedding(config)
        self.positions = SinusoidalPositions(config)
        self.blocks = nn.ModuleList([PostLNBlock(config, f"blocks.{i}") for i in range(config.num_layers)])
        self.head = linear(config, config.d_model, config.num_classes, use_bias=True)
        speak_file_names(self)

    def forward(self, tokens: Tensor, *, lengths: Tensor | None = None, return_attention: bool = False) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Logits (B, C) and, on request, one map (B, H, T, T) a layer.

        tokens (B, T) integers; lengths (B,): tokens from there on are padding, neither attended to nor averaged.
        Raises InputError for what `check_inputs` refuses.
        """
        check_inputs(self.config, tokens, lengths)
        x = self.positions(self.token_embed(tokens))
        maps: list[Any] = []
        for block in self.blocks:
            x, weights = block(x, lengths=lengths, return_attention=return_attention)
            maps.append(weights)
        return self.head(mean_over_tokens(x, lengths)), tuple(maps) if return_attention else None


def mean_over_tokens(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x (B, T, D) → its mean over the first lengths[b] positions (B, D); 0 where there are none."""
    if lengths is None:
        return x.mean(dim=1)
    real = torch.arange(x.shape[1], device=x.device)[None, :, None] < lengths[:, None, None]
    return torch.where(real, x, torch.zeros_like(x)).sum(dim=1) / lengths.clamp(min=1)[:, None].to(x.dtype)
