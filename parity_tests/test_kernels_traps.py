"""What others got wrong in attention, one test a trap; and the promises of `attend` that are not numbers."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torch_ref.kernels
from flax_gpt import random
from flax_gpt.errors import InputError
from flax_gpt.kernels import api, attend, explain
from parity_tests.attention_cases import WHOLE, build, check, run_jax, run_torch, to_torch
from parity_tests.attention_oracle import Problem, solve, visible

RUNNING = ("dense", "blocked", "pallas_tpu")
"""Implementations that a CPU runs, the last one interpreted."""

HIDING = {
    "causal": dict(limits="causal"),
    "window": dict(limits="causal_window"),
    "lengths": dict(lengths=True),
    "mask": dict(mask="padding"),
    "bias": dict(bias="hiding"),
    "empty rows": dict(mask="empty_rows"),
}


def _qkv(T: int, S: int, H: int = 2, K: int = 2, D: int = 8, B: int = 2, seed: int = 0, dtype: type = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in ((B, T, H, D), (B, S, K, D), (B, S, K, D))]


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("runner", [*RUNNING, "torch_ref"])
def test_nan_reaches_only_those_who_see_it(runner: str, hiding: str) -> None:
    if runner == "pallas_tpu" and hiding == "bias":
        hiding = "mask"
    problem = build(WHOLE | {"queries": 20, "keys": 20} | HIDING[hiding], 5)
    k, v, seen = problem.k.copy(), problem.v.copy(), visible(problem).any(1)
    for b in range(2):
        one, two, three = np.argsort(seen[b].sum(0), kind="stable")[:3]
        k[b, one, 0, 3], v[b, two, 1, 2], k[b, three, 1], v[b, three, 0, 0] = np.nan, np.inf, -np.inf, np.nan
    problem = dataclasses.replace(problem, k=k, v=v)
    answers = solve(problem, "float32")
    assert np.isfinite(answers["out"].value).any()
    found = run_torch(problem) if runner == "torch_ref" else run_jax(problem, runner)
    # A bad number has no gradient of its own.
    for name, bad in (("dk", k), ("dv", v)):
        found[name] = np.where(np.isfinite(bad), found[name], answers[name].value)
    check(problem, found)


@pytest.mark.parametrize("implementation", RUNNING)
def test_a_row_that_sees_nothing(implementation: str) -> None:
    problem = build(WHOLE | {"mask": "empty_rows"}, 1)
    found = run_jax(problem, implementation)
    empty = ~problem.mask[:, 0].any(-1)
    assert empty.any()
    assert not found["out"][empty].any()
    assert np.isneginf(found["lse"][empty]).all()
    assert all(np.isfinite(found[name]).all() for name in ("dq", "dk", "dv"))
    assert not found["dq"][empty].any()


@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_chunked_prefill_and_single_steps_equal_the_whole(implementation: str) -> None:
    with jax.enable_x64(True):
        problem = build(WHOLE | {"queries": 12, "keys": 12, "limits": "causal", "dtype": "float64"}, 2)
        answer = solve(problem, "float64")["out"]
        run = functools.partial(attend, causal=True, implementation=implementation)
        for cuts in ((0, 5, 12), (0, *range(4, 13))):
            pieces = [run(problem.q[:, a:b], problem.k[:, :b], problem.v[:, :b], query_offset=a) for a, b in itertools.pairwise(cuts)]
            assert answer.excess(np.concatenate(pieces, axis=1)) <= 1
        cached = [run(problem.q[:, t : t + 1], problem.k, problem.v, query_offset=np.full(2, t)) for t in range(12)]
        assert answer.excess(np.concatenate(cached, axis=1)) <= 1


@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_asking_for_lse_or_weights_changes_no_bit(implementation: str) -> None:
    q, k, v = _qkv(20, 20)
    alone = attend(q, k, v, causal=True, implementation=implementation)
    with_lse, _ = attend(q, k, v, causal=True, implementation=implementation, return_lse=True)
    np.testing.assert_array_equal(alone, with_lse)
    if implementation == "dense":
        with_weights, weights = attend(q, k, v, causal=True, implementation=implementation, return_weights=True)
        np.testing.assert_array_equal(alone, with_weights)
        assert weights.shape == (2, 2, 20, 20)


def test_weights_are_those_before_dropout() -> None:
    q, k, v = _qkv(9, 9)
    key = random.key_from_seed(3)
    _, plain = attend(q, k, v, return_weights=True)
    out, weights = attend(q, k, v, return_weights=True, dropout_rate=0.5, dropout_key=key)
    np.testing.assert_array_equal(plain, weights)
    assert not np.array_equal(out, attend(q, k, v))


@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_two_runs_are_bitwise_equal(implementation: str) -> None:
    problem = build(WHOLE | {"queries": 300, "keys": 300, "width": 64, "limits": "causal", "bias": "whole"}, 4)
    first, second = run_jax(problem, implementation), run_jax(problem, implementation)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("implementation", RUNNING)
def test_dropout_draws_by_row_and_head_not_by_place_in_the_array(implementation: str) -> None:
    q, k, v = _qkv(10, 10, B=4)
    key = random.key_from_seed(9)
    keys = random.fold_coordinates(key, (4, 2))
    run = functools.partial(attend, dropout_rate=0.4, implementation=implementation)
    whole = run(q, k, v, dropout_key=key)
    np.testing.assert_array_equal(whole, run(q, k, v, dropout_key=keys))
    np.testing.assert_array_equal(whole[2:], run(q[2:], k[2:], v[2:], dropout_key=keys[2:]))
    late = run(q[:, 6:], k, v, dropout_key=key, query_offset=6)
    problem = Problem(q, k, v, q, q[..., 0], dropout_rate=0.4, dropout_key=key)
    assert solve(problem, "float32")["out"].excess(np.concatenate([whole[:, :6], late], axis=1)) <= 1


@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_more_rows_and_heads_than_a_16_bit_grid_holds(implementation: str) -> None:
    q, k, v = _qkv(1, 2, H=7, K=7, D=2, B=10_000)
    found = attend(q, k, v, implementation=implementation)
    last = Problem(q[-2:], k[-2:], v[-2:], q[-2:], q[-2:, ..., 0])
    assert solve(last, "float32")["out"].excess(found[-2:]) <= 1


@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_transformations(implementation: str) -> None:
    """jit, vmap, remat and scan give what a plain call gives; shard_map with a replicated bias gives its gradient whole."""
    q, k, v = _qkv(20, 20, B=4)
    bias = np.random.default_rng(1).normal(size=(1, 2, 20, 20)).astype(np.float32)
    lengths, keys = np.array([20, 3, 0, 11]), random.fold_coordinates(random.key_from_seed(1), (4, 2))

    def run(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, lengths: jax.Array, keys: jax.Array) -> jax.Array:
        out = attend(q, k, v, bias=bias, kv_lengths=lengths, causal=True, dropout_rate=0.2, dropout_key=keys, implementation=implementation)
        return out

    def results(run: Callable[..., jax.Array]) -> dict[str, jax.Array]:
        def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = run(*arrays, lengths, keys)
            return jnp.sum(out * q), out

        gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, bias)
        return dict(zip(("out", "dq", "dk", "dv", "dbias"), (out, *gradients), strict=True))

    def scanned(q: jax.Array, *rest: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda total, _: (total + run(q, *rest), None), jnp.zeros_like(q), None, length=1)[0]

    def mapped(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, lengths: jax.Array, keys: jax.Array) -> jax.Array:
        alone = lambda q, k, v, n, key: run(q[None], k[None], v[None], bias, n[None], key[None])[0]
        return jax.vmap(alone)(q, k, v, jnp.asarray(lengths), keys)

    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(rows, rows, rows, everywhere, rows, rows), out_specs=rows)
    out = np.asarray(run(q, k, v, bias, lengths, keys))
    problem = Problem(q, k, v, q, 0 * q[..., 0], bias=bias, kv_lengths=lengths, causal=True, dropout_rate=0.2, dropout_key=random.key_from_seed(1))
    check(problem, {"out": out}, partly=True)
    for changed in (jax.remat(run), scanned, mapped, sharded):
        check(problem, {name: np.asarray(x) for name, x in results(changed).items()}, partly=True)


def test_memory_of_the_blocked_path_is_linear() -> None:
    """Forward and backward at T 8192 need less than three times the inputs and outputs beside them."""
    shape = jax.ShapeDtypeStruct((1, 8192, 4, 64), jnp.float32)
    loss = lambda q, k, v, d_out: jnp.sum(attend(q, k, v, causal=True, implementation="blocked") * d_out)
    memory = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape, shape).compile().memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert memory.temp_size_in_bytes + used < 3 * used


def test_lengths_are_refused_on_the_host_and_clamped_when_traced() -> None:
    q, k, v = _qkv(4, 6)
    with pytest.raises(InputError, match=r"kv_lengths = \[9, -1\]: must lie in \[0, 6\]"):
        attend(q, k, v, kv_lengths=np.array([9, -1]))
    for implementation in ("dense", "blocked"):
        run = functools.partial(attend, q, k, v, implementation=implementation)
        traced = jax.jit(lambda n, run=run: run(kv_lengths=n))
        np.testing.assert_array_equal(traced(jnp.array([9, -1])), traced(jnp.array([6, 0])))


REFUSED = {
    "mask": (dict(mask=np.ones((2, 1, 4, 6), np.int32)), "boolean.* pass an additive mask as bias, a 0/1 mask as mask != 0"),
    "float mask": (dict(mask=np.zeros((4, 6), np.float32)), "boolean.* pass an additive mask as bias"),
    "mask shape": (dict(mask=np.ones((3, 1, 4, 6), bool)), r"must broadcast to \(B, H, T, S\) = \(2, 2, 4, 6\)"),
    "bias": (dict(bias=np.ones((4, 6), bool)), "floating"),
    "causal": (dict(causal=True), "query_offset = None: is required"),
    "window": (dict(window=(1, 1)), "query_offset = None: is required"),
    "negative window": (dict(window=(-1, 1), query_offset=0), r"window = \(-1, 1\): must be \(left, right\)"),
    "offset": (dict(query_offset=1.5), "query_offset"),
    "scale": (dict(scale=float("nan")), "scale = nan: must be a number within ±1e30"),
    "rate": (dict(dropout_rate=1.0), r"dropout_rate = 1.0: must be a number in \[0, 1\)"),
    "key": (dict(dropout_rate=0.1), "dropout_key = None: is required"),
    "fill": (dict(empty_rows="ones"), "empty_rows = 'ones'"),
    "promise": (dict(assume_finite=1), "assume_finite = 1: must be True or False"),
    "lengths": (dict(kv_lengths=np.array([1, 2, 3])), r"kv_lengths = \[3\]: must have shape"),
    "implementation": (dict(implementation="fast"), "implementation = 'fast': must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_by_both(name: str) -> None:
    arguments, message = REFUSED[name]
    q, k, v = _qkv(4, 6)
    with pytest.raises(InputError, match=message):
        attend(q, k, v, **arguments)
    as_torch = {key: to_torch(value) if isinstance(value, np.ndarray) else value for key, value in arguments.items()}
    with pytest.raises(InputError, match=message):
        torch_ref.kernels.attend(*map(to_torch, (q, k, v)), **as_torch)


def test_shapes_are_refused_by_both() -> None:
    q, k, v = _qkv(4, 6)
    for arrays in ((q[0], k, v), (q, k[:1], v), (q, k, v[:, :5]), (q[:, :, :1].repeat(3, 2), k, v), (q, k[..., :4], v), (q[:, :0], k, v)):
        with pytest.raises(InputError):
            attend(*arrays)
        with pytest.raises(InputError):
            torch_ref.kernels.attend(*map(to_torch, arrays))
    with pytest.raises(InputError, match="must be of q's dtype, float32"):
        attend(q, k.astype(np.float16), v)


def test_static_arguments_say_so() -> None:
    q, k, v = _qkv(4, 4)
    with pytest.raises(InputError, match="static under jit"):
        jax.jit(attend)(q, k, v, causal=True)
    np.testing.assert_array_equal(jax.jit(attend, static_argnames="causal")(q, k, v, causal=True), attend(q, k, v, causal=True))


def test_what_an_implementation_cannot_do_it_refuses() -> None:
    q, k, v = _qkv(4, 4)
    with pytest.raises(NotImplementedError, match=r"'blocked': it keeps no map"):
        attend(q, k, v, implementation="blocked", return_weights=True)
    with pytest.raises(NotImplementedError, match="'pallas_tpu': the gradient of a bias that is broadcast"):
        attend(q, k, v, implementation="pallas_tpu", bias=np.zeros((1, 4), np.float32))


def test_explain_says_who_runs_and_why_not_the_others() -> None:
    q, k, v = _qkv(128, 128)
    assert explain(q, k, v).chosen == "blocked"
    passed = explain(q, k, v, return_weights=True)
    assert passed.chosen == "dense"
    assert "blocked passed over: it keeps no map" in str(passed)
    assert explain(q[:, :1], k, v).chosen == "dense"
    for platform in api.TABLE:
        with api.target(platform):
            assert explain(q, k, v, empty_rows="nan").chosen == "dense"


# torch's own function, where it defines the case; and where it differs, both answers.


def _sdpa(problem: Problem, **options: object) -> dict[str, np.ndarray]:
    q, k, v = (to_torch(x).transpose(1, 2).detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=problem.scale, **options)
    (out.transpose(1, 2) * to_torch(problem.d_out)).sum().backward()
    return {name: x.transpose(1, 2).detach().numpy() for name, x in dict(out=out, dq=q.grad, dk=k.grad, dv=v.grad).items()}


SDPA = {
    "plain": (dict(), dict(), lambda p: {}),
    "scale": (dict(), dict(scale=0.7), lambda p: {}),
    "causal": (dict(queries=20, keys=20, limits="causal"), dict(), lambda p: dict(is_causal=True)),
    "causal from the first key, T > S": (dict(queries=12, keys=9, limits="causal", offset="start"), dict(), lambda p: dict(is_causal=True)),
    "causal from the first key, T < S": (dict(queries=5, keys=9, limits="causal", offset="start"), dict(), lambda p: dict(is_causal=True)),
    "boolean mask": (dict(mask="whole"), dict(), lambda p: dict(attn_mask=to_torch(p.mask))),
    "rows that see nothing": (dict(mask="empty_rows"), dict(), lambda p: dict(attn_mask=to_torch(p.mask))),
    "bias": (dict(bias="whole"), dict(), lambda p: dict(attn_mask=to_torch(p.bias))),
    "bias that hides": (dict(bias="hiding"), dict(), lambda p: dict(attn_mask=to_torch(p.bias))),
}


@pytest.mark.parametrize("name", SDPA)
def test_torch_defines_the_same(name: str) -> None:
    """torch, ours in JAX and ours in torch lie within the oracle's limits of one value."""
    row, changes, options = SDPA[name]
    problem = build(WHOLE | row, 6)
    problem = dataclasses.replace(problem, d_lse=0 * problem.d_lse, **changes)
    check(problem, _sdpa(problem, **options(problem)), partly=True)
    check(problem, run_jax(problem, "dense"))
    check(problem, run_jax(problem, "blocked"))
    check(problem, run_torch(problem))


