"""Why scores are divided by √d_k. Mirrors `flax_gpt/experiments/scaling.py`."""

import torch
from torch import Tensor

from torch_ref.kernels.api import attend

SCALES = {"scaled": None, "unscaled": 1.0}


def measure(q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """Scalars score_std, entropy and largest, each under /scaled and /unscaled, of q and k (B, T, 1, Dh)."""
    found = {}
    for name, scale in SCALES.items():
        _, weights = attend(q, k, k, scale=scale, return_weights=True)
        scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        found[f"score_std/{name}"] = torch.sqrt(torch.var(scores, correction=0))
        found[f"entropy/{name}"] = torch.mean(entropy(weights))
        found[f"largest/{name}"] = torch.mean(torch.amax(weights, dim=-1))
    return found


def entropy(p: Tensor) -> Tensor:
    """-Σ p ln p over the last axis, in nats; 0 ln 0 = 0, with a finite gradient."""
    some = p > 0
    return -torch.sum(torch.where(some, p * torch.log(torch.where(some, p, 1)), 0), dim=-1)
