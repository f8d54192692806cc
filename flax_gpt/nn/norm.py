"""Layer normalisation."""

from typing import Any

import jax.numpy as jnp
from flax import nnx


def layer_norm(config: Any, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """(x - mean) / √(var + eps) · weight + bias over D (Ba et al. 2016), statistics in float32 or better.

    The variance is taken in two passes: E[x²] - E[x]² cancels when the mean is large.
    """
    return nnx.LayerNorm(
        config.d_model,
        epsilon=config.norm_eps,
        use_fast_variance=False,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )
