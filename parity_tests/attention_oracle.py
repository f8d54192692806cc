"""Attention in numpy and float64, written from the definition alone: what every implementation is judged against, and how far rounding may take one.

The limits are first-order error bounds, computed from the float64 run beside each value; u is the unit roundoff of the accumulator (float32, or
float64 for float64), w that of the arrays (Higham 2002, "Accuracy and Stability of Numerical Algorithms", chapters 2 and 3; sums of n terms: λ √n u,
Higham & Mary 2019, theorem 2.4, with λ = 4, which random errors exceed once in 3,000 sums).

- A score s = scale · q · k + bias is off by e_s = u (λ √Dh + 3) (scale |q| · |k| + |bias|), the terms' sizes whatever their signs.
- A weight p = exp(s − lse): relative error r = e_s + Σ p e_s + u (λ √S + c), c for the exponential, the quotient and the rescaling of partial sums.
- lse: Σ p e_s + u (λ √S + c + 2 |lse|).
- out = Σ p v: Σ p |v| (r + u λ √S + w) + w |out|, where the first w is the weight's own rounding before the product.
- D = Σ do · out, the row's share of the gradient: Σ |do| (error of out) + u λ √Dv Σ |do · out|.
- dp = do · v: u λ √Dv |do| · |v|, and w |dp| since it may be kept in the arrays' dtype.
- ds = p (dp − D + dlse): p (error of dp + error of D) + (r + 3 u) p (|dp| + |D| + |dlse|) + w |ds|, the last for its rounding before the products.
- dq, dk, dv, dbias are sums of products with these: errors of the factors, λ √n u for the sum and w for the result's own rounding.
- Numbers below float16's normal range lose up to half of its smallest step, those below float32's may be flushed to 0.
"""

import dataclasses
from typing import Any

import numpy as np

from parity_tests.tolerances import ELEMENTARY, TINY, UNIT

LAMBDA = 4.0
"""Standard deviations of a sum's rounding error that are allowed."""

