"""The loss of a language model: mean cross-entropy over real tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from flax_gpt.errors import require


def token_losses(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """-log softmax(logits)[target] for logits (..., V) and targets (...) int, in float32 or better; targets outside [0, V) raise InputError.

    `label_smoothing` ε in [0, 1] gives the target the probability 1 - ε + ε / V and every other id ε / V (Szegedy et al. 2016, section 7).
    """
    require(0 <= label_smoothing <= 1, "label_smoothing", label_smoothing, "must lie in [0, 1]")
    if targets.numel():
        for value in (int(targets.min()), int(targets.max())):
            require(0 <= value < logits.shape[-1], "targets", value, f"must lie in [0, {logits.shape[-1]})")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = logits.flatten(0, -2), targets.long().flatten()
    return F.cross_entropy(*flat, reduction="none", label_smoothing=label_smoothing).reshape(targets.shape)


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None, *, label_smoothing: float = 0.0) -> Tensor:
    """Mean over tokens of `token_losses`; a token of weight 0 may have any target, and all weights 0 give 0."""
    if weights is None:
        return token_losses(logits, targets, label_smoothing=label_smoothing).mean()
    counts = weights != 0
    losses = torch.where(counts, token_losses(logits, torch.where(counts, targets, 0), label_smoothing=label_smoothing), 0.0)
    total = weights.to(losses.dtype).sum()
    return (losses * weights.to(losses.dtype)).sum() / torch.where(total == 0, 1.0, total)
