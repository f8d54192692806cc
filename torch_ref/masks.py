"""Attention masks: boolean, True = may attend, broadcasting to (B, H, T, S). Mirrors `flax_gpt/masks.py`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flax_gpt.errors import InputError, describe, require


def _positions(T: int, S: int | None, offset: Any) -> tuple[Tensor, Tensor]:
    """Absolute positions of queries (T, 1) or (B, 1, T, 1) for a batch of offsets, and of keys with as many axes (…, S)."""
    require(T >= 1, "T", T, "must be at least 1")
    require(S is None or S >= 1, "S", S, "must be at least 1")
    require(offset is not None or S is None or S == T, "offset", offset, f"is required when S = {S} differs from T = {T}")
    offset = torch.as_tensor(0 if offset is None else offset)
    queries = torch.arange(T, device=offset.device)[:, None]
    queries = queries[None, None] + offset[:, None, None, None] if offset.ndim else queries + offset
    return queries, torch.arange(S or T, device=offset.device).reshape((1,) * (queries.ndim - 1) + (-1,))


def causal_mask(T: int, S: int | None = None, offset: Any = None) -> Tensor:
    """Each query sees the keys up to its own position: (T, S), or (B, 1, T, S) for offsets (B,).

    `offset` is the position of the first query among the keys; it is required when S differs from T.
    """
    queries, keys = _positions(T, S, offset)
    return keys <= queries


def window_mask(T: int, S: int | None = None, offset: Any = None, *, window: tuple[int | None, int | None]) -> Tensor:
    """Each query sees `window` = (left, right) neighbours beside itself; None leaves that side open. Shapes as in causal_mask.

    Raises InputError for a negative side.
    """
    queries, keys = _positions(T, S, offset)
    distance = keys - queries
    left, right = window
    for side in window:
        require(side is None or side >= 0, "window", window, "must be (left, right), integers of at least 0 or None for an open side")
    mask = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        mask = mask & (distance >= -left)
    if right is not None:
        mask = mask & (distance <= right)
    return mask


def padding_mask(lengths: Any, S: int) -> Tensor:
    """Only the first lengths[b] keys of row b are seen: (B, 1, 1, S) from lengths (B,) integers; any batch, where the original's helper raises.

    Raises InputError when lengths lie outside [0, S].
    """
    lengths = torch.as_tensor(lengths)
    check_lengths("lengths", lengths, S)
    return (torch.arange(S, device=lengths.device)[None, :] < lengths[:, None])[:, None, None, :]


def combined_mask(lengths: Any, T: int) -> Tensor:
    """Causal and padding: (B, 1, T, T)."""
    padding = padding_mask(lengths, T)
    return causal_mask(T).to(padding.device)[None, None] & padding


def permutation_mask(order: Any) -> Tensor:
    """Position p sees the positions that stand before p in `order` (XLNet: Yang et al. 2019, section 2.2).

    (T, T) for one order (T,), (B, 1, T, T) for an order a row (B, T), both known on the host. The first position in an order sees nothing; for
    [2, 0, 3, 1] position 3 sees 2 and 0, as in the original's function, from which its printed example differs.
    Raises InputError when an order is not a permutation of 0 … T - 1.
    """
    order = np.asarray(order)
    integers = order.ndim in (1, 2) and order.size >= 1 and np.issubdtype(order.dtype, np.integer)
    is_permutation = integers and bool((np.sort(order, axis=-1) == np.arange(order.shape[-1])).all())
    require(is_permutation, "order", order.tolist(), "must be a permutation of 0 … T - 1, or one a row")
    rank = np.argsort(order, axis=-1)
    mask = rank[..., None, :] < rank[..., :, None]
    return torch.from_numpy(mask if order.ndim == 1 else mask[:, None])


def bidirectional_mask(T: int, S: int | None = None) -> Tensor:
    """Everything sees everything: (T, S)."""
    require(T >= 1, "T", T, "must be at least 1")
    require(S is None or S >= 1, "S", S, "must be at least 1")
    return torch.ones(T, S or T, dtype=torch.bool)


def visible_counts(mask: Any) -> Tensor:
    """Number of keys that each query sees: the mask's shape without its last axis."""
    return torch.as_tensor(mask).sum(dim=-1)


def as_tensor(argument: str, values: Any) -> Tensor:
    """`values` as a tensor. Raises InputError for what makes none, such as rows of different lengths."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(argument, describe(values), "must be an array of numbers, its rows of one length") from None


def check_lengths(argument: str, lengths: Tensor, limit: int) -> None:
    """Raises InputError unless `lengths` is (B,) integers within [0, limit]."""
    integers = isinstance(lengths, Tensor) and not (lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool)
    require(integers and lengths.ndim == 1, argument, describe(lengths), "must be integers of shape (B,)")
    inside = bool(((lengths >= 0) & (lengths <= limit)).all())
    require(inside, argument, lengths.tolist(), f"must lie in [0, {limit}]")
