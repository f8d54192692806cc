"""The position-wise feed-forward network."""

from typing import Any, Literal

from torch import Tensor, nn

from torch_ref.nn.dropout import Draw, dropout
from torch_ref.nn.linear import linear

ACTIVATIONS = {
    "gelu_exact": lambda x: nn.functional.gelu(x, approximate="none"),
    "relu": nn.functional.relu,
}


class FeedForward(nn.Module):
    """W2 · dropout(act(W1 x + b1)) + b2, D → F → D (Vaswani et al. 2017, section 3.3; GELU with erf: Hendrycks & Gimpel 2016)."""

    def __init__(self, config: Any, place: str, *, activation: Literal["gelu_exact", "relu"], dropout_rate: float = 0.0):
        super().__init__()
        self.linear1 = linear(config, config.d_model, config.ff_width, use_bias=True)
        self.linear2 = linear(config, config.ff_width, config.d_model, use_bias=True, to_residual=True)
        self.activation = activation
        self.rate, self.place = dropout_rate, place

    def forward(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """x (B, T, D) → (B, T, D)."""
        hidden = ACTIVATIONS[self.activation](self.linear1(x))
        return self.linear2(dropout(hidden, self.rate, draw, f"{self.place}.hidden"))
