"""Dropout (Srivastava et al. 2014) whose draws depend on (seed, step, place, coordinates) and on nothing else."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_ref import random


class Draw(NamedTuple):
    """What one forward pass draws from: a key (2,) and the number, in the whole batch, of the first row."""

    key: Tensor
    first_row: int


class DropoutStream(nn.Module):
    """The (seed, step) of a model. `model.eval()` makes it deterministic; a new model is in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_key = torch.randint(2**32, (2,))
        self.step = 0
        self.first_row = 0

    def draw(self) -> Draw | None:
        """The draw of the present step; None when nothing is dropped."""
        if not self.training:
            return None
        return Draw(random.fold(self.seed_key, self.step), self.first_row)

    def advance(self) -> None:
        """Goes on to the next step, so that two calls in train mode differ."""
        if self.training:
            self.step += 1


def dropout(x: Tensor, rate: float, draw: Draw | None, place: str) -> Tensor:
    """x (B, …) with a share `rate` of its elements set to 0 and the rest divided by 1 - rate; x itself when `draw` is None."""
    if draw is None or rate == 0.0:
        return x
    keep = random.keep_mask(random.fold_name(draw.key, place), rate, tuple(x.shape), (draw.first_row,)).to(x.device)
    return torch.where(keep, x * (1 / (1 - rate)), torch.zeros_like(x))


def attention_keys(draw: Draw | None, place: str, B: int, H: int) -> Tensor | None:
    """Keys (B, H, 2) for `attend`, folded with the row and the head."""
    return None if draw is None else random.fold_coordinates(random.fold_name(draw.key, place), (B, H), (draw.first_row,))
