"""Dropout (Srivastava et al. 2014) whose draws depend on (seed, step, place, coordinates) and on nothing else."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from flax_gpt import random


class DropoutState(nnx.Variable):
    """What the draws of a model depend on; saved and restored, never trained."""


class Draw(NamedTuple):
    """What one forward pass draws from: a key (2,) and the number, in the whole batch, of the first row."""

    key: jax.Array
    first_row: jax.Array


class DropoutStream(nnx.Module):
    """The (seed, step) of a model. `model.eval()` makes it deterministic; a new model is in train mode."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.seed_key = DropoutState(jax.random.bits(rngs.dropout(), (2,), jnp.uint32))
        self.step = DropoutState(jnp.uint32(0))
        self.first_row = DropoutState(jnp.uint32(0))
        self.deterministic = False

    def draw(self) -> Draw | None:
        """The draw of the present step; None when nothing is dropped."""
        if self.deterministic:
            return None
        return Draw(random.fold(self.seed_key[...], self.step[...]), self.first_row[...])

    def advance(self) -> None:
        """Goes on to the next step, so that two calls in train mode differ."""
        if not self.deterministic:
            self.step[...] = self.step[...] + jnp.uint32(1)


def dropout(x: jax.Array, rate: float, draw: Draw | None, place: str) -> jax.Array:
    """x (B, …) with a share `rate` of its elements set to 0 and the rest divided by 1 - rate; x itself when `draw` is None."""
    if draw is None or rate == 0.0:
        return x
    keep = random.keep_mask(random.fold_name(draw.key, place), rate, x.shape, (draw.first_row,))
    return jnp.where(keep, x * (1 / (1 - rate)), jnp.zeros_like(x))


def attention_keys(draw: Draw | None, place: str, B: int, H: int) -> jax.Array | None:
    """Keys (B, H, 2) for `attend`, folded with the row and the head."""
    return None if draw is None else random.fold_coordinates(random.fold_name(draw.key, place), (B, H), (draw.first_row,))
