"""What the softmax makes of scores under a causal mask."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flax_gpt.errors import require
from flax_gpt.experiments.result import Result, check_seed
from flax_gpt.kernels.api import attend


@dataclasses.dataclass(frozen=True)
class Scores(Result):
    """Of one head."""

    length: int
    """T."""
    width: int
    """Dh."""
    scores: list[list[float]]
    """(T, T): Q Kᵀ / √Dh."""
    weights: list[list[float]]
    """(T, T): softmax of the visible scores, 0 where hidden."""


def run(seed: int = 0, *, length: int = 10, width: int = 16) -> Scores:
    """Queries and keys of independent N(0, 1) numbers. Raises InputError for a length or a width below 1."""
    check_seed(seed)
    for name, value in (("length", length), ("width", width)):
        require(value >= 1, name, value, "must be at least 1")
    q, k = (jnp.asarray(x, jnp.float32) for x in draw(seed, length, width))
    return Scores(seed, length, width, **{name: np.asarray(value).tolist() for name, value in measure(q, k).items()})


def draw(seed: int, length: int, width: int) -> np.ndarray:
    """Queries and keys: (2, 1, T, 1, Dh) float64."""
    return np.random.default_rng(seed).standard_normal((2, 1, length, 1, width))


def measure(q: jax.Array, k: jax.Array) -> dict[str, jax.Array]:
    """scores and weights (T, T) of q and k (1, T, 1, Dh)."""
    _, weights = attend(q, k, k, causal=True, return_weights=True)
    return {"scores": jnp.einsum("bthd,bshd->bhts", q, k)[0, 0] * q.shape[-1] ** -0.5, "weights": weights[0, 0]}
