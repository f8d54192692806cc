"""The position-wise feed-forward network."""

from typing import Any, Literal

import jax
from flax import nnx

from flax_gpt.nn.dropout import Draw, dropout
from flax_gpt.nn.linear import linear

ACTIVATIONS = {
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
}


class FeedForward(nnx.Module):
    """W2 · dropout(act(W1 x + b1)) + b2, D → F → D (Vaswani et al. 2017, section 3.3; GELU with erf: Hendrycks & Gimpel 2016)."""

    def __init__(self, config: Any, place: str, *, activation: Literal["gelu_exact", "relu"], dropout_rate: float = 0.0, rngs: nnx.Rngs):
        self.linear1 = linear(config, config.d_model, config.ff_width, use_bias=True, rngs=rngs)
        self.linear2 = linear(config, config.ff_width, config.d_model, use_bias=True, to_residual=True, rngs=rngs)
        self.activation = activation
        self.rate, self.place = dropout_rate, place

    def __call__(self, x: jax.Array, draw: Draw | None = None) -> jax.Array:
        """x (B, T, D) → (B, T, D)."""
        hidden = ACTIVATIONS[self.activation](self.linear1(x))
        return self.linear2(dropout(hidden, self.rate, draw, f"{self.place}.hidden"))
