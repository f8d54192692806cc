"""`attend`, the only door to attention. Mirrors `flax_gpt/kernels/api.py`, with one implementation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flax_gpt.errors import describe, is_integer, is_number, require
from torch_ref import masks, random
from torch_ref.kernels import dense
from torch_ref.kernels.case import Case, EmptyRows, Inputs, Shape, Window

DTYPES = ("float32", "bfloat16", "float16", "float64")
FURTHEST = 2**29
"""Positions and windows stay below this, so that sums of three of them fit into int32."""
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    kv_lengths: Any = None,
    window: Window | None = None,
    query_offset: Any = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    implementation: str = "auto",
    empty_rows: EmptyRows = "zero",
    return_weights: bool = False,
    return_lse: bool = False,
    assume_finite: bool = False,
) -> Any:
    """softmax(scale · Q Kᵀ + bias) V over the visible keys (Vaswani et al. 2017, equation 1), grouped heads as in Ainslie et al. 2023.

    A key is visible when every one of causal, window, kv_lengths and mask allows it and its bias is not −∞. What is hidden reaches nothing,
    neither forward nor in a gradient, NaN and infinity included; a visible NaN or infinity in k or v makes its query's whole row NaN.
    Scores, softmax and lse are float32 (float64 for float64), whatever the dtype.

    Args:
      q: (B, T, H, Dh), float32, bfloat16, float16 or float64.
      k: (B, S, K, Dh), of the same dtype; H is a multiple of K and query head h reads key/value head h // (H / K).
      v: (B, S, K, Dv), of the same dtype.
      causal: a query at position p sees the keys 0 … p.
      mask: booleans that broadcast to (B, H, T, S), True = may attend.
      bias: floats that broadcast to (B, H, T, S), added to the scaled scores; has a gradient.
      kv_lengths: (B,) integers, the keys of each row that exist, in [0, S].
      window: (left, right) neighbours visible beside a query's own position; None leaves that side open.
      query_offset: position of the first query among the keys, an integer or (B,) integers. Required with causal or window when T differs
        from S, else 0. Also counts the queries for dropout.
      scale: finite number, by default 1 / √Dh.
      dropout_rate: share of the weights that is dropped, in [0, 1); the others are divided by 1 − dropout_rate.
      dropout_key: (2,) 32-bit words in int64 (see torch_ref.random); or (B, H, 2), keys already folded with row and head. The draw
        depends on key, row, head and the positions of query and key alone.
      implementation: "auto" or "dense", the same here.
      empty_rows: what a query that sees nothing gives. "zero": output 0, weights 0, finite gradients. "uniform": the mean of all values, as a
        −1e9 fill gives. "nan": NaN, as a −∞ fill gives. lse is −∞ in each.
      return_weights: also return the weights, before dropout.
      return_lse: also return log Σ exp(score) over the visible keys.
      assume_finite: the caller's word that q, k and v hold neither NaN nor infinity, so that none is looked for: a hidden one may then spoil rows.
        For caches, which every step would else search whole.

    Returns:
      out (B, T, H, Dv) of q's dtype, or a tuple (out[, weights (B, H, T, S)][, lse (B, T, H)]).

    Raises:
      InputError: an argument of the wrong type, shape, dtype or value.
    """
    require(isinstance(implementation, str) and implementation in ("auto", "dense"), "implementation", implementation, "must be 'auto' or 'dense'")
    case, inputs = _read(q, k, v, causal, mask, bias, kv_lengths, window, query_offset, scale, dropout_rate, dropout_key, empty_rows,
                         return_weights, return_lse, assume_finite)  # fmt: skip
    out, weights, lse = dense.attend(case, q, k, v, inputs)
    results = [out] + [weights] * return_weights + [lse] * return_lse
    return results[0] if len(results) == 1 else tuple(results)


def _read(q: Any, k: Any, v: Any, causal: Any, mask: Any, bias: Any, kv_lengths: Any, window: Any, query_offset: Any, scale: Any,
          dropout_rate: Any, dropout_key: Any, empty_rows: Any, return_weights: Any, return_lse: Any,
          assume_finite: Any) -> tuple[Case, Inputs]:  # fmt: skip
    """Checks every argument on the host and sorts it into what is static and what is an array."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        require(getattr(value, "ndim", None) == 4, name, describe(value), "must have four axes: (B, T, H, Dh) for q, (B, S, K, Dh) for k and v")
        require(_name(value.dtype) in DTYPES, name, _name(value.dtype), f"must be of dtype {', '.join(DTYPES)}")
        require(min(value.shape) >= 1, name, list(value.shape), "must have no axis of length 0")
        require(value.dtype == q.dtype, name, _name(value.dtype), f"must be of q's dtype, {_name(q.dtype)}")
    B, T, H, Dh = q.shape
    S, K = k.shape[1:3]
    require(k.shape[0] == B and k.shape[3] == Dh, "k", list(k.shape), f"must be (B, S, K, Dh) with q's B = {B} and Dh = {Dh}")
    require(v.shape[:3] == k.shape[:3], "v", list(v.shape), f"must be (B, S, K, Dv) with k's (B, S, K) = {tuple(k.shape[:3])}")
    require(H % K == 0, "k", list(k.shape), f"must have a number of heads that divides q's, {H}")

    for name, value in (("causal", causal), ("return_weights", return_weights), ("return_lse", return_lse), ("assume_finite", assume_finite)):
        require(isinstance(value, bool), name, value, "must be True or False, not a tensor")
    if window is not None:
        sides = isinstance(window, Sequence) and len(window) == 2
        require(sides and all(side is None or (is_integer(side) and 0 <= side < FURTHEST) for side in window), "window", window,
                "must be (left, right), integers in [0, 2**29) or None for an open side")  # fmt: skip
        window = tuple(None if side is None else int(side) for side in window)
    require(scale is None or (is_number(scale) and abs(scale) < 1e30), "scale", scale, "must be a number within ±1e30")
    require(is_number(dropout_rate) and 0 <= dropout_rate < 1, "dropout_rate", dropout_rate, "must be a number in [0, 1)")
    require(isinstance(empty_rows, str) and empty_rows in ("zero", "uniform", "nan"), "empty_rows", empty_rows, "must be 'zero', 'uniform' or 'nan'")

    if mask is not None:
        boolean = getattr(mask, "dtype", None) == torch.bool
        require(boolean, "mask", describe(mask), "must be a boolean array, True = may attend; pass an additive mask as bias, a 0/1 mask as mask != 0")
        mask = _four_axes("mask", mask, (B, H, T, S))
    if bias is not None:
        floating = isinstance(bias, Tensor) and bias.is_floating_point()
        require(floating, "bias", describe(bias), "must be a floating array that is added to the scores; pass a boolean one as mask")
        bias = _four_axes("bias", bias, (B, H, T, S))
    if kv_lengths is not None:
        kv_lengths = masks.as_tensor("kv_lengths", kv_lengths).to(q.device)
        masks.check_lengths("kv_lengths", kv_lengths, S)
        require(kv_lengths.shape == (B,), "kv_lengths", list(kv_lengths.shape), f"must have shape (B,) = ({B},)")
    needed = causal or window is not None
    require(query_offset is not None or not needed or T == S, "query_offset", None,
            f"is required with causal or window when T = {T} differs from S = {S}: the position of the first query among the keys")  # fmt: skip
    offset = 0 if query_offset is None else query_offset
    if not is_integer(offset):
        whole = isinstance(offset, Tensor) and offset.dtype in INTEGERS and offset.shape in ((), (B,))
        require(whole, "query_offset", describe(offset), f"must be an integer, or an integer tensor of shape () or (B,) = ({B},)")
    values = offset.tolist() if isinstance(offset, Tensor) else offset
    furthest = max(map(abs, values)) if isinstance(values, list) else abs(values)
    require(furthest < FURTHEST, "query_offset", values, "must lie within ±2**29")
    if dropout_rate > 0:
        dropout_key = _row_and_head_keys(dropout_key, B, H)

    case = Case(
        batch=B, queries=T, keys=S, heads=H, kv_heads=K, width=Dh, value_width=v.shape[3], dtype=_name(q.dtype), causal=causal, window=window,
        scale=Dh**-0.5 if scale is None else float(scale), mask=None if mask is None else tuple(mask.shape),
        bias=None if bias is None else tuple(bias.shape), lengths=kv_lengths is not None, dropout_rate=float(dropout_rate), empty_rows=empty_rows,
        assume_finite=assume_finite,
    )  # fmt: skip
    inputs = Inputs(torch.as_tensor(offset, device=q.device), mask, bias, kv_lengths, dropout_key if dropout_rate > 0 else None)
    return case, inputs


def _four_axes(name: str, x: Tensor, whole: Shape) -> Tensor:
    shape = (1,) * (4 - x.ndim) + tuple(x.shape)
    fits = x.ndim <= 4 and all(size in (1, full) for size, full in zip(shape, whole, strict=True))
    require(fits, name, list(x.shape), f"must broadcast to (B, H, T, S) = {whole}")
    return x.reshape(shape)


def _row_and_head_keys(key: Any, B: int, H: int) -> Tensor:
    require(key is not None, "dropout_key", None, "is required when dropout_rate is above 0")
    try:
        key = random.as_key(key)
    except (TypeError, ValueError, RuntimeError) as error:  # the last two: rows of different lengths
        require(False, "dropout_key", describe(key), str(error))
    fits = tuple(key.shape) in ((2,), (B, H, 2))
    require(fits, "dropout_key", list(key.shape), f"must have shape (2,), or (B, H, 2) = {(B, H, 2)} once folded")
    return random.fold_coordinates(key, (B, H)) if key.ndim == 1 else key


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
