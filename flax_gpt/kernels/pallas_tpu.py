"""Attention for TPU in Pallas (Mosaic): the algorithm of `blocked`, with tiles in VMEM and the products on the matrix unit.

Grids walk (row, head, query tile, key tile) with the innermost axis in order, so that a row's peak, total and sum live in scratch memory between
steps (Dao et al. 2022, algorithms 1 and 4). Offsets and lengths are prefetched as scalars: index maps clamp to the tiles that hold something
visible, so that skipped tiles are not even copied, and `pl.when` skips their arithmetic. float32 products run in full float32.

On another platform the kernels run in interpret mode: right, and slow.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_gpt import random
from flax_gpt.kernels.case import Case, Inputs

LANES = 128
TILE = 512
"""Queries and keys a tile, at most: three float32 maps of 512 × 512 are 3 MiB of the 16 MiB of VMEM that a kernel gets by default."""

WIDEST = 256
"""Largest head width: beyond it the tiles of a backward step leave no room in VMEM."""


def refusal(case: Case) -> str | None:
    """Why this implementation cannot serve `case`, or None."""
    if case.dtype not in ("float32", "bfloat16"):
        return f"the matrix unit has no {case.dtype}"
    if case.return_weights:
        return "it keeps no map, so it cannot return the weights"
    if case.empty_rows != "zero":
        return f"empty_rows = {case.empty_rows!r} exists in the dense implementation alone"
    if max(case.width, case.value_width) > WIDEST:
        return f"a head is wider than {WIDEST}"
    if case.bias is not None and case.bias[2:] != (case.queries, case.keys):
        return "the gradient of a bias that is broadcast over T or S would need a whole map"
    return None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Padded sizes, tiles and what to compare; static."""

    case: Case
    queries: int
    keys: int

    @property
    def rows(self) -> int:
        """T in whole tiles."""
        return -(-self.case.queries // self.queries) * self.queries

    @property
    def columns(self) -> int:
        """S in whole tiles."""
        return -(-self.case.keys // self.keys) * self.keys

    @property
    def left(self) -> int | None:
        return None if self.case.window is None else self.case.window[0]

    @property
    def right(self) -> int | None:
        return 0 if self.case.causal else (None if self.case.window is None else self.case.window[1])

    def key_tiles(self, i: Any, offset: Any, length: Any) -> tuple[Any, Any]:
        """First key tile, and the one behind the last, that query tile i sees."""
        first, end = jnp.int32(0), length
        if self.right is not None:
            end = jnp.minimum(end, (i + 1) * self.queries + offset + self.right)
        if self.left is not None:
            first = jnp.maximum(first, i * self.queries + offset - self.left)
        return _down(first, self.keys), _down(jnp.maximum(end, 0) + self.keys - 1, self.keys)

    def query_tiles(self, j: Any, offset: Any, length: Any) -> tuple[Any, Any]:
        """First query tile, and the one behind the last, that sees key tile j."""
        first, end = jnp.int32(0), jnp.int32(self.rows)
        if self.right is not None:
            first = jnp.maximum(first, j * self.keys - self.right - offset)
        if self.left is not None:
            end = jnp.minimum(end, (j + 1) * self.keys + self.left - offset)
        end = jnp.where(j * self.keys < length, jnp.maximum(end, 0), 0)
        return _down(first, self.queries), _down(end + self.queries - 1, self.queries)


def _down(length: Any, size: int) -> Any:
    return lax.div(length, jnp.int32(size))


def _plan(case: Case) -> _Plan:
    fit = lambda n: min(TILE, -(-n // LANES) * LANES)
    return _Plan(case, fit(case.queries), fit(case.keys))


def attend(case: Case, q: Array, k: Array, v: Array, given: Inputs) -> tuple[Array, None, Array]:
    """q (B, T, H, Dh), k (B, S, K, Dh), v (B, S, K, Dv) → out (B, T, H, Dv), no weights, lse (B, T, H)."""
    out, lse = _attend(case, q, k, v, given.bias, dataclasses.replace(given, bias=None))
    return out, None, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(case: Case, q: Array, k: Array, v: Array, bias: Array | None, given: Inputs) -> tuple[Array, Array]:
    return _forward(case, q, k, v, bias, given)[0]


def _forward(case: Case, q: Array, k: Array, v: Array, bias: Array | None, given: Inputs) -> tuple[tuple[Array, Array], Any]:
    plan = _plan(case)
    bad_q, bad_k, bad_v = (~jnp.all(jnp.isfinite(x), axis=-1, keepdims=True) for x in (q, k, v))
    marked = lambda x, bad: jnp.where(bad, np.asarray(jnp.nan, x.dtype), x)
    queries, keys, values = _heads(plan, marked(q, bad_q)), _heads(plan, marked(k, bad_k | bad_v), True), _heads(plan, _finite(v), True)
    call = _Call(plan, given, bias, "bhij")
    out, peak, total = call.run(
        _forward_kernel,
        inputs=[(queries, "query"), (keys, "key"), (values, "key")],
        outputs=[(queries.shape[:3] + values.shape[3:], q.dtype, "query"), *2 * [(_row_shape(plan), jnp.float32, "row")]],
        scratch=[(plan.queries, LANES), (plan.queries, LANES), (plan.queries, values.shape[3])],
    )
    out = out[:, :, : case.queries, : case.value_width].transpose(0, 2, 1, 3)
    lse = jnp.where(total == 0.0, -jnp.inf, peak + jnp.log(jnp.where(total == 0.0, 1.0, total)))
    return (out, lse[:, :, 0, : case.queries].transpose(0, 2, 1)), (q, k, v, bias, given, out, peak, total)


def _backward(case: Case, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    q, k, v, bias, given, out, peak, total = saved
    d_out, d_lse = cotangents
    plan = _plan(case)
    queries, keys, values, d_outs = _heads(plan, _finite(q)), _heads(plan, _finite(k), True), _heads(plan, _finite(v), True), _heads(plan, d_out)
    through = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    through = jnp.pad(through.transpose(0, 2, 1)[:, :, None, :], ((0, 0), (0, 0), (0, 0), (0, plan.rows - case.queries)))
    inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
    inputs = [(queries, "query"), (keys, "key"), (values, "key"), (d_outs, "query"), *((row, "row") for row in (peak, inverse, through))]
    (d_q,) = _Call(plan, given, bias, "bhij").run(
        _query_kernel, inputs=inputs, outputs=[(queries.shape, q.dtype, "query")], scratch=[(plan.queries, queries.shape[3])]
    )
    d_k, d_v = _Call(plan, given, bias, "bkjgi").run(
        _key_kernel,
        inputs=inputs,
        outputs=[(keys.shape, k.dtype, "key"), (values.shape, v.dtype, "key")],
        scratch=[(plan.keys, keys.shape[3]), (plan.keys, values.shape[3])],
    )
    d_bias = None
    if bias is not None:
        # A call of its own: the compiler drops it when nobody asks for the gradient of the bias.
        whole = (case.batch, case.heads, plan.rows, plan.columns)
        (d_bias,) = _Call(plan, given, bias, "bhij").run(_bias_kernel, inputs=inputs, outputs=[(whole, jnp.float32, "map")], scratch=[])
        d_bias = d_bias[:, :, : case.queries, : case.keys]
        shared = tuple(axis for axis in (0, 1) if bias.shape[axis] < d_bias.shape[axis])
        d_bias = jnp.sum(d_bias, axis=shared, keepdims=True).astype(bias.dtype)
    cut = lambda x, n, width: x[:, :, :n, :width].transpose(0, 2, 1, 3)
    d_q, d_k = cut(d_q, case.queries, case.width), cut(d_k, case.keys, case.width)
    return d_q, d_k, cut(d_v, case.keys, case.value_width), d_bias, None


_attend.defvjp(_forward, _backward)


class _Call:
    """One kernel over one grid: where each array's tile lies, and the scalars that skip tiles."""

    def __init__(self, plan: _Plan, given: Inputs, bias: Array | None, axes: str):
        case = plan.case
        self.plan, self.given, self.axes = plan, given, axes
        offset = jnp.full((case.batch,), case.offset, jnp.int32) if case.offset is not None else jnp.broadcast_to(given.query_offset, (case.batch,))
        lengths = jnp.full((case.batch,), case.keys, jnp.int32) if given.kv_lengths is None else jnp.clip(given.kv_lengths, 0, case.keys)
        self.scalars = [offset.astype(jnp.int32), lengths.astype(jnp.int32)]
        if given.dropout_key is not None:
            self.scalars.append(lax.bitcast_convert_type(given.dropout_key, jnp.int32).reshape(-1))
        self.maps = [x for x in (None if given.mask is None else given.mask.astype(jnp.int8), bias) if x is not None]
        sizes = dict(b=case.batch, h=case.heads, k=case.kv_heads, g=case.group, i=plan.rows // plan.queries, j=plan.columns // plan.keys)
        self.grid = tuple(sizes[axis] for axis in axes)

    def place(self, ids: Any, scalars: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Row, query head, key/value head, query tile and key tile of a grid step; tiles that are skipped repeat a neighbour's place."""
        plan, case = self.plan, self.plan.case
        at = dict(zip(self.axes, ids, strict=True))
        b, i, j = at["b"], at["i"], at["j"]
        head = at["h"] if "h" in at else at["k"] * case.group + at["g"]
        offset, length = scalars[0][b], scalars[1][b]
        if self.axes == "bhij":
            first, behind = plan.key_tiles(i, offset, length)
            j = jnp.clip(j, *_inside(first, behind, plan.columns // plan.keys))
        else:
            first, behind = plan.query_tiles(j, offset, length)
            i = jnp.clip(i, *_inside(first, behind, plan.rows // plan.queries))
        return b, head, _down(head, case.group), i, j

    def spec(self, shape: tuple[int, ...], kind: str) -> pl.BlockSpec:
        plan = self.plan
        if kind == "map":
            block = (1, 1, min(shape[2], plan.queries), min(shape[3], plan.keys))

            def index(*args: Any) -> Any:
                b, h, _, i, j = self.place(args[: len(self.grid)], args[len(self.grid) :])
                return tuple(0 if n == 1 else at for n, at in zip(shape, (b, h, i, j), strict=True))

            return pl.BlockSpec(block, index)
        block = {"query": (1, 1, plan.queries, shape[3]), "key": (1, 1, plan.keys, shape[3]), "row": (1, 1, 1, plan.queries)}[kind]

        def index_of(*args: Any) -> Any:
            b, h, k, i, j = self.place(args[: len(self.grid)], args[len(self.grid) :])
            return {"query": (b, h, i, 0), "key": (b, k, j, 0), "row": (b, h, 0, i)}[kind]

        return pl.BlockSpec(block, index_of)

    def result_spec(self, shape: tuple[int, ...], kind: str) -> pl.BlockSpec:
        """As `spec`, at the step's own tile: a result is written whether or not its tile sees anything."""
        if kind != "map":
            return self.spec(shape, kind)
        return pl.BlockSpec((1, 1, self.plan.queries, self.plan.keys), lambda *args: args[:4])

    def run(self, kernel: Any, *, inputs: list[Any], outputs: list[Any], scratch: list[Any]) -> Any:
        maps = [_padded(self.plan, x) for x in self.maps]
        case = self.plan.case
        sequential = 1 if self.axes == "bhij" else 2
        semantics: Any = ("parallel",) * (len(self.grid) - sequential) + ("arbitrary",) * sequential
        return pl.pallas_call(
            functools.partial(kernel, self.plan, self.axes, self.given.mask is not None, len(maps) > (self.given.mask is not None), len(inputs)),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.scalars),
                grid=self.grid,
                in_specs=[self.spec(x.shape, kind) for x, kind in inputs] + [self.spec(x.shape, "map") for x in maps],
                out_specs=[self.result_spec(shape, kind) for shape, _, kind in outputs],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in outputs],
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
            cost_estimate=_cost(self, kernel, inputs, outputs),
            interpret=case.platform != "tpu",
            name=f"attention{kernel.__name__.removesuffix('_kernel')}",
        )(*self.scalars, *(x for x, _ in inputs), *maps)


def _cost(call: _Call, kernel: Any, inputs: list[Any], outputs: list[Any]) -> pl.CostEstimate:
    """For the compiler's schedule: every product of every tile, a causal limit counted as half of them."""
    case, plan = call.plan.case, call.plan
    scores = case.batch * case.heads * plan.rows * plan.columns // (2 if case.causal else 1)
    widths = {_forward_kernel: 1, _query_kernel: 2, _key_kernel: 2, _bias_kernel: 1}[kernel] * case.width
    widths += {_forward_kernel: 1, _query_kernel: 1, _key_kernel: 2, _bias_kernel: 1}[kernel] * case.value_width
    size = lambda shape, dtype: int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    moved = sum(size(x.shape, x.dtype) for x, _ in inputs) + sum(size(shape, dtype) for shape, dtype, _ in outputs)
    return pl.CostEstimate(flops=2 * scores * widths, transcendentals=scores, bytes_accessed=moved)


def _inside(first: Any, behind: Any, count: int) -> tuple[Any, Any]:
    first = jnp.minimum(first, count - 1)
    return first, jnp.clip(behind - 1, first, count - 1)


class _Step:
    """What a kernel knows at one step of its grid."""

    def __init__(self, plan: _Plan, axes: str, masked: bool, biased: bool, count: int, refs: tuple[Any, ...]):
        self.plan, case = plan, plan.case
        ids = {axis: pl.program_id(n) for n, axis in enumerate(axes)}
        sizes = {axis: pl.num_programs(n) for n, axis in enumerate(axes)}
        scalars = 2 + (case.dropout_rate > 0.0)
        self.b, self.i, self.j = ids["b"], ids["i"], ids["j"]
        self.head = ids["h"] if "h" in ids else ids["k"] * case.group + ids["g"]
        self.offset, self.length = refs[0][self.b], refs[1][self.b]
        self.key_words = refs[2] if scalars == 3 else None
        self.inputs = refs[scalars : scalars + count]
        rest = list(refs[scalars + count :])
        self.mask = rest.pop(0) if masked else None
        self.bias = rest.pop(0) if biased else None
        self.rest = rest
        first, behind = plan.key_tiles(self.i, self.offset, self.length)
        self.needed = (self.j >= first) & (self.j < behind)
        if axes == "bhij":
            self.starts, self.ends = self.j == 0, self.j == sizes["j"] - 1
        else:
            self.starts = (ids["g"] == 0) & (self.i == 0)
            self.ends = (ids["g"] == sizes["g"] - 1) & (self.i == sizes["i"] - 1)

    def scores(self) -> tuple[Array, Array]:
        """Scores (queries, keys) of the tile and what of it is visible."""
        plan, case = self.plan, self.plan.case
        q, k = self.inputs[0][0, 0], self.inputs[1][0, 0]
        scores = _dot(q, k, ((1,), (1,))) * case.scale
        shape = scores.shape
        columns = self.j * plan.keys + lax.broadcasted_iota(jnp.int32, shape, 1)
        seen = columns < self.length
        if plan.right is not None or plan.left is not None:
            distance = columns - (self.i * plan.queries + self.offset + lax.broadcasted_iota(jnp.int32, shape, 0))
            if plan.right is not None:
                seen &= distance <= plan.right
            if plan.left is not None:
                seen &= distance >= -plan.left
        if self.mask is not None:
            seen &= jnp.broadcast_to(self.mask[0, 0].astype(jnp.int32), shape) != 0
        if self.bias is not None:
            bias = self.bias[0, 0].astype(jnp.float32)
            scores += bias
            seen &= bias != -jnp.inf
        return scores, seen

    def weights(self) -> tuple[Array, Array]:
        """Weights of the tile, computed again, and what of it is visible."""
        scores, seen = self.scores()
        peak, inverse = _column(self.inputs[4][0, 0]), _column(self.inputs[5][0, 0])
        return jnp.exp(scores - peak) * inverse, seen

    def d_scores(self) -> tuple[Array, Array]:
        """Gradients of the tile's scores, and its weights as the values saw them."""
        weights, seen = self.weights()
        d_weights = _dot(self.inputs[3][0, 0], self.inputs[2][0, 0], ((1,), (1,)))
        kept = weights
        if self.key_words is not None:
            keep, share = self.keep(weights.shape), 1.0 / (1.0 - self.plan.case.dropout_rate)
            d_weights, kept = jnp.where(keep, d_weights * share, 0.0), jnp.where(keep, kept * share, 0.0)
        d_scores = weights * (d_weights - _column(self.inputs[6][0, 0]))
        return jnp.where(seen, d_scores, 0.0), jnp.where(seen, kept, 0.0)

    def keep(self, shape: tuple[int, ...]) -> Array:
        """Which weights dropout keeps: the draw of the dense implementation."""
        plan, case = self.plan, self.plan.case
        assert self.key_words is not None
        at = 2 * (self.b * case.heads + self.head)
        word = lambda n: lax.bitcast_convert_type(jnp.full((plan.queries, 1), self.key_words[at + n], jnp.int32), jnp.uint32)
        rows = self.i * plan.queries + self.offset + lax.broadcasted_iota(jnp.int32, (plan.queries, 1), 0)
        k0, k1 = _fold(word(0), word(1), lax.bitcast_convert_type(rows, jnp.uint32))
        columns = self.j * plan.keys + lax.broadcasted_iota(jnp.int32, shape, 1)
        bits = random._hash(k0, k1, lax.bitcast_convert_type(columns, jnp.uint32))
        return bits >= np.uint32(random.threshold(case.dropout_rate))


def _forward_kernel(plan: _Plan, axes: str, masked: bool, biased: bool, count: int, *refs: Any) -> None:
    step = _Step(plan, axes, masked, biased, count, refs)
    out, peak_row, total_row, peak, total, acc = step.rest

    @pl.when(step.starts)
    def _() -> None:
        peak[...] = jnp.full(peak.shape, jnp.finfo(jnp.float32).min, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(step.needed)
    def _() -> None:
        scores, seen = step.scores()
        scores = jnp.where(seen, scores, -jnp.inf)
        before = peak[:, :1]
        higher = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        powers, rescale = jnp.exp(scores - higher), jnp.exp(before - higher)
        total[...] = jnp.broadcast_to(total[:, :1] * rescale + jnp.sum(powers, axis=1, keepdims=True), total.shape)
        peak[...] = jnp.broadcast_to(higher, peak.shape)
        if step.key_words is not None:
            powers = jnp.where(step.keep(powers.shape), powers, 0.0)
        values = step.inputs[2][0, 0]
        acc[...] = acc[...] * rescale + _dot(powers.astype(values.dtype), values, ((1,), (0,)))

    @pl.when(step.ends)
    def _() -> None:
        safe = jnp.where(total[:, :1] == 0.0, 1.0, total[:, :1])
        out[0, 0] = (acc[...] / (safe * (1.0 - plan.case.dropout_rate))).astype(out.dtype)
        peak_row[0, 0], total_row[0, 0] = peak[...].T[:1], total[...].T[:1]


def _query_kernel(plan: _Plan, axes: str, masked: bool, biased: bool, count: int, *refs: Any) -> None:
    step = _Step(plan, axes, masked, biased, count, refs)
    out, acc = step.rest

    @pl.when(step.starts)
    def _() -> None:
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(step.needed)
    def _() -> None:
        d_scores, _ = step.d_scores()
        keys = step.inputs[1][0, 0]
        acc[...] += _dot(d_scores.astype(keys.dtype), keys, ((1,), (0,)))

    @pl.when(step.ends)
    def _() -> None:
        out[0, 0] = (acc[...] * plan.case.scale).astype(out.dtype)


def _key_kernel(plan: _Plan, axes: str, masked: bool, biased: bool, count: int, *refs: Any) -> None:
    step = _Step(plan, axes, masked, biased, count, refs)
    d_keys, d_values, acc_keys, acc_values = step.rest

    @pl.when(step.starts)
    def _() -> None:
        acc_keys[...] = jnp.zeros(acc_keys.shape, jnp.float32)
        acc_values[...] = jnp.zeros(acc_values.shape, jnp.float32)

    @pl.when(step.needed)
    def _() -> None:
        d_scores, kept = step.d_scores()
        queries, d_outs = step.inputs[0][0, 0], step.inputs[3][0, 0]
        acc_keys[...] += _dot(d_scores.astype(queries.dtype), queries, ((0,), (0,)))
        acc_values[...] += _dot(kept.astype(d_outs.dtype), d_outs, ((0,), (0,)))

    @pl.when(step.ends)
    def _() -> None:
        d_keys[0, 0] = (acc_keys[...] * plan.case.scale).astype(d_keys.dtype)
        d_values[0, 0] = acc_values[...].astype(d_values.dtype)


def _bias_kernel(plan: _Plan, axes: str, masked: bool, biased: bool, count: int, *refs: Any) -> None:
    step = _Step(plan, axes, masked, biased, count, refs)
    (out,) = step.rest

    @pl.when(step.needed)
    def _() -> None:
        out[0, 0] = step.d_scores()[0]

    @pl.when(jnp.logical_not(step.needed))
    def _() -> None:
        out[0, 0] = jnp.zeros(out.shape[2:], out.dtype)


def _dot(a: Array, b: Array, contract: tuple[tuple[int], tuple[int]]) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _column(row: Array) -> Array:
    """(1, n) → (n, 1)."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def _heads(plan: _Plan, x: Array, key: bool = False) -> Array:
    """(B, T, H, D) → (B, H, T, D), zeros up to whole tiles and whole lanes."""
    length = (plan.columns if key else plan.rows) - x.shape[1]
    return jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, length), (0, -x.shape[3] % LANES)))


def _row_shape(plan: _Plan) -> tuple[int, int, int, int]:
    return (plan.case.batch, plan.case.heads, 1, plan.rows)


def _padded(plan: _Plan, x: Array) -> Array:
    """A map in whole tiles; axes of length 1 stay."""
    grow = [(0, 0), (0, 0)] + [(0, full - n if n > 1 else 0) for n, full in zip(x.shape[2:], (plan.rows, plan.columns), strict=True)]
    return jnp.pad(x, grow)


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, np.zeros((), x.dtype))


def _fold(k0: Array, k1: Array, word: Array) -> tuple[Array, Array]:
    """`random.fold` on the two words of a key apart: a kernel has no arrays with an axis of two."""
    return random._hash(k0, k1, word), random._hash(k1 ^ random._OTHER, k0, word)
