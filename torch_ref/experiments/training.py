"""Small trainings. Mirrors `flax_gpt/experiments/training.py`."""

from typing import Any

import torch
from torch import Tensor, nn

from flax_gpt.config import OptimizerConfig
from torch_ref.training.loss import cross_entropy
from torch_ref.training.optimizer import make_optimizer


def fit(model: nn.Module, batches: tuple[Tensor, Tensor, Tensor], config: OptimizerConfig) -> Tensor:
    """Trains `model` in place on `batches`, tokens, targets and weights (steps, B, T), and returns the loss before each update (steps,)."""
    model.eval()
    optimizer = make_optimizer(model, config, len(batches[0]))
    losses: list[Any] = []
    for tokens, targets, weights in zip(*batches, strict=True):
        loss = cross_entropy(model(tokens)[0], targets, weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)
