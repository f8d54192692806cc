"""MiniGPT: a decoder-only Transformer with tied embeddings."""

import math
from typing import Any

from torch import Tensor, nn

from flax_gpt.config import GPTConfig
from torch_ref.models.inputs import check_inputs
from torch_ref.nn.block import PreLNBlock
from torch_ref.nn.dropout import DropoutStream, dropout
from torch_ref.nn.linear import embedding
from torch_ref.nn.norm import layer_norm
from torch_ref.nn.positions import SinusoidalPositions
from torch_ref.weights.tree import speak_file_names


class MiniGPT(nn.Module):
    """Token embedding × √D + sinusoidal positions, dropout, N causal pre-LN blocks, LayerNorm, and the embedding again as the head."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token_embed = embedding(config)
        self.positions = SinusoidalPositions(config)
        self.blocks = nn.ModuleList([PreLNBlock(config, f"blocks.{i}") for i in range(config.num_layers)])
        self.final_norm = layer_norm(config)
        self.dropout = DropoutStream()
        speak_file_names(self)

    def forward(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | None = None,
        positions: Tensor | None = None,
        return_attention: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Logits (B, T, V) and, on request, one map (B, H, T, T) a layer, taken before dropout.

        tokens (B, T) integers; lengths (B,): tokens from there on are padding, hidden from every query; positions (B, T), default 0 … T - 1.
        Raises InputError for what `check_inputs` refuses.
        """
        check_inputs(self.config, tokens, lengths, positions)
        draw = self.dropout.draw()
        x = dropout(self.embed(tokens, positions), self.config.dropout, draw, "embedding")
        maps: list[Any] = []
        for block in self.blocks:
            x, weights = block(x, lengths=lengths, draw=draw, return_attention=return_attention)
            maps.append(weights)
        self.dropout.advance()
        return self.head(x), tuple(maps) if return_attention else None

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """tokens (B, T) → (B, T, D)."""
        return self.positions(self.token_embed(tokens) * math.sqrt(self.config.d_model), positions)

    def head(self, x: Tensor) -> Tensor:
        """(B, T, D) → logits (B, T, V)."""
        return self.token_embed.attend(self.final_norm(x))
