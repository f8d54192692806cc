"""Attention in strips: the map never exists, memory is linear in T and S, a strip of queries meets only keys that it may see.

Forward: for each strip the scores of all its keys, one softmax, no rescaling (Rabe & Staats 2021, section 2, with one chunk of keys).
Backward: the same strips with everything turned, so that the products have their usual form: XLA multiplies a turned left factor three times slower.

Up to JOINED keys, what is hidden has −∞ added to its score when `assume_finite` allows it, dropout is a product with 0 or 1, and the backward pass
computes each row's peak, total and sum through the weights again: so a strip of the forward pass is one operation of XLA's library of fusions,
product, softmax and product, whereas a selection or a second result would cut it into pieces; the weights and the gradient of the scores are one
each. A product of many small matrices that is joined to a reduction runs on all cores, alone it runs on one. Beyond, the pieces are faster, and
peak and total are kept; apart, not as lse: log(total) is lost beside a peak of −3.4e38, which a row has whose every key has a bias of finfo.min.

Plain XLA. The heads are taken in chunks of which a strip stays in a core's L2, or all at once where the library sees to that; the strips are
unrolled, since XLA knows static slices best, and one that would be too large is walked in tiles by a loop: the program does not grow with T.

Tiles have axes (b rows, k key/value heads, r, s keys), in the backward pass (b, k, s, r), where r counts the t queries of the g query heads that
share a key/value head; a product with five axes would be copied into four. What is hidden is told in (b, k, g, t, s).
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
    """Queries a tile."""


ALL = 1 << 30
FORWARD: tuple[tuple[int, int, int], ...] = ((256, 128, 16), (1024, 128, 4), (ALL, 256, 1))
BACKWARD: tuple[tuple[int, int, int], ...] = ((256, 64, 16), (512, 128, 4), (1024, 128, 2), (ALL, 256, 1))
"""Longest S → queries a tile, heads a chunk, as measured (docs/performance.md)."""

JOINED = 512
"""Keys up to which a strip is left to the library of fusions, as measured."""

JOINED_FORWARD, JOINED_BACKWARD = (128, ALL), (64, ALL)
"""Queries a tile and heads a chunk there."""

NOTHING = 1e-30
"""What a total begins with, so that a row that sees nothing can be divided by its own; any other row totals 1 or more."""

STRIPS = 16
"""Strips that are unrolled at most; longer inputs get longer strips, walked in tiles."""

AREA = 1 << 19
"""Scores that a tile of one head has at most in the backward pass."""


def tiles(case: Case, *, backward: bool) -> Tiles:
    """The cut that the table asks for, within the sizes of the case."""
    _, queries, heads = next(row for row in (BACKWARD if backward else FORWARD) if case.keys <= row[0])
    if _joined(case):
        queries, heads = JOINED_BACKWARD if backward else JOINED_FORWARD
    want = max(1, heads // case.group)
    kv_heads = max(n for n in range(1, case.kv_heads + 1) if case.kv_heads % n == 0 and n <= want)
    rows = want // case.kv_heads if kv_heads == case.kv_heads else 1
    batch = max(n for n in range(1, case.batch + 1) if case.batch % n == 0 and n <= max(rows, 1))
    queries = min(queries, AREA // case.keys) if backward else queries
    return Tiles(batch, kv_heads, min(max(queries // case.group, 16), case.queries))


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
    dtype, view = case.accumulator, _View(case, bias, given, backward=False)
    queries, keys, values = _split(case, _prescale(case, _marked(case, q))), _turn_heads(_marked(case, k, v)), _turn_heads(_finite(case, v))

    def chunk(at: Any, carry: None, arrays: Any) -> Any:
        queries, keys, values = arrays

        def tile(s: Span, t: Span, state: None) -> tuple[None, tuple[Array, ...]]:
            products = _product("bkrd,bksd->bkrs", _rows(_part(queries, 3, t)), _part(keys, 2, s), dtype)
            scores, _ = view.finish(at, t, s, products)
            powers, peak, total = _powers(case, scores, axis=3)
            if case.dropout_rate > 0.0:
                powers = _kept(case, powers, _rows(view.keep(at, t, s)))
            out = _product("bkrs,bksd->bkrd", powers.astype(v.dtype), _part(values, 2, s), dtype)
            out = (out / (_spread(case, total, out.shape) * (1.0 - case.dropout_rate))).astype(q.dtype)
            return state, tuple(x.reshape(*queries.shape[:3], t[1], -1) for x in (out, peak, total))

        def blind(t: Span) -> tuple[Array, ...]:
            rows = (*queries.shape[:3], t[1])
            return jnp.zeros((*rows, case.value_width), q.dtype), jnp.zeros((*rows, 1), dtype), jnp.zeros((*rows, 1), dtype)

        strips = [blind(t) if s is None else _walk(t, view.cut.queries, functools.partial(tile, s), None)[1] for t, s in view.strips()]
        return carry, tuple(jnp.concatenate(parts, axis=3) for parts in zip(*strips, strict=True))

    _, (out, peak, total) = view.over_chunks(chunk, None, (queries, keys, values))
    lse = jnp.where(total < 0.5, -jnp.inf, peak + jnp.log(total))
    out = _merge(case, out)
    return (out, _merge(case, lse)[..., 0]), (q, k, v, bias, given, out, (peak, total) if case.keys > JOINED else ())


def _backward(case: Case, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    q, k, v, bias, given, out, softmax = saved
    d_out, d_lse = cotangents
    dtype, joined, view = case.accumulator, _joined(case), _View(case, bias, given, backward=True)
    share = 1.0 / (1.0 - case.dropout_rate)
    # An empty row has no weights, and its lse is −∞ whatever q and k are: its gradient is 0.
    through_rows = -d_lse[..., None]
    if not joined:
        through_rows += jnp.sum(d_out.astype(dtype) * out.astype(dtype), axis=-1, keepdims=True)
    through_rows = _split(case, through_rows)
    queries, keys = _split(case, _prescale(case, _marked(case, q))), _turn_heads(_marked(case, k, v))
    # 0 · NaN is NaN: what the gradients of the hidden are made of must be finite.
    finite = (queries, keys) if case.assume_finite else (_split(case, _prescale(case, _finite(case, q))), _turn_heads(_finite(case, k)))
    values, d_outs = _turn_heads(v), _split(case, d_out)

    def chunk(at: Any, d_bias: Any, arrays: Any) -> Any:
        queries, keys, finite_queries, finite_keys, values, d_outs, throughs, *softmax = arrays
        # Behind a barrier, or the turn is folded into the product, which XLA then does slowly, and in bfloat16 at some sizes not at all.
        turned_keys = lax.optimization_barrier(finite_keys.swapaxes(2, 3))

        def tile(s: Span, t: Span, state: Any) -> Any:
            d_keys, d_values, d_bias = state
            q_tile, d_tile, k_tile, v_tile = _rows(_part(finite_queries, 3, t)), _rows(_part(d_outs, 3, t)), _part(keys, 2, s), _part(values, 2, s)
            on_rows = lambda x: x[:, :, None]
            products = _product("bksd,bkrd->bksr", k_tile, _rows(_part(queries, 3, t)), dtype)
            scores, seen = view.finish(at, t, s, products, turned=True)
            through = _rows(_part(throughs, 3, t))[..., 0]
            if joined:
                powers, _, total = _powers(case, scores, axis=2)
                powers = powers / _spread(case, total, powers.shape)
            else:
                if softmax:
                    peak, total = (_rows(_part(x, 3, t))[..., 0] for x in softmax)
                    powers = jnp.exp(scores - on_rows(peak))
                else:
                    powers, _, total = _powers(case, scores, axis=2)
                    total = total[:, :, 0]
                if seen is not None:
                    powers = jnp.where(seen, powers, 0.0)
                # weights = powers / total: the division is taken from the tile to the rows, but for 16 bits, where it would be rounded once more.
                # A NaN in a row stays in its powers: in d_tile it would reach the hidden.
                inverse = 1.0 / jnp.where(total > 0.5, total, 1.0)
                if _prescaled(case):
                    d_tile, through = d_tile * inverse[..., None], through * inverse
                else:
                    powers = powers * on_rows(inverse)
            d_powers = _product("bksd,bkrd->bksr", v_tile, d_tile, dtype)
            kept = powers
            if case.dropout_rate > 0.0:
                keep = _rows(view.keep(at, t, s)).swapaxes(2, 3)
                d_powers, kept = _kept(case, d_powers * share, keep), _kept(case, powers * share, keep)
            if joined:
                through += jnp.sum(powers * d_powers, axis=2)
            d_scores = powers * (d_powers - on_rows(through))
            if seen is not None:
                d_scores = jnp.where(seen, d_scores, 0.0)
            low = d_scores.astype(q.dtype)
            d_keys = _add(d_keys, 2, s, _product("bksr,bkrd->bksd", low, q_tile, dtype))
            d_values = _add(d_values, 2, s, _product("bksr,bkrd->bksd", kept.astype(v.dtype), d_tile, dtype))
            d_queries = _product("bkds,bksr->bkdr", _part(turned_keys, 3, s), low, dtype)
            d_bias = None if d_bias is None else view.add_map(d_bias, at, t, s, _heads(d_scores, queries.shape[2]))
            return (d_keys, d_values, d_bias), (_heads(d_queries, queries.shape[2]),)

        zeros = lambda width: view.varying(jnp.zeros((*keys.shape[:3], width), dtype))
        state: Any = (zeros(case.width), zeros(case.value_width), d_bias)
        strips: list[tuple[Array, ...]] = []
        # The last first: of a causal case it sees every key, and what it gives need not be added to anything.
        for t, s in reversed(view.strips()):
            if s is None:
                strips.append((jnp.zeros((*queries.shape[:3], t[1], case.width), dtype),))
            else:
                state, found = _walk(t, view.cut.queries, functools.partial(tile, s), state)
                strips.append(found)
        d_keys, d_values, d_bias = state
        return d_bias, (jnp.concatenate([found for (found,) in reversed(strips)], axis=3), d_keys, d_values)

    d_bias = None if bias is None else view.varying(jnp.zeros(view.bias.shape, dtype))
    d_bias, (d_q, d_k, d_v) = view.over_chunks(chunk, d_bias, (queries, keys, *finite, values, d_outs, through_rows, *softmax))
    d_q = _merge(case, d_q * case.scale).astype(q.dtype)
    d_k = _turn_heads(d_k * (1.0 if _prescaled(case) else case.scale)).astype(k.dtype)
    return d_q, d_k, _turn_heads(d_v).astype(v.dtype), None if bias is None else d_bias.reshape(bias.shape).astype(bias.dtype), None


_attend.defvjp(_forward, _backward)

Span = tuple[Any, int]
"""(first, size) along the queries or the keys; first may be known only at run time."""


class _View:
    """The strips of one case, and what is visible in their tiles."""

    def __init__(self, case: Case, bias: Array | None, given: Inputs, *, backward: bool):
        self.case, self.cut, self.given = case, tiles(case, backward=backward), given
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

    def strips(self) -> list[tuple[Span, Span | None]]:
        """Strips of queries, each with the keys that it may see, or None."""
        found: list[tuple[Span, Span | None]] = []
        for t in _strips(self.case.queries, self.cut.queries, self.skips):
            begin, end = 0, self.case.keys
            if self.skips and self.right is not None:
                end = min(end, t[0] + t[1] + self.case.offset + self.right)
            if self.skips and self.left is not None:
                begin = max(begin, t[0] + self.case.offset - self.left)
            found.append((t, (begin, end - begin) if begin < end else None))
        return found

    def finish(self, at: Any, t: Span, s: Span, products: Array, *, turned: bool = False) -> tuple[Array, Any]:
        """Scores of the tile with scale and bias, −∞ where nothing may be seen; and what may be seen (None: no need to know)."""
        flat = lambda x: self._flat(x, t, turned)
        scores = products if _prescaled(self.case) else products * self.case.scale
        seen = self._inside(at, t, s, turned)
        if self.mask is not None:
            seen = _and(flat(self._map(self.mask, at, t, s)), seen)
        bias: Any = None
        if self.bias is not None:
            bias = flat(self._map(self.bias, at, t, s)).astype(scores.dtype)
            seen = _and(bias != -jnp.inf, seen)
        if _joined(self.case) and seen is not None:
            return scores + jnp.where(seen, 0.0 if bias is None else bias, -jnp.inf).astype(scores.dtype), None
        scores = scores if bias is None else scores + bias
        return (scores, None) if seen is None else (jnp.where(seen, scores, -jnp.inf), None if self.case.assume_finite else seen)

    def _flat(self, x: Any, t: Span, turned: bool) -> Any:
        """A map (b, k, g, t, s), each axis whole or 1, as (b, k, r, s), or turned (b, k, s, r)."""
        x = jnp.broadcast_to(x, (*x.shape[:2], self.case.group, t[1], x.shape[-1]))
        return _rows(x).swapaxes(2, 3) if turned else _rows(x)

    def _inside(self, at: Any, t: Span, s: Span, turned: bool) -> Any:
        """What causality, window and lengths leave of the tile, flat; None: all."""
        seen: Any = None
        # Made in the layout of the scores: a mask that is read across costs more than the exponentials.
        rows, columns = jnp.tile(_count(t, 0, 1), self.case.group), _count(s, 0, 1)
        rows, columns = (rows, columns[:, None]) if turned else (rows[:, None], columns)
        known = self.case.offset is not None and isinstance(t[0], int)
        least, most = (s[0] - t[0] - t[1] + 1 - self.case.offset, s[0] + s[1] - 1 - t[0] - self.case.offset) if known else (0, 0)
        if self.right is not None and not (known and most <= self.right):
            seen = columns - rows - self._offsets(at)[..., 0] <= self.right
        if self.left is not None and not (known and least >= -self.left):
            seen = _and(columns - rows - self._offsets(at)[..., 0] >= -self.left, seen)
        if self.given.kv_lengths is not None:
            seen = _and(columns < self._of_rows(self.given.kv_lengths, at).astype(jnp.int32).reshape(-1, 1, 1, 1), seen)
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
        """(b or 1, 1, 1, 1, 1)"""
        if self.case.offset is not None:
            return np.full((1,) * 5, self.case.offset, np.int32)
        return self._of_rows(self.given.query_offset, at).reshape(-1, 1, 1, 1, 1)

    def _of_rows(self, x: Array, at: Any) -> Array:
        return _slice(x, (at[0],), (self.cut.batch,)) if x.ndim else x[None]


def _count(span: Span, axis: int, axes: int = 5) -> Array:
    """Positions of a span along one of the axes."""
    return span[0] + jnp.arange(span[1], dtype=jnp.int32).reshape([-1 if i == axis else 1 for i in range(axes)])


def _strips(length: int, size: int, many: bool) -> Iterator[Span]:
    """[0, length) in strips of `size`, or of the least multiple of it that makes them no more than STRIPS; or in one."""
    size = size * -(-length // (size * STRIPS)) if many else length
    return ((first, min(size, length - first)) for first in range(0, length, size))


def _walk(strip: Span, size: int, body: Callable[[Span, Any], tuple[Any, tuple[Array, ...]]], state: Any) -> tuple[Any, tuple[Array, ...]]:
    """`body(tile, state)` for the tiles of a strip, `size` each and one for the rest: one program for all of a size.

    Gives the last state, and the results joined along axis 3.
    """
    first, length = strip
    count, rest = divmod(length, size)
    found = []
    if count == 1:
        state, parts = body((first, size), state)
        found.append(parts)
    elif count > 1:
        state, many = lax.scan(lambda state, i: body((np.int32(first) + i * np.int32(size), size), state), state, jnp.arange(count, dtype=jnp.int32))
        found.append(tuple(jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], count * size, x.shape[-1]) for x in many))
    if rest:
        state, parts = body((first + length - rest, rest), state)
        found.append(parts)
    return state, tuple(jnp.concatenate(parts, axis=3) for parts in zip(*found, strict=True))


def _part(x: Array, axis: int, span: Span) -> Array:
    starts: list[Any] = [0] * x.ndim
    starts[axis] = span[0]
    return _slice(x, tuple(starts), (*x.shape[:axis], span[1], *x.shape[axis + 1 :]))


def _add(x: Array, axis: int, span: Span, part: Array) -> Array:
    return _write(x, _part(x, axis, span) + part, (0,) * axis + (span[0],) + (0,) * (x.ndim - axis - 1))


def _rows(x: Array) -> Array:
    """(b, k, g, t, d) → (b, k, r, d)."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _heads(x: Array, group: int) -> Array:
    """(b, k, d, r) → (b, k, g, t, d)."""
    return jnp.moveaxis(x.reshape(*x.shape[:3], group, -1), 2, -1)


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


