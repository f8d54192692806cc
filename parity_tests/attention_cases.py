"""Problems for attention: the grid of sizes and features, a covering array of it, and how to run a problem through each package."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

import flax_gpt.kernels.api
import torch_ref.kernels.api
from parity_tests.attention_oracle import Answer, Problem, solve

LENGTHS = (1, 7, 63, 64, 65, 127, 128, 129, 500, 1024)

GRID: dict[str, tuple[Any, ...]] = {
    "queries": LENGTHS,
    "keys": LENGTHS,
    "width": (1, 8, 24, 64, 80, 128, 192, 256),
    "group": (1, 2, 4, 8),
    "kv_heads": (1, 2),
    "limits": ("none", "causal", "window", "window_left", "causal_window"),
    "offset": ("end", "start", "rows"),
    "mask": ("none", "whole", "padding", "shared", "empty_rows"),
    "bias": ("none", "whole", "shared", "hiding"),
    "lengths": (False, True),
    "dropout": (0.0, 0.3),
    "value_width": ("same", "other"),
    "dtype": ("float32", "bfloat16", "float16"),
}
"""Every size and kind of mask that an implementation is asked for."""

Row = dict[str, Any]


SMALL_GRID = GRID | {
    "queries": (1, 40, 130),
    "keys": (1, 63, 128, 150),
    "width": (8, 24, 128),
    "group": (1, 2),
    "dtype": ("float32", "bfloat16"),
    "bias": ("none", "whole"),
    "limits": ("none", "causal", "causal_window"),
    "mask": ("none", "padding", "empty_rows"),
}
"""For kernels that a host without their device must interpret: every feature, tiles and tails, in less time."""

WHOLE = dict(queries=9, keys=9, width=8, group=2, kv_heads=2, limits="none", offset="start", mask="none", bias="none", lengths=False, dropout=0.0,
             value_width="same", dtype="float32")  # fmt: skip
"""A plain row, to be changed in one place."""


SIZES = {"queries", "keys", "width"}
"""The factors with many values."""


def with_size(a: str, b: str) -> bool:
    """Pairs that `covering` leaves to chance: a size and anything."""
    return a in SIZES or b in SIZES


def covering(grid: Mapping[str, Sequence[Any]], free: Callable[[str, str], bool] = with_size) -> list[Row]:
    """Rows in which every value occurs, and every pair of values of two factors that are not `free`.

    The greedy construction of Cohen et al. 1997, "The AETG system"; the same rows every time.
    """
    names = sorted(grid)
    pairs = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) if not free(a, b) for x in range(len(grid[a])) for y in range(len(grid[b]))
    }
    order = {pair: n for n, pair in enumerate(sorted(pairs))}
    rows = []
    while pairs:
        (a, x), (b, y) = min(pairs, key=order.__getitem__)
        chosen = {a: x, b: y}
        gain = functools.partial(_gain, pairs, chosen, len(rows))
        for name in sorted((name for name in names if name not in (a, b)), key=lambda name: -len(grid[name])):
            chosen[name] = max(range(len(grid[name])), key=lambda value: gain(len(grid[name]), name, value))
        pairs -= set(itertools.combinations(sorted(chosen.items()), 2))
        rows.append({name: grid[name][chosen[name]] for name in names})
    return rows


def _gain(pairs: set[Any], chosen: dict[str, int], turn: int, count: int, name: str, value: int) -> tuple[int, int]:
    """How many pairs are still open that `value` would cover; among equals a different value each turn."""
    return sum(tuple(sorted([(name, value), item])) in pairs for item in chosen.items()), -((value + turn) % count)


def product(grid: Mapping[str, Sequence[Any]], seed: int = 0) -> Iterator[Row]:
    """Every row of the grid once, in an order drawn from `seed`."""
    sizes = [len(values) for values in grid.values()]
    total = int(np.prod(sizes))
    step = next(n for n in range(int(total * 0.618), total) if np.gcd(n, total) == 1)
    for n in range(total):
        digits = np.unravel_index((seed + n * step) % total, sizes)
        yield {name: values[digit] for (name, values), digit in zip(grid.items(), digits, strict=True)}


def build(row: Row, seed: int = 0) -> Problem:
    """The problem of a row of the grid. Two rows of the batch, one where the map is large; one key/value head where it is larger still."""
    rng = np.random.default_rng(seed)
    T, S, D, K = row["queries"], row["keys"], row["width"], row["kv_heads"]
    H = K * row["group"]
    if T * S * H > 1 << 21:
        H, K = row["group"], 1
    B = 1 if T * S * H > 1 << 20 else 2
    Dv = D if row["value_width"] == "same" else D // 2 + 3
    dtype = _numpy_dtype(row["dtype"])
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    limits = row["limits"]
    window = {"window": (5, 3), "window_left": (70, None), "causal_window": (9, 40)}.get(limits)
    offset = {"end": max(S - T, 0), "start": 0, "rows": (np.arange(B) * 3 + S // 2).astype(np.int32)}[row["offset"]]
    mask = {
        "none": lambda: None,
        "whole": lambda: rng.random((B, H, T, S)) > 0.4,
        "padding": lambda: rng.random((B, 1, 1, S)) > 0.3,
        "shared": lambda: rng.random((T, S)) > 0.5,
        "empty_rows": lambda: np.broadcast_to(rng.random((B, 1, T, 1)) > 0.5, (B, 1, T, S)).copy(),
    }[row["mask"]]()
    bias = {
        "none": lambda: None,
        "whole": lambda: rng.normal(size=(1, H, T, S)),
        "shared": lambda: rng.normal(size=(B, 1, 1, S)),
        "hiding": lambda: np.where(rng.random((B, 1, 1, S)) > 0.3, rng.normal(size=(B, 1, T, S)), -np.inf),
    }[row["bias"]]()
    return Problem(
        q=draw(B, T, H, D),
        k=draw(B, S, K, D),
        v=draw(B, S, K, Dv),
        d_out=draw(B, T, H, Dv),
        d_lse=rng.normal(size=(B, T, H)),
        bias=None if bias is None else bias.astype(np.float32 if row["dtype"] != "float64" else np.float64),
        mask=mask,
        kv_lengths=np.array([S - S // 3, 0][:B], np.int32) if row["lengths"] else None,
        query_offset=None if limits == "none" and T == S else offset,
        causal=limits.startswith("causal"),
        window=window,
        dropout_rate=row["dropout"],
        dropout_key=np.array([seed + 1, 77], np.uint32) if row["dropout"] else None,
    )


def _numpy_dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def run_jax(problem: Problem, implementation: str, *, weights: bool = False, assume_finite: bool = False) -> dict[str, np.ndarray]:
    """out, lse, gradients and, on request, weights of `flax_gpt`, all from one jitted program."""
    traced = ("mask", "kv_lengths", "query_offset", "dropout_key")
    options = problem.options()
    arrays = {name: jnp.asarray(options.pop(name)) for name in traced if isinstance(options[name], np.ndarray)}
    wide = jnp.float64 if problem.q.dtype == np.float64 else jnp.float32

    def program(q: Any, k: Any, v: Any, bias: Any, d_out: Any, d_lse: Any, arrays: Any) -> Any:
        def loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
            given = {name: value for name, value in (options | arrays).items() if value is not None}
            out, *maps, lse = flax_gpt.kernels.api.attend(
                q, k, v, bias=bias, implementation=implementation, return_lse=True, return_weights=weights, assume_finite=assume_finite, **given
            )
            total = jnp.sum(out.astype(wide) * d_out.astype(wide)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse) * d_lse)
            return total, (out, lse, *maps)

        return jax.grad(loss, argnums=(0, 1, 2) if bias is None else (0, 1, 2, 3), has_aux=True)(q, k, v, bias)

    d_lse = problem.d_lse.astype(wide)
    with jax.numpy_dtype_promotion("strict"):
        gradients, (out, lse, *maps) = jax.jit(program)(problem.q, problem.k, problem.v, problem.bias, problem.d_out, d_lse, arrays)
    found = dict(out=out, lse=lse, **dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=False)), **dict(zip(("weights",), maps, strict=False)))
    return {name: np.asarray(value) for name, value in found.items()}


def run_torch(problem: Problem, *, weights: bool = False, assume_finite: bool = False) -> dict[str, np.ndarray]:
    """The same of `torch_ref`."""
    q, k, v = (to_torch(x).requires_grad_() for x in (problem.q, problem.k, problem.v))
    bias = None if problem.bias is None else to_torch(problem.bias).requires_grad_()
    options = {name: to_torch(value) if isinstance(value, np.ndarray) else value for name, value in problem.options().items() if value is not None}
    options |= dict(return_lse=True, return_weights=weights, assume_finite=assume_finite)
    out, *maps, lse = torch_ref.kernels.api.attend(q, k, v, bias=bias, **options)
    total = (out.to(lse.dtype) * to_torch(problem.d_out).to(lse.dtype)).sum()
    (total + (torch.where(torch.isneginf(lse), 0.0, lse) * to_torch(problem.d_lse).to(lse.dtype)).sum()).backward()
    found = dict(out=out, lse=lse, dq=q.grad, dk=k.grad, dv=v.grad)
    found |= {} if bias is None else dict(dbias=bias.grad)
    found |= dict(zip(("weights",), maps, strict=False))
    return {name: to_numpy(value) for name, value in found.items()}


def to_torch(x: np.ndarray) -> torch.Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.astype(np.int64) if x.dtype == np.uint32 else x.copy())


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return (x.float() if x.dtype == torch.bfloat16 else x).detach().numpy()


def worst(problem: Problem, found: Mapping[str, np.ndarray], answers: Mapping[str, Answer]) -> dict[str, float]:
    """The excess of each result over its limit; at most 1 where rounding explains the error."""
    return {name: answers[name].excess(value.reshape(answers[name].value.shape)) for name, value in found.items()}


def check(problem: Problem, found: Mapping[str, np.ndarray], *, partly: bool = False) -> None:
    """Fails with the name of every result that is further from the oracle than rounding explains, or, unless `partly`, was not computed."""
    wanted = {"out", "lse", "dq", "dk", "dv"} | ({"dbias"} if problem.bias is not None else set())
    assert partly or wanted <= set(found), f"not computed: {wanted - set(found)}"
    excess = worst(problem, found, solve(problem, str(problem.q.dtype)))
    assert max(excess.values()) <= 1.0, {name: f"{value:.3g} times its limit" for name, value in excess.items() if value > 1.0}
