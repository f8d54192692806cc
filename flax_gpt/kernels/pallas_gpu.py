"""Attention for NVIDIA GPUs of the Hopper generation and newer in Pallas (Mosaic GPU): the algorithm of `blocked`, one warpgroup a tile.

A block of 64 queries (forward and dq) or 64 keys (dk and dv) stays in shared memory while tiles of the other side stream past it: the copy engine
fetches the next tile into one of two slots while the tensor cores work on this one (Dao et al. 2022, algorithms 1 and 4; two slots as in Shah et
al. 2024, "FlashAttention-3", section 3.1). The left factor of every second product is the weights' tile in registers, never written out. The
loops run from the first to the last tile with something visible.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flax_gpt.kernels.case import Case, Inputs

TILE = 64
"""Queries and keys a tile: the rows of one warpgroup's product."""

LANE = 64
"""Numbers of 16 bits in a swizzled row of shared memory; head widths are padded to a multiple."""

WIDEST = 128
"""Largest head width: the two sums of the key kernel fill the registers of a warpgroup."""

HOPPER = 9.0
"""Compute capability from which on there are warpgroup products and the copy engine."""

INTERPRET: Any = None
"""Parameters of interpret mode, for tests on a host without such a GPU; jax keeps their class private."""


def refusal(case: Case) -> str | None:
    """Why this implementation cannot serve `case`, or None."""
    if case.platform != "gpu" and INTERPRET is None:
        return "it needs an NVIDIA GPU"
    if _capability() < HOPPER:
        return f"it needs compute capability {HOPPER} (Hopper), this GPU has {_capability()}"
    if case.dtype not in ("bfloat16", "float16"):
        return f"its tensor-core products take 16-bit numbers, not {case.dtype}"
    if max(case.width, case.value_width) > WIDEST:
        return f"a head is wider than {WIDEST}"
    for feature, present in (("a mask", case.mask), ("a bias", case.bias), ("dropout", case.dropout_rate), ("the weights", case.return_weights)):
        if present:
            return f"it has no {feature.removeprefix('a ').removeprefix('the ')}"
    if case.empty_rows != "zero":
        return f"empty_rows = {case.empty_rows!r} exists in the dense implementation alone"
    return None


def _capability() -> float:
    """Least compute capability of the GPUs here; a host without one traces for a new one."""
    found = [device for device in jax.local_devices() if device.platform == "gpu"]
    return min((float(getattr(device, "compute_capability", HOPPER)) for device in found), default=HOPPER)


def attend(case: Case, q: Array, k: Array, v: Array, given: Inputs) -> tuple[Array, None, Array]:
    """q (B, T, H, Dh), k (B, S, K, Dh), v (B, S, K, Dv) → out (B, T, H, Dv), no weights, lse (B, T, H)."""
    out, lse = _attend(case, q, k, v, given)
    return out, None, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(case: Case, q: Array, k: Array, v: Array, given: Inputs) -> tuple[Array, Array]:
    return _forward(case, q, k, v, given)[0]