def _turn_heads(x: Array) -> Array:
    """(B, S, K, D) → (B, K, S, D), and back."""
    return x.transpose(0, 2, 1, 3)


def _joined(case: Case) -> bool:
    """Whether a strip is left to the library of fusions."""
    return case.assume_finite and case.keys <= JOINED


def _powers(case: Case, scores: Array, *, axis: int) -> tuple[Array, Array, Array]:
    """exp(scores − peak), each row's peak, and its total: 1 or more, or a few times NOTHING."""
    peak = _reduce(case, jnp.maximum, scores, float(jnp.finfo(scores.dtype).min), axis)
    powers = jnp.exp(scores - peak)
    return powers, peak, _reduce(case, jnp.add, powers, NOTHING, axis)


def _reduce(case: Case, operation: Any, x: Array, limit: float, axis: int) -> Array:
    """A reduction that begins with `limit`, a sum maybe more than once.

    Applied afterwards, to fewer than 4096 elements, the limit would not be joined to the rest. Where nothing is joined, it costs less there.
    """
    start = _number(limit, x)
    if not _joined(case) or x.shape[axis] == 1:  # XLA takes a single element as it is
        return operation(operation.reduce(x, axis=axis, keepdims=True), start)
    return jnp.expand_dims(lax.reduce(x, start, operation, (axis,)), axis)


