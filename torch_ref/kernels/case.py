"""What `dense` may know of a call before any number is computed. Mirrors `flax_gpt/kernels/case.py`."""

import dataclasses
from typing import Literal

import torch
from torch import Tensor

EmptyRows = Literal["zero", "uniform", "nan"]
Window = tuple[int | None, int | None]
Shape = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes, dtype and features of one call of `attend`; as `flax_gpt` has them."""

    batch: int
    """B."""
    queries: int
    """T."""
    keys: int
    """S."""
    heads: int
    """H."""
    kv_heads: int
    """K; query head h reads key/value head h // (H / K)."""
    width: int
    """Dh, of queries and keys."""
    value_width: int
    """Width of the values and of the output."""
    dtype: str
    """Of q, k, v and the output."""
    causal: bool
    """A query sees the keys up to its own position."""
    window: Window | None
    """Neighbours seen to the left and to the right, beside the query's own position."""
    scale: float
    """Multiplies the scores."""
    mask: Shape | None
    """Shape of the boolean mask, each axis 1 or whole; None without one."""
    bias: Shape | None
    """Shape of the bias, likewise."""
    lengths: bool
    """Whether kv_lengths are given."""
    dropout_rate: float
    """Share of the weights that is dropped; 0 draws nothing."""
    empty_rows: EmptyRows
    """What a query that sees nothing gives."""
    assume_finite: bool
    """Whether q, k and v are known to hold neither NaN nor infinity."""

    @property
    def group(self) -> int:
        """Query heads to a key/value head."""
        return self.heads // self.kv_heads

    @property
    def accumulator(self) -> torch.dtype:
        """Dtype of scores, softmax and lse."""
        return torch.float64 if self.dtype == "float64" else torch.float32


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of one call beside q, k and v; None where a feature is off."""

    query_offset: Tensor
    """Integers of shape () or (B,), on q's device."""
    mask: Tensor | None = None
    """Boolean, four axes, each 1 or whole."""
    bias: Tensor | None = None
    """Floating, four axes, each 1 or whole."""
    kv_lengths: Tensor | None = None
    """(B,) integers; values outside [0, S] count as the nearer end."""
    dropout_key: Tensor | None = None
    """(B, H, 2) 32-bit words in int64, already folded with row and head."""


def clean(x: Tensor, accumulator: torch.dtype, known_finite: bool) -> tuple[Tensor, Tensor]:
    """`x` (..., D) with 0 for NaN and infinity, and its poison (...): NaN where a number was replaced, else 0.

    0 · NaN is NaN, so a weight of 0 does not keep a hidden key or value out of a product. With the clean array in the product
    and the poison added to the scores before they are masked, what is visible still spoils its row and what is hidden nothing.
    What is known to be finite is not searched.
    """
    if known_finite:
        return x, x.new_zeros(x.shape[:-1], dtype=accumulator)
    finite = torch.isfinite(x)
    poison = torch.where(torch.all(finite, dim=-1), 0.0, torch.nan).to(accumulator)
    return torch.where(finite, x, torch.zeros((), dtype=x.dtype, device=x.device)), poison
