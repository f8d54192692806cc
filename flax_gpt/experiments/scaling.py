"""Why scores are divided by √d_k: without it the softmax saturates as heads grow wider (Vaswani et al. 2017, section 3.2.1, footnote 4)."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flax_gpt.errors import require
from flax_gpt.experiments.result import Result, check_seed
from flax_gpt.kernels.api import attend

WIDTHS = (4, 16, 64, 256)
SCALES = {"scaled": None, "unscaled": 1.0}
"""Name → the `scale` of attend; None is 1/√d_k."""


@dataclasses.dataclass(frozen=True)
class Scaling(Result):
    """Mean over all rows of the softmax, a list with a number a width in each mapping; keys are those of SCALES."""

    length: int
    """Keys in a row, T."""
    draws: int
    """Independent maps a width; each has T rows."""
    widths: list[int]
    """d_k."""
    score_std: dict[str, list[float]]
    """Standard deviation of the scores."""
    entropy: dict[str, list[float]]
    """In nats; at most ln T."""
    largest: dict[str, list[float]]
    """Largest weight of a row; at least 1/T."""


def run(seed: int = 0, *, widths: Sequence[int] = WIDTHS, length: int = 16, draws: int = 64) -> Scaling:
    """Queries and keys of independent N(0, 1) numbers. Raises InputError for widths, a length or a number of draws below 1."""
    check_seed(seed)
    require(len(widths) >= 1 and min(widths) >= 1, "widths", list(widths), "must be at least 1 each")
    require(length >= 1, "length", length, "must be at least 1")
    require(draws >= 1, "draws", draws, "must be at least 1")
    found = []
    for q, k in draw(seed, widths, length, draws):
        found.append({name: float(value) for name, value in jax.jit(measure)(jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32)).items()})
    table = {what: {name: [row[f"{what}/{name}"] for row in found] for name in SCALES} for what in ("score_std", "entropy", "largest")}
    return Scaling(seed, length, draws, list(widths), **table)


def draw(seed: int, widths: Sequence[int], length: int, draws: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Queries and keys (draws, T, 1, d_k) for each width."""
    return [tuple(np.random.default_rng([seed, width]).standard_normal((2, draws, length, 1, width))) for width in widths]


def measure(q: jax.Array, k: jax.Array) -> dict[str, jax.Array]:
    """Scalars score_std, entropy and largest, each under /scaled and /unscaled, of q and k (B, T, 1, Dh)."""
    found = {}
    for name, scale in SCALES.items():
        _, weights = attend(q, k, k, scale=scale, return_weights=True)
        found[f"score_std/{name}"] = jnp.sqrt(jnp.var(jnp.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)))
        found[f"entropy/{name}"] = jnp.mean(entropy(weights))
        found[f"largest/{name}"] = jnp.mean(jnp.max(weights, axis=-1))
    return found


def entropy(p: jax.Array) -> jax.Array:
    """-Σ p ln p over the last axis, in nats; 0 ln 0 = 0, with a finite gradient."""
    some = p > 0
    return -jnp.sum(jnp.where(some, p * jnp.log(jnp.where(some, p, 1)), 0), axis=-1)