STEPS = 2 * ELEMENTARY + 4
"""Roundings of a weight beside its score's and its sum's: exponential, rescaling, difference from the peak, quotient, product with the scale."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of `attend` in numpy, and the cotangents of its results."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_out: np.ndarray
    d_lse: np.ndarray
    bias: np.ndarray | None = None
    mask: np.ndarray | None = None
    kv_lengths: np.ndarray | None = None
    query_offset: Any = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    dropout_rate: float = 0.0
    dropout_key: np.ndarray | None = None
    empty_rows: str = "zero"

    def options(self) -> dict[str, Any]:
        """Everything but q, k, v, bias and the cotangents, as keyword arguments."""
        taken = ("q", "k", "v", "bias", "d_out", "d_lse")
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in taken}


@dataclasses.dataclass(frozen=True)
class Answer:
    """A result in float64 and the largest error that rounding explains, element by element."""

    value: np.ndarray
    limit: np.ndarray

    def excess(self, found: Any) -> float:
        """The largest error over its limit: at most 1 for a right answer; infinity where NaN or infinity does not stand where it should."""
        found = np.asarray(found).astype(np.float64)
        if found.shape != self.value.shape or not _same_specials(found, self.value):
            return float("inf")
        fine = np.isfinite(self.value)
        error = np.abs(np.where(fine, found, 0.0) - np.where(fine, self.value, 0.0))
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(error == 0.0, 0.0, error / np.where(fine, self.limit, np.inf))
        return float(ratio.max(initial=0.0))


def _same_specials(a: np.ndarray, b: np.ndarray) -> bool:
    return all(np.array_equal(special(a), special(b)) for special in (np.isnan, np.isposinf, np.isneginf))


def solve(problem: Problem, dtype: str) -> dict[str, Answer]:
    """out, weights, lse, dq, dk, dv and, with a bias, dbias, with their limits for arrays of `dtype`.

    The gradients are those of Σ d_out · out + Σ d_lse · lse, where lse is finite.
    """
    B, T, H, Dh = problem.q.shape
    S, K = problem.k.shape[1:3]
    Dv = problem.v.shape[3]
    scale = Dh**-0.5 if problem.scale is None else problem.scale
    u = UNIT["float64" if dtype == "float64" else "float32"]
    w = UNIT[dtype]
    w_inner = 0.0 if w == u else w
    floor = w * 2.0**-14 if dtype == "float16" else TINY["float32"]
    shape = dict(out=(B, T, H, Dv), weights=(B, H, T, S), lse=(B, T, H), dq=(B, T, H, Dh), dk=(B, S, K, Dh), dv=(B, S, K, Dv), dbias=(B, H, T, S))
    value, limit = ({name: np.zeros(size) for name, size in shape.items()} for _ in range(2))
    d_scores_size = np.zeros((B, H, T, S))
    seen = visible(problem)
    keep = kept(problem)
    for b in range(B):
        for h in range(H):
            kv = h // (H // K)
            q, k, v = (_double(x) for x in (problem.q[b, :, h], problem.k[b, :, kv], problem.v[b, :, kv]))
            do, dlse = _double(problem.d_out[b, :, h]), _double(problem.d_lse[b, :, h])[:, None]
            bad_key = ~(np.isfinite(k).all(-1) & np.isfinite(v).all(-1))
            bad_row = (seen[b, h] & (bad_key[None, :] | ~np.isfinite(q).all(-1)[:, None])).any(-1)
            q, k, v = (np.where(np.isfinite(x), x, 0.0) for x in (q, k, v))
            bias = np.zeros((T, S)) if problem.bias is None else _double(np.broadcast_to(problem.bias, (B, H, T, S))[b, h])
            hidden = ~seen[b, h]
            empty = hidden.all(-1)
            bias = np.where(hidden, 0.0, bias)
            s = scale * (q @ k.T) + bias
            e_s = u * (LAMBDA * np.sqrt(Dh) + 3) * (abs(scale) * np.abs(q) @ np.abs(k).T + np.abs(bias))
            s = np.where(hidden, -np.inf, s)
            if problem.empty_rows != "zero":
                s[empty] = 0.0 if problem.empty_rows == "uniform" else np.nan
            peak = np.where(s.max(-1, keepdims=True) == -np.inf, 0.0, s.max(-1, keepdims=True))
            powers = np.exp(s - peak)
            total = powers.sum(-1, keepdims=True)
            p = powers / np.where(total == 0.0, 1.0, total)
            with np.errstate(divide="ignore"):
                lse = np.where(empty[:, None], -np.inf, peak + np.log(total))
            e_s = np.where(hidden, 0.0, e_s)
            r = e_s + (p * e_s).sum(-1, keepdims=True) + u * (LAMBDA * np.sqrt(S) + STEPS)
            value["weights"][b, h], limit["weights"][b, h] = p, p * r + TINY["float32"]
            value["lse"][b, :, h] = lse[:, 0]
            size_lse = np.where(np.isfinite(lse), np.abs(lse), 0.0)
            limit["lse"][b, :, h] = ((p * e_s).sum(-1, keepdims=True) + u * (LAMBDA * np.sqrt(S) + STEPS + 2 * size_lse))[:, 0]

            share = keep[b, h] / (1.0 - problem.dropout_rate)
            dropped = p * share
            out = dropped @ v
            e_dropped = dropped * (r + w_inner) + floor
            e_out = (e_dropped + dropped * u * LAMBDA * np.sqrt(S)) @ np.abs(v) + w * np.abs(out) + floor
            value["out"][b, :, h], limit["out"][b, :, h] = out, e_out

            D = (do * out).sum(-1, keepdims=True)
            e_D = (np.abs(do) * e_out).sum(-1, keepdims=True) + u * LAMBDA * np.sqrt(Dv) * (np.abs(do) * np.abs(out)).sum(-1, keepdims=True)
            dp = (do @ v.T) * share
            e_dp = u * LAMBDA * np.sqrt(Dv) * (np.abs(do) @ np.abs(v).T) * share + (w_inner + 2 * u) * np.abs(dp) + floor
            dlse = np.where(empty[:, None], 0.0, dlse)
            ds = p * (dp - D + dlse)
            e_ds = p * (e_dp + e_D) + (r + 3 * u) * p * (np.abs(dp) + np.abs(D) + np.abs(dlse)) + w_inner * np.abs(ds) + floor
            ds, e_ds = np.where(hidden, 0.0, ds), np.where(hidden, 0.0, e_ds)
            ds[empty], e_ds[empty] = 0.0, 0.0
            nan = bad_row[:, None] & ~hidden
            if nan.any():
                p_out = np.where(nan, np.nan, dropped)
                ds = np.where(nan, np.nan, ds)
                value["out"][b, bad_row, h] = np.nan
                value["weights"][b, h, bad_row] = np.nan
                value["lse"][b, bad_row, h] = np.nan
            else:
                p_out = dropped
            value["dbias"][b, h], limit["dbias"][b, h] = ds, e_ds
            d_scores_size[b, h] = np.abs(np.nan_to_num(ds))
            value["dq"][b, :, h] = scale * (ds @ k)
            limit["dq"][b, :, h] = abs(scale) * ((e_ds + (u * (LAMBDA * np.sqrt(S) + 2)) * np.abs(ds)) @ np.abs(k))
            value["dk"][b, :, kv] += scale * (ds.T @ q)
            terms = T * H // K
            limit["dk"][b, :, kv] += abs(scale) * ((e_ds + (u * (LAMBDA * np.sqrt(terms) + 2)) * np.abs(ds)).T @ np.abs(q))
            value["dv"][b, :, kv] += p_out.T @ do
            limit["dv"][b, :, kv] += (e_dropped + dropped * u * LAMBDA * np.sqrt(terms)).T @ np.abs(do)
    for name in ("dq", "dk", "dv"):
        limit[name] += w * np.abs(np.nan_to_num(value[name])) + floor
    if problem.bias is None:
        del value["dbias"]
    else:
        _sum_to(problem.bias.shape, value, limit, d_scores_size, u, UNIT[str(problem.bias.dtype)])
    return {name: Answer(value[name], limit[name]) for name in value}


def _sum_to(shape: tuple[int, ...], value: dict[str, Any], limit: dict[str, Any], sizes: np.ndarray, u: float, w: float) -> None:
    """The gradient of a bias that was broadcast is the sum over what it was broadcast to."""
    shape = (1,) * (4 - len(shape)) + shape
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    count = int(np.prod([sizes.shape[axis] for axis in axes]))
    value["dbias"] = value["dbias"].sum(axes, keepdims=True)
    limit["dbias"] = limit["dbias"].sum(axes, keepdims=True) + u * LAMBDA * np.sqrt(count) * sizes.sum(axes, keepdims=True)
    limit["dbias"] += w * np.abs(np.nan_to_num(value["dbias"]))


def visible(problem: Problem) -> np.ndarray:
    """(B, H, T, S) booleans from the definition: every limit by comparing positions."""
    B, T, H, _ = problem.q.shape
    S = problem.k.shape[1]
    offset = np.broadcast_to(np.asarray(0 if problem.query_offset is None else problem.query_offset), (B,))
    position = offset[:, None, None, None] + np.arange(T)[None, None, :, None]
    key = np.arange(S)[None, None, None, :]
    seen = np.ones((B, H, T, S), bool)
    if problem.causal:
        seen &= key <= position
    if problem.window is not None:
        left, right = problem.window
        seen &= key >= position - (S + T + abs(offset).max() if left is None else left)
        seen &= key <= position + (S + T + abs(offset).max() if right is None else right)
    if problem.kv_lengths is not None:
        seen &= key < np.asarray(problem.kv_lengths)[:, None, None, None]
    if problem.mask is not None:
        seen &= problem.mask
    if problem.bias is not None:
        seen &= ~np.isneginf(problem.bias.astype(np.float64))
    return seen


def kept(problem: Problem) -> np.ndarray:
    """(B, H, T, S): 1 where dropout keeps a weight, else 0."""
    B, T, H, _ = problem.q.shape
    S = problem.k.shape[1]
    if problem.dropout_rate == 0.0:
        return np.ones((B, H, T, S))
    offset = np.broadcast_to(np.asarray(0 if problem.query_offset is None else problem.query_offset), (B,))
    assert problem.dropout_key is not None
    key = tuple(np.asarray(word, np.uint32) for word in problem.dropout_key)
    position = (offset[:, None, None, None] + np.arange(T)[None, None, :, None]).astype(np.uint32)
    for word in (np.arange(B)[:, None, None, None], np.arange(H)[None, :, None, None], position):
        key = _fold(key, np.asarray(word, np.uint32))
    bits = _hash(*key, np.arange(S, dtype=np.uint32)[None, None, None, :])
    return (bits >= np.uint32(round(problem.dropout_rate * 2**32))).astype(np.float64)


def _fold(key: tuple[np.ndarray, ...], word: np.ndarray) -> tuple[np.ndarray, ...]:
    return _hash(key[0], key[1], word), _hash(key[1] ^ np.uint32(0x85EBCA6B), key[0], word)


def _hash(k0: np.ndarray, k1: np.ndarray, word: np.ndarray) -> np.ndarray:
    """The keyed hash of `flax_gpt/random.py`, written again."""
    with np.errstate(over="ignore"):
        x = word * np.uint32(0x9E3779B1) + k0
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = ((x ^ (x >> np.uint32(15))) ^ k1) * np.uint32(0x846CA68B)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x9E3779B1)
        return x ^ (x >> np.uint32(15))


def _double(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float64)
