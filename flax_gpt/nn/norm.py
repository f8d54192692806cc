"""Normalisation over the width of the model."""

from typing import Any

from flax import nnx

from flax_gpt.nn.linear import dtypes_of


def norm(config: Any, *, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """The norm that `config.norm` names, over D, statistics in float32 or better.

    'layer_norm': (x - mean) / √(var + eps) · weight + bias (Ba et al. 2016). 'rms_norm': x / √(mean(x²) + eps) · weight (Zhang & Sennrich 2019).
    """
    dtypes = dict(**dtypes_of(config), rngs=rngs)
    if config.norm == "rms_norm":
        return nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, **dtypes)
    # Two passes: E[x²] - E[x]² cancels when the mean is large.
    return nnx.LayerNorm(config.d_model, epsilon=config.norm_eps, use_fast_variance=False, **dtypes)
