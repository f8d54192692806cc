"""The position-wise feed-forward network."""

from typing import Any

from torch import Tensor, nn

from torch_ref.nn.dropout import Draw, dropout
from torch_ref.nn.linear import linear

ACTIVATIONS = {
    "gelu_exact": lambda x: nn.functional.gelu(x, approximate="none"),
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
}


class FeedForward(nn.Module):
    """W2 · dropout(act(W1 x + b1)) + b2, D → F → D (Vaswani et al. 2017, section 3.3; GELU: Hendrycks & Gimpel 2016).

    Gated: act(W1 x + b1) · (W3 x + b3) in place of the activation alone (Shazeer 2020, equation 6).
    """

    def __init__(self, config: Any, place: str):
        super().__init__()
        D, F, use_bias = config.d_model, config.ff_width, config.feed_forward_bias
        self.linear1 = linear(config, D, F, use_bias=use_bias)
        self.linear2 = linear(config, F, D, use_bias=use_bias, to_residual=True)
        self.gate = linear(config, D, F, use_bias=use_bias) if config.gated else None
        self.activation = config.activation
        self.rate, self.place = config.dropout, place

    def forward(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """x (B, T, D) → (B, T, D)."""
        hidden = ACTIVATIONS[self.activation](self.linear1(x))
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        return self.linear2(dropout(hidden, self.rate, draw, f"{self.place}.hidden"))
