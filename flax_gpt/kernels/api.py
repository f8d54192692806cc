"""`attend`, the only door to attention, and the table that chooses who serves a call."""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flax_gpt import masks, random
from flax_gpt.errors import describe, is_integer, is_number, require
from flax_gpt.kernels.case import Case, EmptyRows, Inputs, Shape, Window

FURTHEST = 2**29
"""Positions and windows stay below this, so that sums of three of them fit into int32."""

DTYPES = ("float32", "bfloat16", "float16", "float64")

HOMES = {
    "dense": "flax_gpt.kernels.dense",
    "blocked": "flax_gpt.kernels.blocked",
    "pallas_tpu": "flax_gpt.kernels.pallas_tpu",
    "pallas_gpu": "flax_gpt.kernels.pallas_gpu",
    "cudnn": "flax_gpt.kernels.vendor:cudnn",
    "splash": "flax_gpt.kernels.vendor:splash",
}
"""Implementation → module, or a name in one; imported on first use.

Each has refusal(case) and attend(case, q, k, v, inputs) -> (out, weights | None, lse | None)."""

TABLE: dict[str, tuple[str, ...]] = {
    "cpu": ("blocked", "dense"),
    "gpu": ("cudnn", "pallas_gpu", "blocked", "dense"),
    "tpu": ("pallas_tpu", "splash", "blocked", "dense"),
}
"""Platform → implementations in the order in which "auto" asks them; the first that does not refuse runs. dense never refuses."""

SMALL, SMALL_AND_FINITE = 64 * 64, 8 * 8
"""Scores a head, T · S, up to which the whole map stays in a core's first cache and strips gain nothing (docs/performance.md); the second with
`assume_finite`, which lets XLA join the operations of a strip."""


def _one_query(case: Case) -> str | None:
    return "with one query the map is as small as the keys, so dense is faster" if case.queries == 1 else None


def _too_small(case: Case) -> str | None:
    if case.queries == 1:
        return _one_query(case)
    most = SMALL_AND_FINITE if case.assume_finite else SMALL
    if case.queries * case.keys <= most:
        return f"T · S = {case.queries * case.keys} scores are at most {most}, where dense is faster"
    return None


def _double(case: Case) -> str | None:
    return "float64 serves comparison, where dense is the reference" if case.dtype == "float64" else None


PREFERENCES: dict[tuple[str, str], tuple[Callable[[Case], str | None], ...]] = {
    ("cpu", "blocked"): (_double, _too_small),
    ("gpu", "blocked"): (_double, _too_small),
    ("tpu", "blocked"): (_double, _too_small),
    ("gpu", "pallas_gpu"): (_one_query,),
    ("gpu", "cudnn"): (_one_query,),
    ("tpu", "pallas_tpu"): (_one_query,),
    ("tpu", "splash"): (_one_query,),
}
"""(platform, implementation) → why "auto" passes it over although it could serve, or None: figures, not limits."""


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    mask: Array | None = None,
    bias: Array | None = None,
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
      kv_lengths: (B,) integers, the keys of each row that exist, in [0, S]; refused outside it, or clamped to it when traced.
      window: (left, right) neighbours visible beside a query's own position; None leaves that side open.
      query_offset: position of the first query among the keys, an integer or (B,) integers. Required with causal or window when T differs
        from S, else 0. Also counts the queries for dropout.
      scale: finite number, by default 1 / √Dh.
      dropout_rate: share of the weights that is dropped, in [0, 1); the others are divided by 1 − dropout_rate.
      dropout_key: (2,) uint32 (see flax_gpt.random) or a key of jax.random; or (B, H, 2), keys already folded with row and head. The draw
        depends on key, row, head and the positions of query and key alone.
      implementation: "auto" or a name in HOMES.
      empty_rows: what a query that sees nothing gives. "zero": output 0, weights 0, finite gradients. "uniform": the mean of all values, as a
        −1e9 fill gives. "nan": NaN, as a −∞ fill gives. lse is −∞ in each.
      return_weights: also return the weights, before dropout.
      return_lse: also return log Σ exp(score) over the visible keys.
      assume_finite: the caller's word that q, k and v hold neither NaN nor infinity, so that none is looked for: a hidden one may then spoil rows.
        For caches, which every step would else search whole.

    Static under jit: causal, window, scale, dropout_rate, implementation, empty_rows, return_weights, return_lse, assume_finite.

    Returns:
      out (B, T, H, Dv) of q's dtype, or a tuple (out[, weights (B, H, T, S)][, lse (B, T, H)]).

    Raises:
      InputError: an argument of the wrong type, shape, dtype or value.
      NotImplementedError: the implementation asked for by name cannot serve the call.
    """
    case, inputs = _read(q, k, v, causal, mask, bias, kv_lengths, window, query_offset, scale, dropout_rate, dropout_key, empty_rows,
                         return_weights, return_lse, assume_finite)  # fmt: skip
    name, _ = choose(case, implementation)
    # jax would compute in float32 and only warn.
    double: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    require(case.dtype != "float64" or double, "q", describe(q), "is float64, which needs jax.enable_x64(True)")
    out, weights, lse = _run(case, name, q, k, v, inputs)
    results = [out] + [weights] * return_weights + [lse] * return_lse
    return results[0] if len(results) == 1 else tuple(results)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation serves a call, and why each one before it in the table was passed over."""

    case: Case
    chosen: str
    passed_over: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.chosen} on {self.case.platform}, {self.case.dtype}"]
        return "\n".join(lines + [f"  {name} passed over: {reason}" for name, reason in self.passed_over])


