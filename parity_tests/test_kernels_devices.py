"""Kernels for devices that this host may not have: lowered for them, compiled for TPUs, interpreted; on a GPU, run."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_gpt.kernels import api, attend, explain, pallas_gpu, vendor
from parity_tests import compile_ahead
from parity_tests.attention_cases import SMALL_GRID, WHOLE, build, check, covering, run_jax
from parity_tests.attention_oracle import Problem, solve

SHAPES = {
    "plain": ((2, 256, 256, 4, 2, 64), dict(causal=True)),
    "tails": ((1, 200, 300, 2, 1, 80), dict(causal=True, query_offset=100, window=(70, None))),
    "wide": ((1, 128, 256, 2, 2, 128), dict()),
}

PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}

TARGETS = {
    "pallas_tpu": ("tpu", ("float32", "bfloat16"), "tpu_custom_call"),
    "splash": ("tpu", ("float32", "bfloat16"), "tpu_custom_call"),
    "pallas_gpu": ("gpu", ("bfloat16", "float16"), "mosaic_gpu"),
    "cudnn": ("gpu", ("bfloat16", "float16"), "cudnn"),
    "blocked": ("gpu", ("float32", "bfloat16", "float16"), "stablehlo.exponential"),
}


def lowered(implementation: str, sizes: tuple[int, ...], dtype: str, arguments: dict[str, Any], gradient: bool) -> Any:
    B, T, S, H, K, D = sizes
    shape = lambda *axes: jax.ShapeDtypeStruct(axes, dtype)
    run = functools.partial(attend, implementation=implementation, **arguments)
    loss = lambda q, k, v: jnp.sum(run(q, k, v).astype(jnp.float32))
    program = jax.grad(loss, argnums=(0, 1, 2)) if gradient else run
    platform = TARGETS[implementation][0]
    with api.target(platform):
        traced = jax.jit(program).trace(shape(B, T, H, D), shape(B, S, K, D), shape(B, S, K, D))
        return traced.lower(lowering_platforms=(PLATFORMS[platform],))


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu", "blocked"])
def test_lowers_for_its_device(implementation: str, shape: str, gradient: bool) -> None:
    _, dtypes, mark = TARGETS[implementation]
    sizes, arguments = SHAPES[shape]
    for dtype in dtypes[:: 1 if shape == "plain" else 2]:
        assert mark in lowered(implementation, sizes, dtype, arguments, gradient).as_text()


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_splash_lowers_for_tpu(gradient: bool) -> None:
    for arguments in (dict(causal=True), dict(window=(30, 5)), dict(kv_lengths=np.array([256, 7]))):
        assert "tpu_custom_call" in lowered("splash", (2, 256, 256, 4, 2, 64), "bfloat16", arguments, gradient).as_text()


def test_the_table_on_each_platform() -> None:
    with api.target("gpu"):
        q = np.zeros((1, 128, 2, 64), jnp.bfloat16)
        assert explain(q, q, q, causal=True).chosen == "cudnn"
        assert explain(q, q, q, causal=True, return_lse=True).chosen == "pallas_gpu"
        assert explain(q, q, q, mask=np.ones((128, 128), bool)).chosen == "blocked"
        assert explain(*3 * [q.astype(np.float32)], causal=True).chosen == "blocked"
        assert explain(q[:, :1], q, q).chosen == "dense"
    with api.target("tpu"):
        assert explain(q, q, q, causal=True, dropout_rate=0.1, dropout_key=np.zeros(2, np.uint32)).chosen == "pallas_tpu"
        assert explain(*3 * [q.astype(np.float16)], causal=True).chosen == "blocked"


REFUSED = {
    "cudnn": [dict(mask=np.ones((8, 8), bool)), dict(window=(1, 1)), dict(return_lse=True), dict(causal=True, query_offset=1)],
    "pallas_gpu": [dict(mask=np.ones((8, 8), bool)), dict(bias=np.ones((8, 8), np.float32)), dict(return_weights=True), dict(empty_rows="nan")],
    "splash": [dict(bias=np.ones((8, 8), np.float32)), dict(dropout_rate=0.1, dropout_key=np.zeros(2, np.uint32)), dict(), dict(return_lse=True)],
    "pallas_tpu": [dict(return_weights=True), dict(empty_rows="uniform"), dict(bias=np.ones((1, 8), np.float32))],
}


@pytest.mark.parametrize("implementation", REFUSED)
def test_refuses_what_it_cannot_do(implementation: str) -> None:
    platform, (dtype, *_), _ = TARGETS[implementation]
    q = np.zeros((1, 8, 2, 64), jnp.dtype(dtype))
    with api.target(platform):
        for arguments in REFUSED[implementation]:
            with pytest.raises(NotImplementedError, match=f"implementation = '{implementation}'"):
                explain(q, q, q, implementation=implementation, **arguments)
        with pytest.raises(NotImplementedError):
            explain(*3 * [q.astype(np.float64)], implementation=implementation)


def test_a_gpu_kernel_is_refused_on_a_cpu() -> None:
    q = np.zeros((1, 8, 2, 64), jnp.bfloat16)
    for implementation in ("pallas_gpu", "cudnn"):
        with api.target("cpu"), pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
            attend(q, q, q, implementation=implementation)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """jax 0.10 keeps GPU interpret mode private, and it knows no register layouts: the five helpers that name them take their plain meaning."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    tile = pallas_gpu.TILE
    product = lambda a, b: jax.lax.dot_general(a[...], b[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    monkeypatch.setattr(pallas_gpu, "INTERPRET", InterpretGPUParams())
    monkeypatch.setattr(pallas_gpu, "_product", product)
    monkeypatch.setattr(pallas_gpu, "_accumulate", lambda acc, a, b: acc + jax.lax.dot(a, b[...], preferred_element_type=jnp.float32))
    monkeypatch.setattr(pallas_gpu, "_load", lambda x, reduced: x[...])
    monkeypatch.setattr(pallas_gpu, "_iota", lambda axis: jax.lax.broadcasted_iota(jnp.int32, (tile, tile), axis))
    monkeypatch.setattr(pallas_gpu, "_vector", lambda value: jnp.full((tile,), value, jnp.float32))
    monkeypatch.setattr(pallas_gpu, "_zeros", lambda width: jnp.zeros((tile, width), jnp.float32))
    return


@pytest.mark.parametrize(
    "changes",
    [
        dict(limits="causal", queries=70, keys=100, group=2, kv_heads=1, width=80, value_width="other"),
        dict(limits="causal_window", lengths=True, queries=70, keys=130, offset="rows", dtype="float16"),
    ],
)
def test_the_hopper_kernel_interpreted(interpreted: None, changes: dict[str, Any]) -> None:
    problem = build(WHOLE | {"dtype": "bfloat16"} | changes, 3)
    check(problem, run_jax(problem, "pallas_gpu"))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_what_vendors_kernels_get_wrong_is_put_right(platform: str) -> None:
    """The correction outside the kernel, laid over the mean of all values, a vendor's answer for a row that sees nothing."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 12, 2, 8)).astype(np.float32) for _ in range(3))
    k[0, 7, 0], v[1, 2, 1] = np.nan, np.inf
    arguments = dict(causal=True, window=(3, 0), query_offset=-2, kv_lengths=np.array([12, 5]))
    with api.target(platform):
        case = explain(q, k, v, **arguments).case
    _, inputs = api._read(q, k, v, **(dict(mask=None, bias=None, scale=None, dropout_rate=0.0, dropout_key=None, empty_rows="zero",
                                           return_weights=False, return_lse=False, assume_finite=False) | arguments))  # fmt: skip
    found = np.asarray(vendor._put_right(case, inputs, q, k, v, jnp.ones((2, 12, 2, 8))))
    wanted = solve(Problem(q, k, v, q, q[..., 0], **arguments), "float32")
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted["out"].value))
    np.testing.assert_array_equal(found[..., 0] == 0, np.isneginf(wanted["lse"].value))


@pytest.mark.parametrize(("chip", "names"), [("v5e", ["plain", "everything"]), ("v6e", ["tails", "widest"])])
def test_compiles_for_tpu(chip: str, names: list[str]) -> None:
    """Forward and backward through the TPU's own compiler, in a process of its own: libtpu takes settings from the environment, once."""
    pytest.importorskip("libtpu", reason="the TPU compiler is an extra: pip install flax-gpt[tpu]")
    command = [sys.executable, "-m", "parity_tests.compile_ahead", chip, "--json", "--cases", *names]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    costs = [json.loads(line) for line in re.findall(r"^\{.*\}$", result.stdout, re.MULTILINE)]
    wanted = [(kernel, name) for kernel in compile_ahead.KERNELS[chip] for name in compile_ahead.SERVED[kernel] if name in names]
    assert [(cost["implementation"], cost["case"]) for cost in costs] == wanted
    for cost in costs:
        assert cost["calls"] >= 3
        if cost["implementation"] == "pallas_tpu":
            B, T, S, H, _, D = compile_ahead.CASES[cost["case"]]["sizes"]
            # Nine products of the map's size, of tiles that may lie half beyond the end or the diagonal.
            assert cost["flops"] > 9 * B * H * T * S * D
            assert cost["seconds"] > 0
            assert compile_ahead.row(cost).startswith(f"| {chip} | `pallas_tpu` | {cost['case']}: B{B} T{T}")


@pytest.mark.gpu
@pytest.mark.skipif(not any(device.platform == "gpu" for device in jax.local_devices()), reason="no GPU here")
def test_on_a_gpu() -> None:
    """Every implementation that takes a case, and the compiled program says which kernel ran."""
    ran = set()
    for n, row in enumerate(covering(SMALL_GRID)):
        problem = build(row, n)
        options = {name: value for name, value in problem.options().items() if value is not None}
        for implementation, (platform, _, mark) in TARGETS.items():
            lse = implementation != "cudnn"
            try:
                explain(problem.q, problem.k, problem.v, bias=problem.bias, implementation=implementation, return_lse=lse, **options)
            except NotImplementedError:
                continue
            if platform == "gpu":
                run = functools.partial(attend, bias=problem.bias, implementation=implementation, return_lse=lse, **options)
                assert mark in jax.jit(lambda q, k, v, run=run: run(q, k, v)).lower(problem.q, problem.k, problem.v).compile().as_text()
                found = run_jax(problem, implementation) if lse else {"out": np.asarray(run(problem.q, problem.k, problem.v))}
                check(problem, found, partly=not lse)
                ran.add(implementation)
    assert {"blocked", "pallas_gpu"} <= ran
