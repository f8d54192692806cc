"""MiniGPT: a decoder-only Transformer with tied embeddings."""

import math
from typing import Any

from torch import Tensor, nn

from flax_gpt.config import GPTConfig
from torch_ref.models.inputs import check_inputs
from torch_ref.nn.block import Block
from torch_ref.nn.dropout import DropoutStream, dropout
from torch_ref.nn.linear import embedding
from torch_ref.nn.norm import norm
from torch_ref.nn.positions import added_positions
from torch_ref.nn.rotary import RotaryPositions, Rotation
from torch_ref.weights.tree import speak_file_names


class MiniGPT(nn.Module):
    """Token embedding × √D + positions, dropout, N causal blocks, a final norm, and the embedding again as the head.

    `causal=False` lets every position see what follows it, the very token that it has to predict: for experiments.leak alone.
    """

    def __init__(self, config: GPTConfig, *, causal: bool = True):
        super().__init__()
        self.config, self.causal = config, causal
        self.token_embed = embedding(config, config.vocab_size)
        self.positions = added_positions(config)
        self.rotary = RotaryPositions(config) if config.positions.startswith("rope") else None
        self.blocks = nn.ModuleList([Block(config, f"blocks.{i}", causal=causal) for i in range(config.num_layers)])
        self.final_norm = norm(config) if config.norm_placement == "pre" else None
        self.dropout = DropoutStream()
        speak_file_names(self)

    def forward(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | None = None,
        positions: Tensor | None = None,
        span: Tensor | int | None = None,
        return_attention: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Logits (B, T, V) and, on request, one map (B, H, T, T) a layer, taken before dropout.

        tokens (B, T) integers; lengths (B,): tokens from there on are padding, hidden from every query; positions (B, T), default 0 … T - 1;
        span, an integer or (B,): the sequence length that a dynamic RoPE scaling goes by, default lengths, or T.
        Raises InputError for what `check_inputs` refuses.
        """
        check_inputs(self.config, tokens, lengths, positions, span)
        draw = self.dropout.draw()
        rotation = self.rotation(tokens.shape[1], positions, lengths if span is None else span)
        x = dropout(self.embed(tokens, positions), self.config.dropout, draw, "embedding")
        maps: list[Any] = []
        for block in self.blocks:
            x, weights = block(x, lengths=lengths, rotation=rotation, draw=draw, return_attention=return_attention)
            maps.append(weights)
        self.dropout.advance()
        return self.head(x), tuple(maps) if return_attention else None

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """tokens (B, T) → (B, T, D), added positions included."""
        x = self.token_embed(tokens)
        x = x * math.sqrt(self.config.d_model) if self.config.scale_embeddings else x
        return x if self.positions is None else self.positions(x, positions)

    def rotation(self, length: int, positions: Tensor | None, span: Tensor | int | None) -> Rotation | None:
        """What rotates queries and keys; None without RoPE."""
        return None if self.rotary is None else self.rotary(length, positions, span)

    def head(self, x: Tensor) -> Tensor:
        """(B, T, D) → logits (B, T, V)."""
        return self.token_embed.attend(x if self.final_norm is None else self.final_norm(x))