def explain(q: Array, k: Array, v: Array, *, implementation: str = "auto", **arguments: Any) -> Explanation:
    """What `attend` would run with the same arguments; print it. Raises what `attend` raises."""
    defaults = dict(causal=False, mask=None, bias=None, kv_lengths=None, window=None, query_offset=None, scale=None, dropout_rate=0.0,
                    dropout_key=None, empty_rows="zero", return_weights=False, return_lse=False, assume_finite=False)  # fmt: skip
    for name in arguments:
        require(name in defaults, name, arguments[name], f"is not an argument of attend: {', '.join(defaults)}")
    case, _ = _read(q, k, v, **(defaults | arguments))
    chosen, passed = choose(case, implementation)
    return Explanation(case, chosen, tuple(passed))


def choose(case: Case, implementation: str = "auto") -> tuple[str, list[tuple[str, str]]]:
    """The implementation that serves `case`, and (name, reason) of each that was passed over.

    Raises NotImplementedError when the one asked for by name cannot serve it.
    """
    known = ("auto", *HOMES)
    require(isinstance(implementation, str) and implementation in known, "implementation", implementation, f"must be one of {', '.join(known)}")
    automatic = implementation == "auto"
    passed: list[tuple[str, str]] = []
    for name in TABLE[case.platform] if automatic else (implementation,):
        reason: str | None = _home(name).refusal(case)
        if automatic:
            preferences = (preference(case) for preference in PREFERENCES.get((case.platform, name), ()))
            reason = reason or next(filter(None, preferences), None)
        if reason is None:
            return name, passed
        passed.append((name, reason))
    raise NotImplementedError("; ".join(f"implementation = {name!r}: {reason}" for name, reason in passed))


def _home(name: str) -> Any:
    module, _, attribute = HOMES[name].partition(":")
    home = importlib.import_module(module)
    return getattr(home, attribute) if attribute else home


@functools.partial(jax.jit, static_argnames=("case", "name"), inline=True)
def _run(case: Case, name: str, q: Array, k: Array, v: Array, inputs: Inputs) -> tuple[Array, Array | None, Array | None]:
    return _home(name).attend(case, q, k, v, inputs)


