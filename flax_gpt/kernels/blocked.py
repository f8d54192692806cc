"""Attention in strips: the map never exists, memory is linear in T and S, strips hold only keys that their queries may see.

Forward: for each strip of queries the scores of all its keys, one softmax, no rescaling (Rabe & Staats 2021, section 2, with one chunk of keys).
Backward: for each strip of keys its queries, weights computed again from the row's peak and total (Dao et al. 2022, algorithm 4), everything turned
so that the products have their usual form: XLA multiplies a turned left factor three times slower. Peak and total are kept apart, not as lse:
log(total) is lost beside a peak of −3.4e38, which a row has whose every key has a bias of finfo.min.

Plain XLA. A few heads at a time, so that a strip stays in a core's L2; the strips are unrolled, since XLA knows static slices best, and a strip that
would be too large is walked in tiles by a loop: the program does not grow with T. What is hidden for reasons known only at run time is masked.

Tiles have axes (b rows, k key/value heads, g query heads to each, t queries, s keys); in the backward pass (b, k, s, g, t).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from flax_gpt import random
from flax_gpt.kernels.case import Case, Inputs, vary


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a case is cut."""

    batch: int
    """Rows of the batch a chunk."""
    kv_heads: int
    """Key/value heads a chunk; all of them when batch > 1."""
    queries: int
    """Queries a tile of the forward pass."""
    keys: int
    """Keys a strip of the backward pass."""


SIZES: tuple[tuple[int, int, int, int], ...] = (
    (128, 64, 64, 16),
    (512, 128, 128, 4),
    (1 << 62, 256, 256, 1),
)
"""Longest S → queries a tile, keys a strip, heads a chunk: measured so that a tile's scores stay in a core's L2 (docs/performance.md)."""

STRIPS = 16
"""Strips that are unrolled at most; longer inputs get longer strips, walked in tiles."""

AREA = 1 << 19
"""Scores a tile of the backward pass."""


