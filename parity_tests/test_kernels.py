"""Every implementation of attention against the float64 oracle: output, lse, weights and each gradient by name."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_gpt.kernels import attend, blocked
from parity_tests.attention_cases import GRID, LENGTHS, SMALL_GRID, WHOLE, build, check, covering, product, run_jax, run_torch, with_size

ROWS = covering(GRID)
EDGES = [WHOLE | dict(queries=T, keys=S, limits="causal", lengths=True, group=1) for T, S in zip(LENGTHS, LENGTHS[3:] + LENGTHS[:3], strict=True)]
"""Every length of queries beside another of keys, where tiles end within both and within what is visible."""

SMALL_ROWS = covering(SMALL_GRID)


def _name(row: dict) -> str:
    return "-".join(str(value) for value in row.values())


def test_the_covering_array_covers_every_pair() -> None:
    for a in GRID:
        assert {row[a] for row in ROWS} == set(GRID[a])
        for b in set(GRID) - {a}:
            if not with_size(a, b):
                assert {(row[a], row[b]) for row in ROWS} == {(x, y) for x in GRID[a] for y in GRID[b]}


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(row, marks=pytest.mark.slow if n % 2 else []) for n, row in enumerate(EDGES))], ids=_name)
def test_grid_blocked(row: dict) -> None:
    number = (ROWS + EDGES).index(row)
    problem = build(row, number)
    check(problem, run_jax(problem, "blocked", assume_finite=number % 4 < 2))


@pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.slow if n % 2 else []) for n, row in enumerate(ROWS)], ids=_name)
def test_grid_dense(row: dict) -> None:
    problem = build(row, ROWS.index(row))
    check(problem, run_jax(problem, "dense", weights=row["value_width"] == "same", assume_finite=ROWS.index(row) % 4 >= 2))


@pytest.mark.parametrize("row", SMALL_ROWS, ids=_name)
def test_grid_pallas_tpu_interpreted(row: dict) -> None:
    problem = build(row, SMALL_ROWS.index(row))
    check(problem, run_jax(problem, "pallas_tpu"))


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_grid_torch(row: dict) -> None:
    problem = build(row, ROWS.index(row))
    check(problem, run_torch(problem, weights=True, assume_finite=ROWS.index(row) % 2 == 1))


@pytest.mark.slow
def test_product() -> None:
    """The whole grid, in an order that mixes it; KERNEL_PRODUCT = number of rows cuts it short."""
    limit = int(os.environ.get("KERNEL_PRODUCT", "0")) or None
    for n, row in enumerate(product(GRID)):
        if n == limit:
            break
        problem = build(row, n)
        for implementation in ("dense", "blocked"):
            for assume_finite in (False, True):
                check(problem, run_jax(problem, implementation, assume_finite=assume_finite))


PROBLEMS = st.fixed_dictionaries(
    {
        **{name: st.sampled_from(GRID[name]) for name in ("limits", "offset", "mask", "bias", "lengths", "dropout", "value_width", "kv_heads")},
        **{"queries": st.integers(1, 40), "keys": st.integers(1, 60), "width": st.integers(1, 20), "group": st.integers(1, 3)},
        "dtype": st.just("float64"),
    }
)


@settings(max_examples=100)
@given(PROBLEMS, st.integers(0, 1 << 20))
def test_any_problem_torch(row: dict, seed: int) -> None:
    problem = build(row, seed)
    check(problem, run_torch(problem, weights=True))


@settings(max_examples=10)
@given(PROBLEMS, st.integers(0, 1 << 20), st.booleans())
def test_any_problem_in_small_tiles(row: dict, seed: int, assume_finite: bool) -> None:
    """float64 leaves no room for a small mistake, small tiles make every loop run more than once."""
    before = blocked.FORWARD, blocked.BACKWARD, blocked.JOINED_FORWARD, blocked.JOINED_BACKWARD
    blocked.FORWARD = blocked.BACKWARD = ((blocked.ALL, 16, 2),)
    blocked.JOINED_FORWARD = blocked.JOINED_BACKWARD = (16, 2)
    try:
        with jax.enable_x64(True):
            problem = build(row, seed)
            check(problem, run_jax(problem, "blocked", assume_finite=assume_finite))
    finally:
        blocked.FORWARD, blocked.BACKWARD, blocked.JOINED_FORWARD, blocked.JOINED_BACKWARD = before


@pytest.mark.parametrize("assume_finite", [True, False])
def test_short_strips_need_no_array_of_scores(assume_finite: bool) -> None:
    """XLA's fusions on the processor: one operation from q, k and v to the output, which a selection would cut into pieces."""
    q = jax.ShapeDtypeStruct((4, 128, 4, 32), jnp.float32)
    attention = functools.partial(attend, causal=True, implementation="blocked", assume_finite=assume_finite)
    written = jax.jit(attention).lower(q, q, q).compile().as_text().split("ENTRY")[1]
    assert ("[4,4,128,128]" in written) is not assume_finite


@settings(max_examples=8)
@given(PROBLEMS, st.integers(0, 1 << 20))
def test_any_problem_dense(row: dict, seed: int) -> None:
    with jax.enable_x64(True):
        problem = build(row, seed)
        check(problem, run_jax(problem, "dense", weights=True))


@pytest.mark.parametrize("fill", ["uniform", "nan"])
def test_fills_of_the_originals(fill: str) -> None:
    problem = dataclasses.replace(build(WHOLE | {"mask": "empty_rows", "dtype": "float64"}, 3), empty_rows=fill)
    with jax.enable_x64(True):
        check(problem, run_jax(problem, "dense", weights=True))
    check(problem, run_torch(problem, weights=True))
    scores = np.einsum("bthd,bshd->bhts", problem.q, np.repeat(problem.k, 2, axis=2)) * problem.q.shape[-1] ** -0.5
    masked = torch.from_numpy(scores).masked_fill(~torch.from_numpy(problem.mask), -1e9 if fill == "uniform" else -torch.inf)
    check(problem, {"weights": torch.softmax(masked, dim=-1).numpy()}, partly=True)
