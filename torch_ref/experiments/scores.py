"""What the softmax makes of scores under a causal mask. Mirrors `flax_gpt/experiments/scores.py`."""

import torch
from torch import Tensor

from torch_ref.kernels.api import attend


def measure(q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """scores and weights (T, T) of q and k (1, T, 1, Dh)."""
    _, weights = attend(q, k, k, causal=True, return_weights=True)
    return {"scores": torch.einsum("bthd,bshd->bhts", q, k)[0, 0] * q.shape[-1] ** -0.5, "weights": weights[0, 0]}
