"""TinyTransformer: an encoder that classifies a sequence."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from flax_gpt.config import EncoderConfig
from torch_ref.models.inputs import check_inputs
from torch_ref.nn.block import Block
from torch_ref.nn.dropout import DropoutStream, dropout
from torch_ref.nn.linear import embedding, linear
from torch_ref.nn.norm import norm
from torch_ref.nn.positions import added_positions
from torch_ref.nn.rotary import RotaryPositions
from torch_ref.weights.tree import speak_file_names


class TinyTransformer(nn.Module):
    """Embedding + positions, N bidirectional blocks, the mean over positions, a linear head."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        self.token_embed = embedding(config, config.vocab_size)
        self.positions = added_positions(config)
        self.rotary = RotaryPositions(config) if config.positions.startswith("rope") else None
        self.blocks = nn.ModuleList([Block(config, f"blocks.{i}", causal=False) for i in range(config.num_layers)])
        self.final_norm = norm(config) if config.norm_placement == "pre" else None
        self.head = linear(config, config.d_model, config.num_classes, use_bias=True)
        self.dropout = DropoutStream()
        speak_file_names(self)

    def forward(self, tokens: Tensor, *, lengths: Tensor | None = None, return_attention: bool = False) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Logits (B, C) and, on request, one map (B, H, T, T) a layer.

        tokens (B, T) integers; lengths (B,): tokens from there on are padding, neither attended to nor averaged.
        Raises InputError for what `check_inputs` refuses.
        """
        check_inputs(self.config, tokens, lengths)
        draw = self.dropout.draw()
        rotation = None if self.rotary is None else self.rotary(tokens.shape[1], span=lengths)
        x = self.token_embed(tokens)
        x = x * math.sqrt(self.config.d_model) if self.config.scale_embeddings else x
        x = x if self.positions is None else self.positions(x)
        x = dropout(x, self.config.dropout, draw, "embedding")
        maps: list[Any] = []
        for block in self.blocks:
            x, weights = block(x, lengths=lengths, rotation=rotation, draw=draw, return_attention=return_attention)
            maps.append(weights)
        x = x if self.final_norm is None else self.final_norm(x)
        self.dropout.advance()
        return self.head(mean_over_tokens(x, lengths)), tuple(maps) if return_attention else None


def mean_over_tokens(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x (B, T, D) → its mean over the first lengths[b] positions (B, D); 0 where there are none."""
    if lengths is None:
        return x.mean(dim=1)
    real = torch.arange(x.shape[1], device=x.device)[None, :, None] < lengths[:, None, None]
    return torch.where(real, x, torch.zeros_like(x)).sum(dim=1) / lengths.clamp(min=1)[:, None].to(x.dtype)
