"""Attention as the formula reads: the whole map in memory. Mirrors `flax_gpt/kernels/dense.py`.

softmax(scale · Q Kᵀ + bias) V over what is visible (Vaswani et al. 2017, equation 1).
"""

from typing import Any

import torch
from torch import Tensor

from torch_ref import masks, random
from torch_ref.kernels.case import Case, Inputs, clean


def attend(case: Case, q: Tensor, k: Tensor, v: Tensor, given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, T, H, Dh), k (B, S, K, Dh), v (B, S, K, Dv) → out (B, T, H, Dv), weights (B, H, T, S) before dropout, lse (B, T, H)."""
    dtype = case.accumulator
    (q, bad_q), (k, bad_k), (v, bad_v) = (clean(x, dtype, case.assume_finite) for x in (q, k, v))
    bad_keys = _to_heads(case, bad_k + bad_v)

    scored = scores(case, q, k) + bad_q.permute(0, 2, 1)[:, :, :, None] + bad_keys
    if given.bias is not None:
        scored = scored + given.bias.to(dtype)

    seen = visible(case, given)
    some = torch.any(seen, dim=-1, keepdim=True)
    scored = torch.where(seen, scored, torch.where(some, -torch.inf, _fill(case, bad_keys)))

    peak = torch.amax(scored, dim=-1, keepdim=True).detach()
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    powers = torch.exp(scored - peak)
    total = torch.sum(powers, dim=-1, keepdim=True)
    nothing = total == 0.0
    weights = torch.where(seen | ~some, powers / torch.where(nothing, 1.0, total), 0.0)
    lse = torch.where(nothing | ~some, -torch.inf, peak + torch.log(torch.where(nothing, 1.0, total)))

    dropped = weights
    if case.dropout_rate > 0.0:
        dropped = torch.where(keep(case, given), weights / (1.0 - case.dropout_rate), 0.0)
    return mix(case, dropped, v), weights, lse[..., 0].permute(0, 2, 1)


def scores(case: Case, q: Tensor, k: Tensor) -> Tensor:
    """Scaled products of q (B, T, H, Dh) and k (B, S, K, Dh), (B, H, T, S), before bias and mask."""
    products = _product("btkgd,bskd->bkgts", _split_heads(case, q), k, case.accumulator)
    return _merge_heads(case, products) * case.scale


def mix(case: Case, weights: Tensor, v: Tensor) -> Tensor:
    """Sums of v (B, S, K, Dv) by weights (B, H, T, S), (B, T, H, Dv)."""
    grouped = weights.reshape(case.batch, case.kv_heads, case.group, case.queries, case.keys)
    out = _product("bkgts,bskd->btkgd", grouped.to(v.dtype), v, case.accumulator)
    return out.reshape(case.batch, case.queries, case.heads, case.value_width).to(v.dtype)


def visible(case: Case, given: Inputs) -> Tensor:
    """What may be attended to, (B or 1, H or 1, T or 1, S) booleans. A bias of −∞ hides as a mask does."""
    seen = torch.ones(1, 1, 1, case.keys, dtype=torch.bool, device=given.query_offset.device)
    if case.causal:
        seen = seen & _four_axes(masks.causal_mask(case.queries, case.keys, given.query_offset))
    if case.window is not None:
        seen = seen & _four_axes(masks.window_mask(case.queries, case.keys, given.query_offset, window=case.window))
    if given.kv_lengths is not None:
        seen = seen & masks.padding_mask(given.kv_lengths, case.keys)
    if given.mask is not None:
        seen = seen & given.mask
    if given.bias is not None:
        seen = seen & (given.bias != -torch.inf)
    return seen


def keep(case: Case, given: Inputs) -> Tensor:
    """Which weights dropout keeps, (B, H, T, S): drawn at (row, head, position of the query, position of the key)."""
    assert given.dropout_key is not None
    device = given.query_offset.device
    rows = given.query_offset.reshape(-1, 1, 1) + torch.arange(case.queries, device=device)[None, None, :]
    keys = random.fold(given.dropout_key[:, :, None, :], rows)
    columns = torch.arange(case.keys, device=device)[None, None, None, :]
    return random.bits(keys[..., None, :], columns) >= random.threshold(case.dropout_rate)


def _fill(case: Case, bad_keys: Tensor) -> Any:
    """Score of every key for a query that sees nothing: equal scores give the uniform row of the originals' −1e9 fill."""
    return {"zero": -torch.inf, "uniform": 0.0 * bad_keys, "nan": torch.nan}[case.empty_rows]


def _product(pattern: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.einsum(pattern, a.to(dtype), b.to(dtype))


def _split_heads(case: Case, q: Tensor) -> Tensor:
    return q.reshape(case.batch, case.queries, case.kv_heads, case.group, case.width)


def _merge_heads(case: Case, scores: Tensor) -> Tensor:
    return scores.reshape(case.batch, case.heads, case.queries, case.keys)


def _to_heads(case: Case, per_key: Tensor) -> Tensor:
    """(B, S, K) → (B, H, 1, S)."""
    return torch.repeat_interleave(per_key.permute(0, 2, 1), case.group, dim=1)[:, :, None, :]


def _four_axes(mask: Tensor) -> Tensor:
    return mask if mask.ndim == 4 else mask[None, None]
