"""EncoderDecoder: a Transformer for translation."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_gpt.config import EncoderDecoderConfig
from flax_gpt.generation.cache import CrossCache, KVCache
from flax_gpt.models.inputs import check_inputs
from flax_gpt.nn.block import Block, DecoderBlock
from flax_gpt.nn.dropout import Draw, DropoutStream, dropout
from flax_gpt.nn.linear import embedding, logits
from flax_gpt.nn.norm import norm
from flax_gpt.nn.positions import added_positions
from flax_gpt.nn.rotary import RotaryPositions

Maps = dict[str, tuple[jax.Array, ...]]


class EncoderDecoder(nnx.Module):
    """N bidirectional encoder blocks, N decoder blocks that also attend to the encoder's output; the target embedding again as the head."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        pre, layers = config.norm_placement == "pre", range(config.num_layers)
        self.source_embed = embedding(config, config.source_vocab, rngs=rngs)
        self.source_positions = added_positions(config, rngs=rngs)
        self.encoder_blocks = nnx.List([Block(config, f"encoder_blocks.{i}", causal=False, rngs=rngs) for i in layers])
        self.encoder_norm = norm(config, rngs=rngs) if pre else None
        self.target_embed = embedding(config, config.vocab_size, rngs=rngs)
        self.target_positions = added_positions(config, rngs=rngs)
        self.decoder_blocks = nnx.List([DecoderBlock(config, f"decoder_blocks.{i}", rngs=rngs) for i in layers])
        self.decoder_norm = norm(config, rngs=rngs) if pre else None
        self.rotary = RotaryPositions(config) if config.positions.startswith("rope") else None
        self.dropout = DropoutStream(rngs=rngs)

    def __call__(
        self,
        source: jax.Array,
        target: jax.Array,
        *,
        source_lengths: jax.Array | None = None,
        target_lengths: jax.Array | None = None,
        return_attention: bool = False,
    ) -> tuple[jax.Array, Maps | None]:
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
        self, source: jax.Array, lengths: jax.Array | None = None, *, draw: Draw | None = None, return_attention: bool = False
    ) -> tuple[jax.Array, tuple[Any, ...]]:
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

    def start(self, memory: jax.Array, lengths: jax.Array, cache: KVCache) -> CrossCache:
        """A cache for `step`: the memory's keys and values (B, K, S, Dh) of every layer, computed once."""
        pairs = [block.cross_attention.remember(memory) for block in self.decoder_blocks]
        return CrossCache(cache, tuple(k for k, _ in pairs), tuple(v for _, v in pairs), lengths)

    def step(self, tokens: jax.Array, cache: CrossCache) -> tuple[jax.Array, CrossCache]:
        """Logits (B, T, V) of target tokens (B, T) appended to the cache, and the longer cache; never drops out.

        The caller keeps lengths + T within the cache's size and max_len: a traced position beyond them is clamped.
        """
        own = cache.own
        positions = own.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        rotation = None if self.rotary is None else self.rotary(tokens.shape[1], positions, own.spans)
        x = self.embed_target(tokens, positions)
        keys, values = list(own.keys), list(own.values)
        for i, block in enumerate(self.decoder_blocks):
            memory = cache.memory_keys[i], cache.memory_values[i]
            x, keys[i], values[i] = block.step(x, keys[i], values[i], own.lengths, memory, cache.memory_lengths, rotation)
        own = own._replace(keys=tuple(keys), values=tuple(values), lengths=own.lengths + tokens.shape[1])
        return self.head(x), cache._replace(own=own)

    def embed_target(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """tokens (B, T) → (B, T, D), added positions included."""
        return self._embed(tokens, self.target_embed, self.target_positions, positions)

    def head(self, x: jax.Array) -> jax.Array:
        """(B, T, D) → logits (B, T, V)."""
        return logits(self.target_embed, x if self.decoder_norm is None else self.decoder_norm(x))

    def _embed(self, tokens: jax.Array, embed: nnx.Embed, added: Any, positions: jax.Array | None = None) -> jax.Array:
        x = embed(tokens)
        x = x * math.sqrt(self.config.d_model) if self.config.scale_embeddings else x
        return x if added is None else added(x, positions)