def _forward(case: Case, q: Array, k: Array, v: Array, given: Inputs) -> tuple[tuple[Array, Array], Any]:
    view = _View(case)
    bad_q, bad_k, bad_v = (~jnp.all(jnp.isfinite(x), axis=-1, keepdims=True) for x in (q, k, v))
    marked = lambda x, bad: jnp.where(bad, np.asarray(jnp.nan, x.dtype), x)
    queries, keys, values = view.heads(marked(q, bad_q)), view.heads(marked(k, bad_k | bad_v)), view.heads(_finite(v))
    rows = jax.ShapeDtypeStruct(queries.shape[:3], jnp.float32)
    tile, vector = view.tile, view.vector
    out, peak, total = _kernel(
        functools.partial(_forward_kernel, view),
        outputs=[jax.ShapeDtypeStruct((*queries.shape[:3], values.shape[3]), q.dtype), rows, rows],
        grid=(case.batch, case.heads, queries.shape[2] // TILE),
        scratch=[
            *(tile(queries), tile(values), vector(), vector(), tile(keys, 2), tile(values, 2)),
            *(plgpu.Barrier(), plgpu.Barrier(num_arrivals=2, num_barriers=2)),
        ],
    )(*view.scalars(given), queries, keys, values)
    lse = jnp.where(total == 0.0, -jnp.inf, peak + jnp.log(jnp.where(total == 0.0, 1.0, total)))
    out = view.back(out, case.queries, case.value_width)
    return (out, lse[:, :, : case.queries].transpose(0, 2, 1)), (q, k, v, given, out, peak, total)


def _backward(case: Case, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    q, k, v, given, out, peak, total = saved
    d_out, d_lse = cotangents
    view = _View(case)
    queries, keys, values, d_outs = view.heads(_finite(q)), view.heads(_finite(k)), view.heads(_finite(v)), view.heads(d_out)
    through = (jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse).transpose(0, 2, 1)
    through = jnp.pad(through, ((0, 0), (0, 0), (0, peak.shape[2] - case.queries)))
    arrays = (queries, keys, values, d_outs, peak, 1.0 / jnp.where(total == 0.0, 1.0, total), through)
    tile, vector = view.tile, view.vector
    (d_q,) = _kernel(
        functools.partial(_query_kernel, view),
        outputs=[jax.ShapeDtypeStruct(queries.shape, q.dtype)],
        grid=(case.batch, case.heads, queries.shape[2] // TILE),
        scratch=[
            *(tile(queries), tile(values), vector(), vector(), vector(), tile(keys, 2), tile(values, 2)),
            *(plgpu.Barrier(num_arrivals=5), plgpu.Barrier(num_arrivals=2, num_barriers=2)),
        ],
    )(*view.scalars(given), *arrays)
    d_k, d_v = _kernel(
        functools.partial(_key_kernel, view),
        outputs=[jax.ShapeDtypeStruct(keys.shape, k.dtype), jax.ShapeDtypeStruct(values.shape, v.dtype)],
        grid=(case.batch, case.kv_heads, keys.shape[2] // TILE),
        scratch=[
            *(tile(keys), tile(values), tile(queries, 2), tile(values, 2), vector(2), vector(2), vector(2)),
            *(plgpu.Barrier(num_arrivals=2), plgpu.Barrier(num_arrivals=5, num_barriers=2)),
        ],
    )(*view.scalars(given), *arrays)
    return view.back(d_q, case.queries, case.width), view.back(d_k, case.keys, case.width), view.back(d_v, case.keys, case.value_width), None


_attend.defvjp(_forward, _backward)


def _kernel(body: Callable[..., None], *, outputs: list[Any], grid: tuple[int, ...], scratch: list[Any]) -> Callable[..., Any]:
    return plgpu.kernel(
        body,
        out_type=outputs,
        grid=grid,
        grid_names=("row", "head", "tile"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=INTERPRET,
    )


@dataclasses.dataclass(frozen=True)
class _View:
    """Layout and visibility of one case; static."""

    case: Case

    def heads(self, x: Array) -> Array:
        """(B, T, H, D) → (B, H, T, D), zeros up to whole tiles and whole lanes."""
        return jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, -x.shape[1] % TILE), (0, -x.shape[3] % LANE)))

    def back(self, x: Array, length: int, width: int) -> Array:
        return x[:, :, :length, :width].transpose(0, 2, 1, 3)

    def tile(self, x: Array, slots: int | None = None) -> Any:
        """Shared memory for one tile of `x`, or for `slots` of them."""
        shape = (TILE, x.shape[3]) if slots is None else (slots, TILE, x.shape[3])
        return plgpu.SMEM(shape, x.dtype, transforms=(plgpu.TilingTransform((8, LANE)), plgpu.SwizzleTransform(2 * LANE)))

    def vector(self, slots: int | None = None) -> Any:
        return plgpu.SMEM((TILE,) if slots is None else (slots, TILE), jnp.float32)

    def scalars(self, given: Inputs) -> tuple[Array, Array]:
        """Offset and number of keys of each row, (B,) int32."""
        case = self.case
        offset = jnp.full((case.batch,), case.offset, jnp.int32) if case.offset is not None else jnp.broadcast_to(given.query_offset, (case.batch,))
        lengths = jnp.full((case.batch,), case.keys, jnp.int32) if given.kv_lengths is None else jnp.clip(given.kv_lengths, 0, case.keys)
        return offset.astype(jnp.int32), lengths.astype(jnp.int32)

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
            end = jnp.minimum(end, (i + 1) * TILE + offset + self.right)
        if self.left is not None:
            first = jnp.maximum(first, i * TILE + offset - self.left)
        return _down(first), _down(jnp.maximum(end, 0) + (TILE - 1))

    def query_tiles(self, j: Any, offset: Any, length: Any) -> tuple[Any, Any]:
        """First query tile, and the one behind the last, that sees key tile j."""
        first, end = jnp.int32(0), jnp.int32(self.case.queries)
        if self.right is not None:
            first = jnp.maximum(first, j * TILE - self.right - offset)
        if self.left is not None:
            end = jnp.minimum(end, (j + 1) * TILE + self.left - offset)
        end = jnp.where(j * TILE < length, jnp.maximum(end, 0), 0)
        first, end = _down(first), _down(end + (TILE - 1))
        return first, jnp.maximum(first, end)

    def seen(self, i: Any, j: Any, offset: Any, length: Any, queries_axis: int) -> Array:
        """What is visible in the tile of query tile i and key tile j; queries lie along `queries_axis`."""
        keys = _iota(1 - queries_axis) + j * TILE
        seen = keys < length
        if self.right is not None or self.left is not None:
            distance = keys - (_iota(queries_axis) + (i * TILE + offset))
            if self.right is not None:
                seen &= distance <= self.right
            if self.left is not None:
                seen &= distance >= -self.left
        return seen


def _forward_kernel(view: _View, offsets: Any, lengths: Any, q: Any, k: Any, v: Any, out: Any, peaks: Any, totals: Any,
                    q_s: Any, out_s: Any, peak_s: Any, total_s: Any, k_s: Any, v_s: Any, ready: Any, arrived: Any) -> None:  # fmt: skip
    b, h, i = (lax.axis_index(name) for name in ("row", "head", "tile"))
    offset, length = offsets[b], lengths[b]
    rows, kv = pl.ds(i * TILE, TILE), lax.div(h, jnp.int32(view.case.group))
    plgpu.copy_gmem_to_smem(q.at[b, h, rows], q_s, ready)
    plgpu.barrier_wait(ready)
    fetch = lambda j, slot: _fetch(
        arrived.at[slot], (k.at[b, kv, pl.ds(j * TILE, TILE)], k_s.at[slot]), (v.at[b, kv, pl.ds(j * TILE, TILE)], v_s.at[slot])
    )

    def step(j: Any, slot: Any, state: Any) -> Any:
        peak, total, acc = state
        scores = _product(q_s, k_s.at[slot]) * view.case.scale
        scores = jnp.where(view.seen(i, j, offset, length, 0), scores, -jnp.inf)
        higher = jnp.maximum(peak, scores.max(axis=1))
        powers, rescale = jnp.exp(scores - _across(higher, 0, TILE)), jnp.exp(peak - higher)
        acc *= _across(rescale, 0, acc.shape[1])
        return higher, total * rescale + powers.sum(axis=1), _accumulate(acc, powers.astype(q.dtype), v_s.at[slot])

    empty = (_vector(float(jnp.finfo(jnp.float32).min)), _vector(0.0), _zeros(v_s.shape[2]))
    peak, total, acc = _stream(view.key_tiles(i, offset, length), fetch, arrived, step, empty)
    safe = jnp.where(total == 0.0, 1.0, total)
    out_s[...] = (acc / _across(safe, 0, acc.shape[1])).astype(out.dtype)
    peak_s[...], total_s[...] = peak, total
    _write((out_s, out.at[b, h, rows]), (peak_s, peaks.at[b, h, rows]), (total_s, totals.at[b, h, rows]))


def _query_kernel(view: _View, offsets: Any, lengths: Any, q: Any, k: Any, v: Any, d_out: Any, peaks: Any, inverses: Any, throughs: Any, d_q: Any,
                  q_s: Any, d_s: Any, peak_s: Any, inverse_s: Any, through_s: Any, k_s: Any, v_s: Any, ready: Any, arrived: Any) -> None:  # fmt: skip
    b, h, i = (lax.axis_index(name) for name in ("row", "head", "tile"))
    offset, length = offsets[b], lengths[b]
    rows, kv = pl.ds(i * TILE, TILE), lax.div(h, jnp.int32(view.case.group))
    _fetch(ready, (q.at[b, h, rows], q_s), (d_out.at[b, h, rows], d_s), (peaks.at[b, h, rows], peak_s), (inverses.at[b, h, rows], inverse_s),
           (throughs.at[b, h, rows], through_s))  # fmt: skip
    plgpu.barrier_wait(ready)
    peak, inverse, through = (_load(x, 1) for x in (peak_s, inverse_s, through_s))
    fetch = lambda j, slot: _fetch(
        arrived.at[slot], (k.at[b, kv, pl.ds(j * TILE, TILE)], k_s.at[slot]), (v.at[b, kv, pl.ds(j * TILE, TILE)], v_s.at[slot])
    )

    def step(j: Any, slot: Any, acc: Array) -> Array:
        scores = _product(q_s, k_s.at[slot]) * view.case.scale
        weights = jnp.exp(scores - _across(peak, 0, TILE)) * _across(inverse, 0, TILE)
        d_scores = weights * (_product(d_s, v_s.at[slot]) - _across(through, 0, TILE))
        d_scores = jnp.where(view.seen(i, j, offset, length, 0), d_scores, 0.0)
        return _accumulate(acc, d_scores.astype(q.dtype), k_s.at[slot])

    acc = _stream(view.key_tiles(i, offset, length), fetch, arrived, step, _zeros(q_s.shape[1]))
    q_s[...] = (acc * view.case.scale).astype(d_q.dtype)
    _write((q_s, d_q.at[b, h, rows]))


def _key_kernel(view: _View, offsets: Any, lengths: Any, q: Any, k: Any, v: Any, d_out: Any, peaks: Any, inverses: Any, throughs: Any,
                d_k: Any, d_v: Any, k_s: Any, v_s: Any, q_s: Any, d_s: Any, peak_s: Any, inverse_s: Any, through_s: Any,
                ready: Any, arrived: Any) -> None:  # fmt: skip
    b, kv, j = (lax.axis_index(name) for name in ("row", "head", "tile"))
    offset, length = offsets[b], lengths[b]
    columns = pl.ds(j * TILE, TILE)
    _fetch(ready, (k.at[b, kv, columns], k_s), (v.at[b, kv, columns], v_s))
    plgpu.barrier_wait(ready)
    first, behind = view.query_tiles(j, offset, length)
    count = behind - first
    tile_of = lambda n: first + lax.rem(n, jnp.maximum(count, 1))

    def fetch(n: Any, slot: Any) -> None:
        h, rows = kv * view.case.group + lax.div(n, jnp.maximum(count, 1)), pl.ds(tile_of(n) * TILE, TILE)
        _fetch(arrived.at[slot], (q.at[b, h, rows], q_s.at[slot]), (d_out.at[b, h, rows], d_s.at[slot]), (peaks.at[b, h, rows], peak_s.at[slot]),
               (inverses.at[b, h, rows], inverse_s.at[slot]), (throughs.at[b, h, rows], through_s.at[slot]))  # fmt: skip

    def step(n: Any, slot: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        acc_k, acc_v = state
        peak, inverse, through = (_load(x.at[slot], 0) for x in (peak_s, inverse_s, through_s))
        seen = view.seen(tile_of(n), j, offset, length, 1)
        scores = _product(k_s, q_s.at[slot]) * view.case.scale
        weights = jnp.where(seen, jnp.exp(scores - _across(peak, 1, TILE)) * _across(inverse, 1, TILE), 0.0)
        acc_v = _accumulate(acc_v, weights.astype(q.dtype), d_s.at[slot])
        d_scores = jnp.where(seen, weights * (_product(v_s, d_s.at[slot]) - _across(through, 1, TILE)), 0.0)
        return _accumulate(acc_k, d_scores.astype(q.dtype), q_s.at[slot]), acc_v

    empty = (_zeros(k_s.shape[1]), _zeros(v_s.shape[1]))
    acc_k, acc_v = _stream((jnp.int32(0), count * view.case.group), fetch, arrived, step, empty)
    k_s[...], v_s[...] = (acc_k * view.case.scale).astype(d_k.dtype), acc_v.astype(d_v.dtype)
    _write((k_s, d_k.at[b, kv, columns]), (v_s, d_v.at[b, kv, columns]))


def _stream(bounds: tuple[Any, Any], fetch: Callable[[Any, Any], None], arrived: Any, step: Callable[[Any, Any, Any], Any], state: Any) -> Any:
    """`step(j, slot, state)` for each j within bounds; the copy of j + 1 runs meanwhile."""
    first, behind = bounds
    slot_of = lambda j: lax.rem(j - first, jnp.int32(2))
    pl.when(first < behind)(lambda: fetch(first, jnp.int32(0)))

    def body(j: Any, state: Any) -> Any:
        plgpu.barrier_wait(arrived.at[slot_of(j)])
        pl.when(j + 1 < behind)(lambda: fetch(j + 1, slot_of(j + 1)))
        return step(j, slot_of(j), state)

    return lax.fori_loop(first, behind, body, state)


def _fetch(barrier: Any, *pairs: tuple[Any, Any]) -> None:
    for source, target in pairs:
        plgpu.copy_gmem_to_smem(source, target, barrier)


def _write(*pairs: tuple[Any, Any]) -> None:
    plgpu.commit_smem()
    for source, target in pairs:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)


def _across(x: Array, axis: int, size: int) -> Array:
    """A vector along `axis` of a tile, repeated `size` times along the other."""
    return lax.broadcast_in_dim(x, (TILE, size) if axis == 0 else (size, TILE), [axis])


def _down(length: Any) -> Any:
    return lax.div(length, jnp.int32(TILE))


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, np.zeros((), x.dtype))


# What names the layout of registers and of shared memory, for which interpret mode has no meaning.


def _product(a: Any, b: Any) -> Array:
    """a (m, d) times the transpose of b (n, d), both in shared memory."""

    def run(acc: Any) -> Array:
        plgpu.wgmma(acc, a, plgpu.transpose_ref(b, (1, 0)))
        return acc[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[0]), jnp.float32))


def _accumulate(acc: Array, a: Array, b: Any) -> Array:
    """acc + a · b, a (m, n) in registers and b (n, d) in shared memory."""
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.WGMMAAccumulatorRef.init(acc))


def _load(x: Any, reduced: int) -> Array:
    """A vector from shared memory, laid out as a tile reduced along axis `reduced`."""
    return plgpu.load(x, (), layout=plgpu.Layout.WGMMA.reduce(reduced))


def _iota(axis: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=plgpu.Layout.WGMMA)


def _vector(value: float) -> Array:
    return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _zeros(width: int) -> Array:
    return plgpu.layout_cast(jnp.zeros((TILE, width), jnp.float32), plgpu.Layout.WGMMA)