def _spread(case: Case, total: Array, shape: tuple[int, ...]) -> Array:
    """The totals as a divisor of each element. Behind a barrier, or XLA multiplies by 1 / total, made apart, and nothing is joined."""
    return lax.optimization_barrier(jnp.broadcast_to(total, shape)) if _joined(case) else total


def _kept(case: Case, x: Array, keep: Array) -> Array:
    """x where `keep`, 0 elsewhere: by a product with 0 or 1 where a selection would keep an operation from being joined."""
    return x * keep.astype(x.dtype) if _joined(case) else jnp.where(keep, x, 0.0)


def _marked(case: Case, x: Array, value: Array | None = None) -> Array:
    """x (…, Dh) with a NaN where it is not finite, or in the row where `value` (…, Dv) is not.

    It spoils the scores of its row alone, of which those that are visible are kept.
    """
    if case.assume_finite:
        return x
    spoilt = x + x * _number(0, x)
    if value is None:
        return spoilt
    poison = value * _number(0, value)
    # A sum over rows costs as much as a product here: only where the widths differ.
    return spoilt + (poison if poison.shape == x.shape else jnp.sum(poison, axis=-1, keepdims=True))


def _finite(case: Case, x: Array) -> Array:
    return x if case.assume_finite else jnp.where(jnp.isfinite(x), x, _number(0, x))


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
