"""The position-wise feed-forward network."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_gpt.nn.dropout import Draw, dropout
from flax_gpt.nn.linear import linear


def gelu(x: jax.Array) -> jax.Array:
    """x Φ(x), Φ the standard normal distribution (Hendrycks & Gimpel 2016, section 2), in float32 or better.

    By 1 + erf, as torch has it. jax.nn.gelu takes erfc, which needs an exponential and two selections more: 1.7 times as long on the CPU.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * (0.5 * (1 + jax.lax.erf(wide * 0.5**0.5)))).astype(x.dtype)


ACTIVATIONS = {
    "gelu_exact": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class FeedForward(nnx.Module):
    """W2 · dropout(act(W1 x + b1)) + b2, D → F → D (Vaswani et al. 2017, section 3.3; GELU: Hendrycks & Gimpel 2016).

    Gated: act(W1 x + b1) · (W3 x + b3) in place of the activation alone (Shazeer 2020, equation 6).
    """

    def __init__(self, config: Any, place: str, *, rngs: nnx.Rngs):
        D, F, use_bias = config.d_model, config.ff_width, config.feed_forward_bias
        self.linear1 = linear(config, D, F, use_bias=use_bias, rngs=rngs)
        self.linear2 = linear(config, F, D, use_bias=use_bias, to_residual=True, rngs=rngs)
        self.gate = linear(config, D, F, use_bias=use_bias, rngs=rngs) if config.gated else None
        self.activation = config.activation
        self.rate, self.place = config.dropout, place

    def __call__(self, x: jax.Array, draw: Draw | None = None) -> jax.Array:
        """x (B, T, D) → (B, T, D)."""
        hidden = ACTIVATIONS[self.activation](self.linear1(x))
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        return self.linear2(dropout(hidden, self.rate, draw, f"{self.place}.hidden"))
