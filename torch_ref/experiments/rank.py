"""How many directions an attention map has. Mirrors `flax_gpt/experiments/rank.py`."""

import torch
from torch import Tensor

from torch_ref.experiments.scaling import entropy
from torch_ref.kernels.api import attend

THRESHOLD = 1e-5
"""Singular values above this count towards the rank."""


def measure(q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """Singular values, rank and effective rank of the maps, the scores and the mean map, for q and k (1, T, H, Dh)."""
    _, weights = attend(q, k, k, return_weights=True)
    scores = torch.einsum("bthd,bshd->bhts", q, k)[0] * q.shape[-1] ** -0.5
    found = {}
    for name, matrices in (("map", weights[0]), ("score", scores), ("mean_map", torch.mean(weights[0], dim=0))):
        values = torch.linalg.svdvals(matrices)
        found[f"{name}_singular_values"] = values
        found[f"{name}_rank"] = torch.count_nonzero(values > THRESHOLD, dim=-1)
        found[f"{name}_effective_rank"] = effective_rank(values)
    del found["score_effective_rank"]
    return found


def effective_rank(values: Tensor) -> Tensor:
    """exp(-Σ p ln p) with p = values / Σ values over the last axis: from 1 to the number of values (Roy & Vetterli 2007, definition 2)."""
    return torch.exp(entropy(values / torch.sum(values, dim=-1, keepdim=True)))
