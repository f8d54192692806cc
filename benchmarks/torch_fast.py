"""MiniGPT in torch as it is written for speed: one projection for q, k and v, scaled_dot_product_attention, torch's own dropout, static caches.

`torch_ref` is written to be read and compared; this holds the same weights and is compared with it before a time counts.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flax_gpt.config import GPTConfig
from flax_gpt.weights.torch_names import MINIGPT
from torch_ref.nn.positions import sinusoidal_table

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values (B, K, S, Dh) of each layer."""


class FastBlock(nn.Module):
    """Pre-LN attention and feed-forward."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        D, kv = config.d_model, config.kv_heads * config.head_dim
        self.norm1, self.norm2 = (nn.LayerNorm(D, eps=config.norm_eps) for _ in range(2))
        self.qkv = nn.Linear(D, D + 2 * kv, bias=config.attention_bias)
        self.output = nn.Linear(D, D, bias=config.attention_bias)
        self.linear1 = nn.Linear(D, config.ff_width, bias=config.feed_forward_bias)
        self.linear2 = nn.Linear(config.ff_width, D, bias=config.feed_forward_bias)
        self.gelu = "tanh" if config.activation == "gelu_tanh" else "none"

    def heads(self, x: Tensor) -> list[Tensor]:
        """x (B, T, D) → q (B, H, T, Dh), k and v (B, K, T, Dh)."""
        config = self.config
        kv = config.kv_heads * config.head_dim
        parts = self.qkv(self.norm1(x)).split((config.d_model, kv, kv), dim=-1)
        return [part.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for part in parts]

    def add(self, x: Tensor, attended: Tensor) -> Tensor:
        """x plus the attention's output (B, H, T, Dh) through its projection, and the feed-forward."""
        rate = self.config.dropout
        x = x + F.dropout(self.output(attended.transpose(1, 2).flatten(2)), rate, self.training)
        hidden = F.dropout(F.gelu(self.linear1(self.norm2(x)), approximate=self.gelu), rate, self.training)
        return x + F.dropout(self.linear2(hidden), rate, self.training)

    @property
    def grouped(self) -> bool:
        return self.config.kv_heads != self.config.num_heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.add(x, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped))

    def step(self, x: Tensor, keys: Tensor, values: Tensor, position: Any, visible: Any) -> Tensor:
        """x (B, 1, D) at `position`: an integer, or a tensor (1,) beside the mask `visible` (1, 1, 1, S), which a compiled step needs."""
        q, k, v = self.heads(x)
        if visible is None:
            keys[:, :, position : position + 1], values[:, :, position : position + 1] = k, v
            keys, values = keys[:, :, : position + 1], values[:, :, : position + 1]
        else:
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
        return self.add(x, F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=self.grouped))


class FastGPT(nn.Module):
    """Token embedding (× √D) + positions, blocks, a final norm, and the embedding again as the head."""

    def __init__(self, config: GPTConfig, weights: Mapping[str, np.ndarray]):
        super().__init__()
        self.config = config
        self.token_embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList([FastBlock(config) for _ in range(config.num_layers)])
        self.final_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.scale = math.sqrt(config.d_model) if config.scale_embeddings else 1.0
        if config.positions == "learned":
            self.positions: Tensor | nn.Parameter = nn.Parameter(torch.empty(config.max_len, config.d_model))
        else:
            self.register_buffer("positions", torch.from_numpy(sinusoidal_table(config.max_len, config.d_model).astype(np.float32)))
        self.load(weights)

    @torch.no_grad()
    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Fills every parameter from {file name: array}."""
        for name, parameter in self.named_parameters():
            parameter.copy_(torch.from_numpy(self.joined(name, weights)))

    def joined(self, name: str, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """What the parameter `name` is in the file's terms."""
        return np.concatenate([values[file] for file in files(name)])

    def named(self, values: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """{parameter: tensor} under the file's names, q, k and v apart."""
        kv = self.config.kv_heads * self.config.head_dim
        found: dict[str, np.ndarray] = {}
        for name, tensor in values.items():
            names = files(name)
            parts = tensor.detach().split((self.config.d_model, kv, kv)) if len(names) == 3 else [tensor.detach()]
            found |= {file: part.cpu().numpy() for file, part in zip(names, parts, strict=True)}
        return found

    def embed(self, tokens: Tensor, rows: Tensor) -> Tensor:
        return F.dropout(self.token_embed(tokens) * self.scale + rows, self.config.dropout, self.training)

    def head(self, x: Tensor) -> Tensor:
        return F.linear(self.final_norm(x), self.token_embed.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) → logits (B, T, V)."""
        x = self.embed(tokens, self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy; targets of −100 do not count."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def cache(self, batch: int, size: int) -> Cache:
        """An empty one of `size` positions."""
        shape = (batch, self.config.kv_heads, size, self.config.head_dim)
        device = self.token_embed.weight.device
        return [(torch.zeros(shape, device=device), torch.zeros(shape, device=device)) for _ in self.blocks]

    def prefill(self, tokens: Tensor, cache: Cache) -> Tensor:
        """tokens (B, T) at positions 0 … T - 1 → logits (B, V) of the last, the cache filled."""
        x = self.embed(tokens, self.positions[: tokens.shape[1]])
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            q, k, v = block.heads(x)
            keys[:, :, : tokens.shape[1]], values[:, :, : tokens.shape[1]] = k, v
            x = block.add(x, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=block.grouped))
        return self.head(x[:, -1])

    def step(self, tokens: Tensor, cache: Cache, position: Any, visible: Any = None) -> Tensor:
        """tokens (B, 1) at `position` → logits (B, V); see FastBlock.step."""
        x = self.embed(tokens, self.positions[position : position + 1] if visible is None else self.positions[position])
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            x = block.step(x, keys, values, position, visible)
        return self.head(x[:, -1])


def files(name: str) -> list[str]:
    """The file's names of a parameter: three for the joint projection."""
    if name == "positions":
        return [MINIGPT.to_file("positions.embedding.weight")]
    for short in ("output", "linear1", "linear2"):
        name = name.replace(f".{short}.", f".{'attention' if short == 'output' else 'feed_forward'}.{short}.")
    if ".qkv." in name:
        return [MINIGPT.to_file(name.replace("qkv", f"attention.{part}")) for part in ("query", "key", "value")]
    return [MINIGPT.to_file(name)]
