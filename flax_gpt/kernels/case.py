"""What an implementation may know of a call before any number is computed; static under jit."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

EmptyRows = Literal["zero", "uniform", "nan"]
Window = tuple[int | None, int | None]
Shape = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes, dtype and features of one call of `attend`; hashable."""

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
    platform: str
    """'cpu', 'gpu' or 'tpu'."""
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
    offset: int | None
    """Position of the first query among the keys; None when it is known only at run time, or differs from row to row."""
    dropout_rate: float
    """Share of the weights that is dropped; 0 draws nothing."""
    empty_rows: EmptyRows
    """What a query that sees nothing gives."""
    return_weights: bool
    """Whether the map (B, H, T, S) is asked for."""
    return_lse: bool
    """Whether the log of the softmax's denominator is asked for."""
    assume_finite: bool
    """Whether q, k and v are known to hold neither NaN nor infinity."""

    @property
    def group(self) -> int:
        """Query heads to a key/value head."""
        return self.heads // self.kv_heads

    @property
    def accumulator(self) -> Any:
        """Dtype of scores, softmax and lse."""
        return jnp.float64 if self.dtype == "float64" else jnp.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of one call beside q, k and v; None where a feature is off."""

    mask: jax.Array | None = None
    """Boolean, four axes, each 1 or whole."""
    bias: jax.Array | None = None
    """Floating, four axes, each 1 or whole."""
    kv_lengths: jax.Array | None = None
    """(B,) integers; values outside [0, S] count as the nearer end."""
    query_offset: Any = 0
    """int32 of shape () or (B,)."""
    dropout_key: jax.Array | None = None
    """(B, H, 2) uint32, already folded with row and head."""


def clean(x: jax.Array, accumulator: Any, known_finite: bool) -> tuple[jax.Array, jax.Array]:
    """`x` (..., D) with 0 for NaN and infinity, and its poison (...): NaN where a number was replaced, else 0.

    0 · NaN is NaN, so a weight of 0 does not keep a hidden key or value out of a product. With the clean array in the product
    and the poison added to the scores before they are masked, what is visible still spoils its row and what is hidden nothing.
    What is known to be finite is not searched.
    """
    if known_finite:
        return x, jnp.zeros(x.shape[:-1], accumulator)
    finite = jnp.isfinite(x)
    poison = jnp.where(jnp.all(finite, axis=-1), 0.0, jnp.nan).astype(accumulator)
    return jnp.where(finite, x, np.zeros((), x.dtype)), poison


def vary(tree: Any, like: Any) -> Any:
    """`tree` as arrays that vary over every mesh axis over which an array of `like` varies; elsewhere the arrays themselves.

    Inside shard_map the initial values of a loop must vary as its results do, and the cotangent of what is replicated must be summed over the
    mesh: both follow from a selection by a condition that varies and never holds, which the compiler removes.
    """
    never = False
    for x in jax.tree.leaves(like):
        never = (x.ravel()[0].astype(bool) & False) | never
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros((), x.dtype), x), tree)