def test_a_row_of_finfo_min_is_a_mean_in_torch_and_here() -> None:
    """An additive mask of finfo.min hides nothing when it covers a whole row: the scores are equal, so the output is the mean of the values."""
    problem = build(WHOLE, 7)
    problem = dataclasses.replace(problem, bias=np.full((2, 1, 9, 9), np.finfo(np.float32).min), d_lse=0 * problem.d_lse)
    mean = np.repeat(problem.v.mean(axis=1, keepdims=True, dtype=np.float64), 9, axis=1).repeat(2, axis=2)
    limit = solve(dataclasses.replace(problem, bias=None, q=0 * problem.q), "float32")
    assert limit["out"].excess(_sdpa(problem, attn_mask=to_torch(problem.bias))["out"]) <= 1
    for found in (*(run_jax(problem, name) for name in RUNNING), run_torch(problem)):
        assert limit["out"].excess(found["out"]) <= 1
        assert limit["dv"].excess(found["dv"]) <= 1
    assert limit["out"].excess(mean) <= 1


def test_torch_lets_a_hidden_nan_through_and_we_do_not() -> None:
    q, k, v = _qkv(4, 4)
    v[:, 3] = np.nan
    mask = np.tile(np.array([True, True, True, False]), (4, 1))
    theirs = F.scaled_dot_product_attention(*(to_torch(x).transpose(1, 2) for x in (q, k, v)), attn_mask=to_torch(mask))
    assert torch.isnan(theirs).all()
    for found in (attend(q, k, v, mask=mask), torch_ref.kernels.attend(*map(to_torch, (q, k, v)), mask=to_torch(mask))):
        assert np.isfinite(np.asarray(found)).all()


def test_torch_aligns_causal_with_the_first_key_and_we_ask() -> None:
    """With T = 2 and S = 5 torch's is_causal lets the first query see one key; a decoder means the fourth."""
    q, k, v = _qkv(2, 5)
    theirs = F.scaled_dot_product_attention(*(to_torch(x).transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2).numpy()
    problem = Problem(q, k, v, q, q[..., 0], causal=True, query_offset=0)
    assert solve(problem, "float32")["out"].excess(theirs) <= 1
    assert solve(dataclasses.replace(problem, query_offset=3), "float32")["out"].excess(theirs) > 1
    assert solve(dataclasses.replace(problem, query_offset=3), "float32")["out"].excess(attend(q, k, v, causal=True, query_offset=3)) <= 1
