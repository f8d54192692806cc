"""EncoderDecoder: a Transformer for translation."""

import math
from typing import Any

from torch import Tensor, nn

from flax_gpt.config import EncoderDecoderConfig
from torch_ref.models.inputs import check_inputs
from torch_ref.nn.block import Block, DecoderBlock
from torch_ref.nn.dropout import Draw, DropoutStream, dropout
from torch_ref.nn.linear import Embedding, embedding
from torch_ref.nn.norm import norm
from torch_ref.nn.positions import added_positions
from torch_ref.nn.rotary import RotaryPositions
from torch_ref.weights.tree import speak_file_names

Maps = dict[str, tuple[Tensor, ...]]


class EncoderDecoder(nn.Module):
    """N bidirectional encoder blocks, N decoder blocks that also attend to the encoder's output; the target embedding again as the head."""

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__()
        self.config = config
        pre, layers = config.norm_placement == "pre", range(config.num_layers)
        self.source_embed = embedding(config, config.source_vocab)
        self.source_positions = added_positions(config)
        self.encoder_blocks = nn.ModuleList([Block(config, f"encoder_blocks.{i}", causal=False) for i in layers])
        self.encoder_norm = norm(config) if pre else None
        self.target_embed = embedding(config, config.vocab_size)
        self.target_positions = added_positions(config)
        self.decoder_blocks = nn.ModuleList([DecoderBlock(config, f"decoder_blocks.{i}") for i in layers])
        self.decoder_norm = norm(config) if pre else None
        self.rotary = RotaryPositions(config) if config.positions.startswith("rope") else None
        self.dropout = DropoutStream()
        speak_file_names(self)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        return_attention: bool = False,
    ) -> tuple[Tensor, Maps | None]:
        """Logits (B, T, V) of the token after each of `target` (teacher forcing) and, on request, the maps of "encoder", "decoder" and "cross".

        source (B, S) and target (B, T) integers; from the lengths (B,) on they are padding, hidden from every query.
        Raises InputError for what `check_inputs` refuses.
        """
        check_inputs(self.config, target, target_lengths, names=("target", "target_lengths"))
        draw = self.dropout.draw()
        memory, encoder_maps = self.encode(source, source_lengths, draw=draw, return_attention=return_attention)
        rotation = None if self.rotary is None else self.rotary(target.shape[1], span=target_lengths)
        x = dropout(self.embed_target(target), self.config.dropout, draw, "target_embedding")
        maps: list[Any] = []
        for block in self.decoder_blocks:
            x, *both = block(x, memory, lengths=target_lengths, memory_lengths=source_lengths, rotation=rotation, draw=draw,
                             return_attention=return_attention)  # fmt: skip
            maps.append(both)
        self.dropout.advance()
        if not return_attention:
            return self.head(x), None
        own, cross = (tuple(kind) for kind in zip(*maps, strict=True))
        return self.head(x), {"encoder": encoder_maps, "decoder": own, "cross": cross}

    def encode(
        self, source: Tensor, lengths: Tensor | None = None, *, draw: Draw | None = None, return_attention: bool = False
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """source (B, S) → memory (B, S, D) and one map (B, H, S, S) a layer, None where not asked for."""
        check_inputs(self.config, source, lengths, names=("source", "source_lengths"), vocab_size=self.config.source_vocab)
        rotation = None if self.rotary is None else self.rotary(source.shape[1], span=lengths)
        x = self._embed(source, self.source_embed, self.source_positions)
        x = dropout(x, self.config.dropout, draw, "source_embedding")
        maps: list[Any] = []
        for block in self.encoder_blocks:
            x, weights = block(x, lengths=lengths, rotation=rotation, draw=draw, return_attention=return_attention)
            maps.append(weights)
        return x if self.encoder_norm is None else self.encoder_norm(x), tuple(maps)

    def embed_target(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """tokens (B, T) → (B, T, D), added positions included."""
        return self._embed(tokens, self.target_embed, self.target_positions, positions)

    def head(self, x: Tensor) -> Tensor:
        """(B, T, D) → logits (B, T, V)."""
        return self.target_embed.attend(x if self.decoder_norm is None else self.decoder_norm(x))

    def _embed(self, tokens: Tensor, embed: Embedding, added: Any, positions: Tensor | None = None) -> Tensor:
        x = embed(tokens)
        x = x * math.sqrt(self.config.d_model) if self.config.scale_embeddings else x
        return x if added is None else added(x, positions)
