"""What Q, K and V lose when they share projections. Mirrors `flax_gpt/experiments/sharing.py`."""

from typing import Any

import torch
from torch import Tensor

from flax_gpt.config import GPTConfig
from torch_ref.models.gpt import MiniGPT
from torch_ref.nn.sharing import scores, share, symmetry
from torch_ref.training.loss import cross_entropy


def make_model(config: GPTConfig, sharing: str) -> MiniGPT:
    """A MiniGPT in eval mode whose blocks share as `sharing` says."""
    model = MiniGPT(config)
    share(model, sharing)
    return model.eval()


def measure(model: MiniGPT, tokens: Tensor, targets: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """loss, accuracy, and, of the first block, scores (B, H, T, T) before the mask and their symmetry; all of the arguments (B, T)."""
    logits, _ = model(tokens)
    hits = (torch.argmax(logits, dim=-1) == targets) * weights
    block: Any = model.blocks[0]
    before_mask = scores(block.attention, block.norm1(model.embed(tokens)))
    return {
        "loss": cross_entropy(logits, targets, weights),
        "accuracy": hits.sum() / weights.sum(),
        "scores": before_mask,
        "symmetry": symmetry(before_mask),
    }
