"""How many directions an attention map has: the spectra of one head's map and of H narrower heads' maps.

The scores Q Kᵀ have rank ≤ Dh (Bhojanapalli et al. 2020, "Low-rank bottleneck in multi-head attention models"). The softmax is not linear and
its rows are as a rule independent, so that the maps have a rank near T whatever Dh is; what differs is how fast the spectrum falls.
The original reports 54 of 128 for one head and 115 for eight together; here stands what is computed.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flax_gpt.errors import require
from flax_gpt.experiments.result import Result, check_seed
from flax_gpt.experiments.scaling import entropy
from flax_gpt.kernels.api import attend

THRESHOLD = 1e-5
"""Singular values above this count towards the rank."""


@dataclasses.dataclass(frozen=True)
class Spectra:
    """Of H maps (T, T) and the scores before their softmax."""

    heads: int
    """H."""
    width: int
    """Dh."""
    map_singular_values: list[list[float]]
    """(H, T), falling."""
    map_rank: list[int]
    """Singular values above THRESHOLD, a number a head."""
    map_effective_rank: list[float]
    """exp of the entropy of the singular values over their sum (Roy & Vetterli 2007), a number a head."""
    score_singular_values: list[list[float]]
    """(H, T)."""
    score_rank: list[int]
    """At most Dh."""
    mean_map_singular_values: list[float]
    """(T,), of the mean of the H maps."""
    mean_map_rank: int
    mean_map_effective_rank: float


@dataclasses.dataclass(frozen=True)
class Rank(Result):
    """One head of width D beside H heads of width D / H."""

    length: int
    """T."""
    threshold: float
    """THRESHOLD."""
    single: Spectra
    multi: Spectra


def run(seed: int = 0, *, length: int = 128, d_model: int = 64, heads: int = 8) -> Rank:
    """Queries and keys of independent N(0, 1) numbers, in float64: in float32 the noise of the scores' spectrum would count as rank.

    Raises InputError for a length below 1 and for `heads` that do not divide `d_model`.
    """
    check_seed(seed)
    require(length >= 1, "length", length, "must be at least 1")
    require(d_model >= 1, "d_model", d_model, "must be at least 1")
    require(heads >= 1 and d_model % heads == 0, "heads", heads, f"must divide d_model = {d_model}")
    q, k = draw(seed, length, d_model)
    return Rank(seed, length, THRESHOLD, _spectra(q, k, 1), _spectra(q, k, heads))


def draw(seed: int, length: int, d_model: int) -> np.ndarray:
    """Queries and keys: (2, 1, T, D) float64."""
    return np.random.default_rng(seed).standard_normal((2, 1, length, d_model))


def measure(q: jax.Array, k: jax.Array) -> dict[str, jax.Array]:
    """The fields of Spectra from `map_singular_values` on, as arrays, for q and k (1, T, H, Dh)."""
    _, weights = attend(q, k, k, return_weights=True)
    scores = jnp.einsum("bthd,bshd->bhts", q, k)[0] * q.shape[-1] ** -0.5
    found = {}
    for name, matrices in (("map", weights[0]), ("score", scores), ("mean_map", jnp.mean(weights[0], axis=0))):
        values = jnp.linalg.svd(matrices, compute_uv=False)
        found[f"{name}_singular_values"] = values
        found[f"{name}_rank"] = jnp.sum(values > THRESHOLD, axis=-1, dtype=jnp.int32)
        found[f"{name}_effective_rank"] = effective_rank(values)
    del found["score_effective_rank"]
    return found


def effective_rank(values: jax.Array) -> jax.Array:
    """exp(-Σ p ln p) with p = values / Σ values over the last axis: from 1 to the number of values (Roy & Vetterli 2007, definition 2)."""
    return jnp.exp(entropy(values / jnp.sum(values, axis=-1, keepdims=True)))


def _spectra(q: np.ndarray, k: np.ndarray, heads: int) -> Spectra:
    T, D = q.shape[1:]
    with jax.enable_x64(True):
        found = measure(*(jnp.asarray(x.reshape(1, T, heads, D // heads)) for x in (q, k)))
        return Spectra(heads, D // heads, **{name: np.asarray(value).tolist() for name, value in found.items()})
