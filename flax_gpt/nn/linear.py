"""Linear layers and embeddings with the two named initialisations."""

import math
from typing import Any

import jax
from flax import nnx

from flax_gpt.config import INIT_STD
from flax_gpt.errors import require


def dtypes_of(config: Any) -> dict[str, Any]:
    """dtype and param_dtype. Raises InputError for a float64 that jax would cut to float32 and only warn."""
    double: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    for name in ("dtype", "param_dtype"):
        known = double or getattr(config, name) != "float64"
        require(known, name, getattr(config, name), "needs jax.enable_x64(True), or JAX_ENABLE_X64=1 in the environment")
    return dict(dtype=jax.numpy.dtype(config.dtype), param_dtype=jax.numpy.dtype(config.param_dtype))


def linear(config: Any, in_features: int, out_features: int, *, use_bias: bool, rngs: nnx.Rngs, to_residual: bool = False) -> nnx.Linear:
    """x W + b with W (in_features, out_features).

    'scaled': W ~ N(0, 0.02²), or N(0, 0.02² / 2N) for a projection that writes to the residual stream, b = 0 (Radford et al. 2019, section 2.3).
    'torch': W and b uniform within ±1/√in_features, as torch's nn.Linear draws them.
    """
    if config.init == "torch":
        bound = 1 / math.sqrt(in_features)
        kernel_init = bias_init = _uniform(bound)
    else:
        kernel_init = jax.nn.initializers.normal(config.residual_std if to_residual else INIT_STD)
        bias_init = jax.nn.initializers.zeros
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=use_bias,
        kernel_init=kernel_init,
        bias_init=bias_init,
        dot_general=_rows_times,
        **dtypes_of(config),
        rngs=rngs,
    )


def embedding(config: Any, size: int, *, rngs: nnx.Rngs) -> nnx.Embed:
    """A table (size, D): N(0, 0.02²) when 'scaled', N(0, 1) when 'torch'. A traced id ≥ size reads NaN."""
    return nnx.Embed(
        size,
        config.d_model,
        embedding_init=jax.nn.initializers.normal(1.0 if config.init == "torch" else INIT_STD),
        **dtypes_of(config),
        rngs=rngs,
    )


def logits(embed: nnx.Embed, x: jax.Array) -> jax.Array:
    """x (..., D) times every row of a tied table (V, D), (..., V)."""
    return embed.attend(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], embed.num_embeddings)


def _rows_times(x: jax.Array, kernel: jax.Array, dimension_numbers: Any, precision: Any = None, **options: Any) -> jax.Array:
    """lax.dot_general of x (..., in) and a kernel (in, out), (..., out), over one axis of rows.

    For the gradient of a kernel XLA's CPU back end turns an array of more axes around in a copy; one of two axes it multiplies as it lies.
    """
    rows = jax.lax.dot_general(x.reshape(-1, x.shape[-1]), kernel, (((1,), (0,)), ((), ())), precision=precision, **options)
    return rows.reshape(*x.shape[:-1], kernel.shape[1])


def _uniform(bound: float) -> Any:
    return lambda key, shape, dtype, out_sharding=None: jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound)