def tiles(case: Case) -> Tiles:
    """The cut that the table asks for, within the sizes of the case."""
    _, queries, keys, heads = next(row for row in SIZES if case.keys <= row[0])
    want = max(1, heads // case.group)
    kv_heads = max(n for n in range(1, case.kv_heads + 1) if case.kv_heads % n == 0 and n <= want)
    rows = want // case.kv_heads if kv_heads == case.kv_heads else 1
    batch = max(n for n in range(1, case.batch + 1) if case.batch % n == 0 and n <= max(rows, 1))
    return Tiles(batch, kv_heads, min(max(queries // case.group, 16), case.queries), min(keys, case.keys))


def refusal(case: Case) -> str | None:
    """Why this implementation cannot serve `case`, or None."""
    if case.return_weights:
        return "it keeps no map, so it cannot return the weights"
    if case.empty_rows != "zero":
        return f"empty_rows = {case.empty_rows!r} exists in the dense implementation alone"
    return None


def attend(case: Case, q: Array, k: Array, v: Array, given: Inputs) -> tuple[Array, None, Array]:
    """q (B, T, H, Dh), k (B, S, K, Dh), v (B, S, K, Dv) → out (B, T, H, Dv), no weights, lse (B, T, H)."""
    reason = refusal(case)
    if reason:
        raise NotImplementedError(f"implementation = 'blocked': {reason}")
    q, k, v, given = vary((q, k, v, given), (q, k, v, given))
    out, lse = _attend(case, q, k, v, given.bias, dataclasses.replace(given, bias=None))
    return out, None, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(case: Case, q: Array, k: Array, v: Array, bias: Array | None, given: Inputs) -> tuple[Array, Array]:
    return _forward(case, q, k, v, bias, given)[0]


def _forward(case: Case, q: Array, k: Array, v: Array, bias: Array | None, given: Inputs) -> tuple[tuple[Array, Array], Any]:
    dtype, view = case.accumulator, _View(case, bias, given)
    lowest = jnp.finfo(dtype).min
    # A NaN in every number of a key that is not finite, or whose value is not, spoils its scores alone, and only those that are visible are kept.
    queries = _split(case, _prescale(case, q + _poison(q)))
    keys = (k + _poison(k) + _poison(v)).transpose(0, 2, 1, 3)
    values = _finite(v).transpose(0, 2, 1, 3)

    def chunk(at: Any, carry: None, arrays: Any) -> Any:
        queries, keys, values = arrays

        def tile(s: Span, t: Span) -> tuple[Array, ...]:
            scores = _product("bkgtd,bksd->bkgts", _part(queries, 3, t), _part(keys, 2, s), dtype)
            scores, seen = view.finish(at, t, s, scores)
            if seen is not None:
                scores = jnp.where(seen, scores, -jnp.inf)
            peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), lowest)
            powers = jnp.exp(scores - peak)
            total = jnp.sum(powers, axis=-1, keepdims=True)
            if case.dropout_rate > 0.0:
                powers = jnp.where(view.keep(at, t, s), powers, 0.0)
            out = _product("bkgts,bksd->bkgtd", powers.astype(v.dtype), _part(values, 2, s), dtype)
            return (out / (jnp.where(total == 0.0, 1.0, total) * (1.0 - case.dropout_rate))).astype(q.dtype), peak, total

        def blind(t: Span) -> tuple[Array, ...]:
            rows = (*queries.shape[:3], t[1])
            return jnp.zeros((*rows, case.value_width), q.dtype), jnp.full((*rows, 1), lowest, dtype), jnp.zeros((*rows, 1), dtype)

        strips = [blind(t) if s is None else _walk(t, view.cut.queries, functools.partial(tile, s)) for t, s in view.query_strips()]
        return carry, tuple(jnp.concatenate(parts, axis=3) for parts in zip(*strips, strict=True))

    _, (out, peak, total) = view.over_chunks(chunk, None, (queries, keys, values))
    lse = jnp.where(total == 0.0, -jnp.inf, peak + jnp.log(jnp.where(total == 0.0, 1.0, total)))
    out = _merge(case, out)
    return (out, _merge(case, lse)[..., 0]), (q, k, v, bias, given, out, peak, total)


def _backward(case: Case, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    q, k, v, bias, given, out, peak, total = saved
    d_out, d_lse = cotangents
    dtype, view = case.accumulator, _View(case, bias, given)
    share = 1.0 / (1.0 - case.dropout_rate)
    through_rows = jnp.sum(d_out.astype(dtype) * out.astype(dtype), axis=-1, keepdims=True)
    # An empty row has no weights, and its lse is −∞ whatever q and k are: its gradient is 0.
    through_rows = _split(case, through_rows - d_lse[..., None])
    # weights = powers / total: the division is taken from the tiles to the rows, but for 16 bits, where it would be rounded once more.
    # A NaN in a row stays in its powers: in d_outs it would reach the hidden, since 0 · NaN is NaN.
    inverse = 1.0 / jnp.where(total > 0.0, total, 1.0)
    on_tiles = not _prescaled(case)
    early = jnp.ones_like(inverse) if on_tiles else inverse
    queries, keys, values = _split(case, _prescale(case, _finite(q))), *(_finite(x).transpose(0, 2, 1, 3) for x in (k, v))
    d_outs = (_split(case, d_out).astype(dtype) * early).astype(q.dtype)
    rows = (peak[..., 0], (through_rows * early)[..., 0], inverse[..., 0])

    def chunk(at: Any, d_bias: Any, arrays: Any) -> Any:
        queries, keys, values, d_outs, peaks, throughs, inverses = arrays
        # Behind a barrier, or the turn is folded into the product, which XLA then does slowly, and in bfloat16 at some sizes not at all.
        turned_keys = lax.optimization_barrier(keys.swapaxes(2, 3))

        def tile(s: Span, t: Span, state: Any) -> Any:
            d_keys, d_values, d_queries, d_bias = state
            q_tile, d_tile = _part(queries, 3, t), _part(d_outs, 3, t)
            k_tile, v_tile = _part(keys, 2, s), _part(values, 2, s)
            on_rows = lambda x: _part(x, 3, t)[:, :, None]
            scores, seen = view.finish(at, t, s, _product("bksd,bkgtd->bksgt", k_tile, q_tile, dtype), turned=True)
            powers = jnp.exp(scores - on_rows(peaks))
            if on_tiles:
                powers = powers * on_rows(inverses)
            if seen is not None:
                powers = jnp.where(seen, powers, 0.0)
            d_powers = _product("bksd,bkgtd->bksgt", v_tile, d_tile, dtype)
            kept = powers
            if case.dropout_rate > 0.0:
                keep = _turn(view.keep(at, t, s))
                d_powers, kept = jnp.where(keep, d_powers * share, 0.0), jnp.where(keep, powers * share, 0.0)
            d_scores = powers * (d_powers - on_rows(throughs))
            if seen is not None:
                d_scores = jnp.where(seen, d_scores, 0.0)
            low = d_scores.astype(q.dtype)
            d_keys = d_keys + _product("bksgt,bkgtd->bksd", low, q_tile, dtype)
            d_values = d_values + _product("bksgt,bkgtd->bksd", kept.astype(v.dtype), d_tile, dtype)
            d_queries = _add(d_queries, 4, t, _product("bkds,bksgt->bkdgt", _part(turned_keys, 3, s), low, dtype))
            return d_keys, d_values, d_queries, None if d_bias is None else view.add_map(d_bias, at, t, s, jnp.moveaxis(d_scores, 2, -1))

        b, n, g, T, _ = queries.shape
        d_queries, strips = view.varying(jnp.zeros((b, n, case.width, g, T), dtype)), []
        for s, t in view.key_strips():
            state = (jnp.zeros((b, n, s[1], case.width), dtype), jnp.zeros((b, n, s[1], case.value_width), dtype))
            if t is not None:
                state = (*view.varying(state), d_queries, d_bias)
                *state, d_queries, d_bias = _fold(t, max(AREA // (b * n * g * s[1]), 16), functools.partial(tile, s), state)
            strips.append(tuple(state))
        d_keys, d_values = (jnp.concatenate(parts, axis=2) for parts in zip(*strips, strict=True))
        return d_bias, (d_queries, d_keys, d_values)

    d_bias = None if bias is None else view.varying(jnp.zeros(view.bias.shape, dtype))
    d_bias, (d_q, d_k, d_v) = view.over_chunks(chunk, d_bias, (queries, keys, values, d_outs, *rows))
    d_q = _merge(case, jnp.moveaxis(d_q, 2, -1) * case.scale).astype(q.dtype)
    d_k = (d_k * (1.0 if _prescaled(case) else case.scale)).transpose(0, 2, 1, 3).astype(k.dtype)
    d_v = d_v.transpose(0, 2, 1, 3).astype(v.dtype)
    return d_q, d_k, d_v, None if bias is None else d_bias.reshape(bias.shape).astype(bias.dtype), None


_attend.defvjp(_forward, _backward)

Span = tuple[Any, int]
"""(first, size) along the queries or the keys; first may be known only at run time."""


class _View:
    """The strips of one case, and what is visible in their tiles."""

    def __init__(self, case: Case, bias: Array | None, given: Inputs):
        self.case, self.cut, self.given = case, tiles(case), given
        self.mask = None if given.mask is None else _grouped(case, given.mask)
        self.bias: Any = None if bias is None else _grouped(case, bias)
        self.left, self.right = case.window or (None, None)
        if case.causal:
            self.right = 0
        self.skips = case.offset is not None and (self.left is not None or self.right is not None)

    def varying(self, tree: Any) -> Any:
        """Initial values of a loop that vary over the mesh axes that the inputs vary over, as shard_map asks."""
        return vary(tree, self.given.query_offset)

    def over_chunks(self, chunk: Callable[[Any, Any, Any], Any], carry: Any, arrays: tuple[Array, ...]) -> Any:
        """(carry, results) of `chunk(at, carry, parts)` for each chunk of arrays (B, K, …); at = (first row of the batch, first key/value head)."""
        across = self.case.kv_heads // self.cut.kv_heads
        count = self.case.batch // self.cut.batch * across
        cut = tuple(x.reshape(count, self.cut.batch, self.cut.kv_heads, *x.shape[2:]) for x in arrays)
        if count == 1:
            return chunk((0, 0), carry, tuple(x[0] for x in cut))
        corner = lambda i: (i // across * self.cut.batch, i % across * self.cut.kv_heads)
        carry, found = lax.scan(lambda carry, x: chunk(corner(x[0]), carry, x[1]), carry, (jnp.arange(count, dtype=jnp.int32), cut))
        return carry, jax.tree.map(lambda x: x.reshape(self.case.batch, self.case.kv_heads, *x.shape[3:]), found)

    def query_strips(self) -> Iterator[tuple[Span, Span | None]]:
        """Strips of queries, each with the keys that it may see, or None."""
        for t in _strips(self.case.queries, self.cut.queries, self.skips):
            begin, end = 0, self.case.keys
            if self.skips and self.right is not None:
                end = min(end, t[0] + t[1] + self.case.offset + self.right)
            if self.skips and self.left is not None:
                begin = max(begin, t[0] + self.case.offset - self.left)
            yield t, (begin, end - begin) if begin < end else None

    def key_strips(self) -> Iterator[tuple[Span, Span | None]]:
        """Strips of keys, each with the queries that may see it, or None."""
        for s in _strips(self.case.keys, self.cut.keys, True):
            begin, end = 0, self.case.queries
            if self.skips and self.right is not None:
                begin = max(begin, s[0] - self.case.offset - self.right)
            if self.skips and self.left is not None:
                end = min(end, s[0] + s[1] - self.case.offset + self.left)
            yield s, (begin, end - begin) if begin < end else None

    def finish(self, at: Any, t: Span, s: Span, scores: Array, *, turned: bool = False) -> tuple[Array, Any]:
        """Scores of the tile with scale and bias, and what of it is visible (None: all)."""
        turn = _turn if turned else lambda x: x
        if not _prescaled(self.case):
            scores = scores * self.case.scale
        seen = self._inside(at, t, s, turned)
        if self.mask is not None:
            seen = _and(turn(self._map(self.mask, at, t, s)), seen)
        if self.bias is not None:
            bias = turn(self._map(self.bias, at, t, s))
            scores = scores + bias.astype(scores.dtype)
            seen = _and(bias != -jnp.inf, seen)
        return scores, seen

    def _inside(self, at: Any, t: Span, s: Span, turned: bool) -> Any:
        seen: Any = None
        # Made in the layout of the scores: a mask that is read across costs more than the exponentials.
        rows, columns = _count(t, 4 if turned else 3), _count(s, 2 if turned else 4)
        known = self.case.offset is not None and isinstance(t[0], int)
        least, most = (s[0] - t[0] - t[1] + 1 - self.case.offset, s[0] + s[1] - 1 - t[0] - self.case.offset) if known else (0, 0)
        if self.right is not None and not (known and most <= self.right):
            seen = columns - rows - self._offsets(at) <= self.right
        if self.left is not None and not (known and least >= -self.left):
            seen = _and(columns - rows - self._offsets(at) >= -self.left, seen)
        if self.given.kv_lengths is not None:
            seen = _and(columns < self._of_rows(self.given.kv_lengths, at).astype(jnp.int32).reshape(-1, 1, 1, 1, 1), seen)
        return seen

    def keep(self, at: Any, t: Span, s: Span) -> Array:
        """Which weights of the tile dropout keeps: the same draw as the dense implementation's."""
        assert self.given.dropout_key is not None
        keys = self.given.dropout_key.reshape(self.case.batch, self.case.kv_heads, self.case.group, 1, 2)
        keys = _slice(keys, (*at, 0, 0, 0), (self.cut.batch, self.cut.kv_heads, self.case.group, 1, 2))
        keys = random.fold(keys, (_count(t, 3) + self._offsets(at))[..., 0])
        return random.bits(keys[..., None, :], _count(s, 4)) >= np.uint32(random.threshold(self.case.dropout_rate))

    def add_map(self, x: Array, at: Any, t: Span, s: Span, tile: Array) -> Array:
        """`x`, a map whose axes may have length 1, with the tile (b, k, g, t, s) added."""
        starts, sizes = self._corner(x.shape, at, t, s)
        shared = tuple(axis for axis, (here, there) in enumerate(zip(sizes, tile.shape, strict=True)) if here < there)
        return _write(x, _slice(x, starts, sizes) + jnp.sum(tile, axis=shared, keepdims=True), starts)

    def _map(self, x: Array, at: Any, t: Span, s: Span) -> Array:
        return _slice(x, *self._corner(x.shape, at, t, s))

    def _corner(self, shape: tuple[int, ...], at: Any, t: Span, s: Span) -> tuple[Any, Any]:
        """Where the tile lies in an array (B, K, G, T, S) whose axes may have length 1."""
        starts, sizes = (*at, 0, t[0], s[0]), (self.cut.batch, self.cut.kv_heads, self.case.group, t[1], s[1])
        return tuple(0 if n == 1 else i for n, i in zip(shape, starts, strict=True)), tuple(map(min, shape, sizes))

    def _offsets(self, at: Any) -> Any:
        if self.case.offset is not None:
            return self.case.offset
        return self._of_rows(self.given.query_offset, at).reshape(-1, 1, 1, 1, 1)

    def _of_rows(self, x: Array, at: Any) -> Array:
        return _slice(x, (at[0],), (self.cut.batch,)) if x.ndim else x[None]


def _count(span: Span, axis: int) -> Array:
    """Positions of a span along one of five axes."""
    return span[0] + jnp.arange(span[1], dtype=jnp.int32).reshape([-1 if i == axis else 1 for i in range(5)])


def _strips(length: int, size: int, many: bool) -> Iterator[Span]:
    """[0, length) in strips of `size`, or of the least multiple of it that makes them no more than STRIPS; or in one."""
    size = size * -(-length // (size * STRIPS)) if many else length
    return ((first, min(size, length - first)) for first in range(0, length, size))


def _walk(strip: Span, size: int, body: Callable[[Span], tuple[Array, ...]]) -> tuple[Array, ...]:
    """`body(tile)` for the tiles of a strip, `size` each and one for the rest: one program for all of a size. Joined along axis 3."""
    first, length = strip
    count, rest = divmod(length, size)
    found = [body((first, size))] if count == 1 else []
    if count > 1:
        many = lax.map(lambda i: body((np.int32(first) + i * np.int32(size), size)), jnp.arange(count, dtype=jnp.int32))
        found = [tuple(jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], count * size, x.shape[-1]) for x in many)]
    found += [body((first + length - rest, rest))] if rest else []
    return tuple(jnp.concatenate(parts, axis=3) for parts in zip(*found, strict=True))


def _fold(strip: Span, size: int, body: Callable[[Span, Any], Any], state: Any) -> Any:
    """The state after `body(tile, state)` for the tiles of a strip, cut in the same way."""
    first, length = strip
    count, rest = divmod(length, size)
    if count == 1:
        state = body((first, size), state)
    elif count > 1:
        state = lax.fori_loop(jnp.int32(0), jnp.int32(count), lambda i, state: body((np.int32(first) + i * np.int32(size), size), state), state)
    return body((first + length - rest, rest), state) if rest else state


def _part(x: Array, axis: int, span: Span) -> Array:
    starts: list[Any] = [0] * x.ndim
    starts[axis] = span[0]
    return _slice(x, tuple(starts), (*x.shape[:axis], span[1], *x.shape[axis + 1 :]))


def _add(x: Array, axis: int, span: Span, part: Array) -> Array:
    return _write(x, _part(x, axis, span) + part, (0,) * axis + (span[0],) + (0,) * (x.ndim - axis - 1))


def _turn(x: Array) -> Array:
    """(b, k, g, t, s) → (b, k, s, g, t)."""
    return jnp.moveaxis(x, -1, 2)


def _split(case: Case, x: Array) -> Array:
    """(B, T, H, D) → (B, K, G, T, D)."""
    return x.reshape(case.batch, case.queries, case.kv_heads, case.group, -1).transpose(0, 2, 3, 1, 4)


def _merge(case: Case, x: Array) -> Array:
    """(B, K, G, T, D) → (B, T, H, D)."""
    return x.transpose(0, 3, 1, 2, 4).reshape(case.batch, case.queries, case.heads, -1)


def _grouped(case: Case, x: Array) -> Array:
    """A map (B or 1, H or 1, T or 1, S or 1) → (…, K or 1, G or 1, …)."""
    heads = (1, 1) if x.shape[1] == 1 else (case.kv_heads, case.group)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def _prescaled(case: Case) -> bool:
    return case.dtype in ("float32", "float64")


def _prescale(case: Case, q: Array) -> Array:
    """q times the scale where its dtype is the accumulator's; a 16-bit q would be rounded, so there the scores are scaled."""
    return q * case.scale if _prescaled(case) else q


def _poison(x: Array) -> Array:
    """(…, D) → (…, 1): NaN where a number is not finite, else 0."""
    return jnp.sum(x * _number(0, x), axis=-1, keepdims=True)


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, _number(0, x))


def _number(value: float, like: Array) -> np.ndarray:
    return np.asarray(value, like.dtype)


def _slice(x: Array, starts: tuple[Any, ...], sizes: tuple[int, ...]) -> Array:
    if all(isinstance(start, int) for start in starts):
        return lax.slice(x, starts, tuple(map(sum, zip(starts, sizes, strict=True))))
    return lax.dynamic_slice(x, _indices(starts), sizes)


def _write(x: Array, tile: Array, starts: tuple[Any, ...]) -> Array:
    return lax.dynamic_update_slice(x, tile, _indices(starts))


def _indices(values: tuple[Any, ...]) -> tuple[Array, ...]:
    """int32 with and without x64: the indices of a slice must have one dtype."""
    return tuple(jnp.asarray(value, jnp.int32) for value in values)


def _and(a: Array, b: Array | None) -> Array:
    return a if b is None else a & b


def _product(pattern: str, a: Array, b: Array, dtype: Any) -> Array:
    return jnp.einsum(pattern, a, b, preferred_element_type=dtype)
