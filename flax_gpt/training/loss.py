"""The loss of a language model: mean cross-entropy over real tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_gpt.errors import require


def token_losses(logits: jax.Array, targets: jax.typing.ArrayLike, *, label_smoothing: float = 0.0) -> jax.Array:
    """-log softmax(logits)[target], as logsumexp minus the target's logit, for logits (..., V) and targets (...) int.

    `label_smoothing` ε in [0, 1] gives the target the probability 1 - ε + ε / V and every other id ε / V (Szegedy et al. 2016, section 7).

    Computed and returned in float32 or better. Concrete targets outside [0, V) raise InputError; traced ones cannot be refused and give NaN, where
    a plain gather would wrap or clamp them.
    """
    require(0 <= label_smoothing <= 1, "label_smoothing", label_smoothing, "must lie in [0, 1]")
    _refuse_bad_targets(targets, logits.shape[-1])
    targets, logits = jnp.asarray(targets), logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    known = (targets >= 0) & (targets < logits.shape[-1])
    picked = jnp.take_along_axis(logits, jnp.where(known, targets, 0)[..., None], axis=-1)[..., 0]
    aim = picked if label_smoothing == 0 else (1 - label_smoothing) * picked + label_smoothing * jnp.mean(logits, axis=-1)
    return jnp.where(known, jax.nn.logsumexp(logits, axis=-1) - aim, jnp.nan)


def cross_entropy(
    logits: jax.Array, targets: jax.typing.ArrayLike, weights: jax.typing.ArrayLike | None = None, *, label_smoothing: float = 0.0
) -> jax.Array:
    """Mean over tokens of `token_losses`, a scalar; `weights` (...) count each token, and a token of weight 0 may have any target.

    The sum is divided by the sum of weights, never by a batch's nominal size. All weights 0 give 0, where torch's mean over nothing is NaN.
    """
    if weights is None:
        return jnp.mean(token_losses(logits, targets, label_smoothing=label_smoothing))
    weights = jnp.asarray(weights)
    counts = weights != 0
    losses = jnp.where(counts, token_losses(logits, jnp.where(counts, targets, 0), label_smoothing=label_smoothing), 0)
    total = jnp.sum(weights.astype(losses.dtype))
    return jnp.sum(losses * weights.astype(losses.dtype)) / jnp.where(total == 0, 1, total)


def _refuse_bad_targets(targets: Any, vocab_size: int) -> None:
    if isinstance(targets, jax.core.Tracer) or targets.size == 0:
        return
    values = np.asarray(targets)
    for value in (values.min(), values.max()):
        require(0 <= value < vocab_size, "targets", int(value), f"must lie in [0, {vocab_size})")