def _read(q: Any, k: Any, v: Any, causal: Any, mask: Any, bias: Any, kv_lengths: Any, window: Any, query_offset: Any, scale: Any,
          dropout_rate: Any, dropout_key: Any, empty_rows: Any, return_weights: Any, return_lse: Any,
          assume_finite: Any) -> tuple[Case, Inputs]:  # fmt: skip
    """Checks every argument on the host and sorts it into what is static and what is an array."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        require(getattr(value, "ndim", None) == 4, name, describe(value), "must have four axes: (B, T, H, Dh) for q, (B, S, K, Dh) for k and v")
        require(str(value.dtype) in DTYPES, name, str(value.dtype), f"must be of dtype {', '.join(DTYPES)}")
        require(min(value.shape) >= 1, name, list(value.shape), "must have no axis of length 0")
        require(value.dtype == q.dtype, name, str(value.dtype), f"must be of q's dtype, {q.dtype}")
    B, T, H, Dh = q.shape
    S, K = k.shape[1:3]
    require(k.shape[0] == B and k.shape[3] == Dh, "k", list(k.shape), f"must be (B, S, K, Dh) with q's B = {B} and Dh = {Dh}")
    require(v.shape[:3] == k.shape[:3], "v", list(v.shape), f"must be (B, S, K, Dv) with k's (B, S, K) = {k.shape[:3]}")
    require(H % K == 0, "k", list(k.shape), f"must have a number of heads that divides q's, {H}")

    for name, value in (("causal", causal), ("return_weights", return_weights), ("return_lse", return_lse), ("assume_finite", assume_finite)):
        require(isinstance(value, bool | np.bool_), name, value, "must be True or False, known before tracing (static under jit)")
    if window is not None:
        sides = isinstance(window, Sequence) and len(window) == 2
        require(sides and all(side is None or (is_integer(side) and 0 <= side < FURTHEST) for side in window), "window", window,
                "must be (left, right), integers in [0, 2**29) or None for an open side, known before tracing")  # fmt: skip
        window = tuple(None if side is None else int(side) for side in window)
    require(scale is None or (is_number(scale) and abs(scale) < 1e30), "scale", scale, "must be a number within ±1e30, known before tracing")
    require(is_number(dropout_rate) and 0 <= dropout_rate < 1, "dropout_rate", dropout_rate, "must be a number in [0, 1), known before tracing")
    require(isinstance(empty_rows, str) and empty_rows in ("zero", "uniform", "nan"), "empty_rows", empty_rows, "must be 'zero', 'uniform' or 'nan'")

    if mask is not None:
        boolean = _dtype(mask) == jnp.bool_
        require(boolean, "mask", describe(mask), "must be a boolean array, True = may attend; pass an additive mask as bias, a 0/1 mask as mask != 0")
        mask = _four_axes("mask", mask, (B, H, T, S))
    if bias is not None:
        floating = jnp.issubdtype(_dtype(bias), jnp.floating)
        require(floating, "bias", describe(bias), "must be a floating array that is added to the scores; pass a boolean one as mask")
        bias = _four_axes("bias", bias, (B, H, T, S))
    if kv_lengths is not None:
        kv_lengths = masks.host_array("kv_lengths", kv_lengths)
        masks.check_lengths("kv_lengths", kv_lengths, S)
        require(np.shape(kv_lengths) == (B,), "kv_lengths", list(np.shape(kv_lengths)), f"must have shape (B,) = ({B},)")
        kv_lengths = jnp.asarray(kv_lengths).astype(int)
    needed = causal or window is not None
    require(query_offset is not None or not needed or T == S, "query_offset", None,
            f"is required with causal or window when T = {T} differs from S = {S}: the position of the first query among the keys")  # fmt: skip
    offset: Any = 0 if query_offset is None else query_offset
    static = is_integer(offset)
    if static:
        require(abs(offset) < FURTHEST, "query_offset", offset, "must lie within ±2**29")
        offset = int(offset)
    else:
        whole = jnp.issubdtype(_dtype(offset), jnp.integer) and np.shape(offset) in ((), (B,))
        require(whole, "query_offset", describe(offset), f"must be an integer, or an integer array of shape () or (B,) = ({B},)")
        if not isinstance(offset, jax.core.Tracer):
            near = np.abs(np.asarray(offset).astype(np.float64)) < FURTHEST
            require(bool(near.all()), "query_offset", np.asarray(offset).tolist(), "must lie within ±2**29")
    if dropout_rate > 0:
        dropout_key = _row_and_head_keys(dropout_key, B, H)

    case = Case(
        batch=B, queries=T, keys=S, heads=H, kv_heads=K, width=Dh, value_width=v.shape[3], dtype=str(q.dtype), platform=_platform(q),
        causal=bool(causal), window=window, scale=Dh**-0.5 if scale is None else float(scale),
        mask=None if mask is None else mask.shape, bias=None if bias is None else bias.shape, lengths=kv_lengths is not None,
        offset=offset if static else None, dropout_rate=float(dropout_rate), empty_rows=empty_rows,
        return_weights=bool(return_weights), return_lse=bool(return_lse), assume_finite=bool(assume_finite),
    )  # fmt: skip
    inputs = Inputs(mask, bias, kv_lengths, jnp.asarray(offset).astype(jnp.int32), dropout_key if dropout_rate > 0 else None)
    return case, inputs


def _four_axes(name: str, x: Array, whole: Shape) -> Array:
    shape = (1,) * (4 - x.ndim) + tuple(x.shape)
    fits = x.ndim <= 4 and all(size in (1, full) for size, full in zip(shape, whole, strict=True))
    require(fits, name, list(x.shape), f"must broadcast to (B, H, T, S) = {whole}")
    return jnp.asarray(x).reshape(shape)


def _row_and_head_keys(key: Any, B: int, H: int) -> Array:
    require(key is not None, "dropout_key", None, "is required when dropout_rate is above 0")
    try:
        key = random.as_key(key)
    except (TypeError, ValueError, RuntimeError) as error:  # the last two: rows of different lengths
        require(False, "dropout_key", describe(key), str(error))
    fits = tuple(key.shape) in ((2,), (B, H, 2))
    require(fits, "dropout_key", list(key.shape), f"must have shape (2,), or (B, H, 2) = {(B, H, 2)} once folded")
    return random.fold_coordinates(key, (B, H)) if key.ndim == 1 else key


_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def target(platform: str) -> Iterator[None]:
    """Traces for "cpu", "gpu" or "tpu" within, whatever this host has: for lowering and compiling ahead of time."""
    token = _target.set(platform)
    try:
        yield
    finally:
        _target.reset(token)


def _platform(q: Any) -> str:
    """Where a call runs: on the devices that hold q, or under jit on the default device."""
    chosen = _target.get()
    if chosen is not None:
        return chosen
    if isinstance(q, jax.core.Tracer) or not hasattr(q, "devices"):
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
        name = jax.default_backend() if device is None else getattr(device, "platform", device)
    else:
        name = next(iter(q.devices())).platform
    return {"cpu": "cpu", "tpu": "tpu"}.get(str(name), "gpu")


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", np.dtype(object))
