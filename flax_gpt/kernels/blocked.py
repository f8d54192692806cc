"""Attention in tiles: the map never exists, memory is linear in T and S, tiles that hold nothing visible are never computed.

Forward: online softmax over key tiles (Milakov & Gimelshein 2018, algorithm 3; Dao et al. 2022, algorithm 1). Backward: key tiles outside, query
tiles inside, weights computed again from the row's peak and total (Dao et al. 2022, algorithm 4). Plain XLA: the bounds of the loops are the first
and the last tile with something visible, so one small program serves every length. Peak and total are kept apart, not as lse: log(total) is lost
beside a peak of −3.4e38, which a row has whose every key has a bias of finfo.min.

Tiles have axes (b rows, k key/value heads, g query heads to each, t queries, s keys).
"""

import dataclasses
import functools
from collections.abc import Callable
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
    keys: int
    """Keys a tile."""


SIZES: tuple[tuple[int, int, int, int], ...] = (
    (128, 128, 128, 16),
    (512, 128, 256, 2),
    (1 << 62, 256, 256, 1),
)
"""Longest S → queries a tile, keys a tile, heads a chunk: measured so that a tile's scores stay in a core's L2 (benchmarks/attention.py)."""


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
    dtype, cut = case.accumulator, tiles(case)
    view = _View(case, cut, bias, given)
    bad_q, bad_k, bad_v = (~jnp.all(jnp.isfinite(x), axis=-1, keepdims=True) for x in (q, k, v))
    # A NaN in every number of a key that is not finite, or whose value is not, spoils its scores alone, and only those that are visible are kept.
    queries = _split(case, _prescale(case, jnp.where(bad_q, _number(jnp.nan, q), q)))
    # Keys lie ready as the right factor, (B, K, Dh, S): turned tile by tile they cost a tenth of the time.
    keys = jnp.where(bad_k | bad_v, _number(jnp.nan, k), k).transpose(0, 2, 3, 1)
    values = _finite(v).transpose(0, 2, 1, 3)

    def rows(at: Any, i: Array, state: Any) -> Any:
        first = jnp.minimum(i * cut.queries, case.queries - cut.queries)
        q_tile = view.take(queries, at, t=first)

        def step(masked: bool, j: Array, state: Any) -> Any:
            peak, total, acc = state
            begin = jnp.minimum(j * cut.keys, case.keys - cut.keys)
            scores, seen = view.scores(at, first, begin, q_tile, view.take_across(keys, at, begin), masked, fresh=(0, j * cut.keys))
            if seen is not None:
                scores = jnp.where(seen, scores, -jnp.inf)
            higher = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
            powers, rescale = jnp.exp(scores - higher), jnp.exp(peak - higher)
            total = total * rescale + jnp.sum(powers, axis=-1, keepdims=True)
            if case.dropout_rate > 0.0:
                powers = jnp.where(view.keep(at, first, begin), powers, 0.0)
            new = _product("bkgts,bksd->bkgtd", powers.astype(v.dtype), view.take(values, at, s=begin), dtype)
            return higher, total, acc * rescale + new

        shape = (cut.batch, cut.kv_heads, case.group, cut.queries)
        lowest = jnp.full((*shape, 1), jnp.finfo(dtype).min, dtype)
        empty = (lowest, jnp.zeros((*shape, 1), dtype), jnp.zeros((*shape, case.value_width), dtype))
        peak, total, acc = view.over_keys(at, first, step, view.varying(empty))
        safe = jnp.where(total == 0.0, 1.0, total)
        outs, peaks, totals = state
        out = (acc / (safe * (1.0 - case.dropout_rate))).astype(q.dtype)
        return view.put(outs, out, at, t=first), view.put(peaks, peak, at, t=first), view.put(totals, total, at, t=first)

    whole = (case.batch, case.kv_heads, case.group, case.queries)
    empty = (jnp.zeros((*whole, case.value_width), q.dtype), jnp.zeros((*whole, 1), dtype), jnp.zeros((*whole, 1), dtype))
    count = -(-case.queries // cut.queries)
    out, peak, total = view.over_chunks(lambda at, state: _loop(0, count, functools.partial(rows, at), state), view.varying(empty))
    lse = jnp.where(total == 0.0, -jnp.inf, peak + jnp.log(jnp.where(total == 0.0, 1.0, total)))
    out = _merge(case, out)
    return (out, _merge(case, lse)[..., 0]), (q, k, v, bias, given, out, peak, total)


def _backward(case: Case, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    q, k, v, bias, given, out, peak, total = saved
    d_out, d_lse = cotangents
    dtype, cut = case.accumulator, tiles(case)
    view = _View(case, cut, bias, given)
    queries = _split(case, _prescale(case, _finite(q)))
    keys, values = (_finite(x).transpose(0, 2, 1, 3) for x in (k, v))
    d_outs = _split(case, d_out)
    through_rows = jnp.sum(d_out.astype(dtype) * out.astype(dtype), axis=-1, keepdims=True)
    # An empty row has no weights, and its lse is −∞ whatever q and k are: its gradient is 0.
    through_rows = _split(case, through_rows - d_lse[..., None])
    inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)

    def columns(at: Any, j: Array, state: Any) -> Any:
        begin = jnp.minimum(j * cut.keys, case.keys - cut.keys)
        k_tile, v_tile = view.take(keys, at, s=begin), view.take(values, at, s=begin)

        def step(masked: bool, i: Array, state: Any) -> Any:
            d_queries, d_bias, d_k, d_v = state
            first = jnp.minimum(i * cut.queries, case.queries - cut.queries)
            q_tile, d_tile = view.take(queries, at, t=first), view.take(d_outs, at, t=first)
            scores, seen = view.scores(at, first, begin, q_tile, k_tile.swapaxes(2, 3), masked, fresh=(i * cut.queries, j * cut.keys))
            weights = jnp.exp(scores - view.take(peak, at, t=first)) * view.take(inverse, at, t=first)
            d_weights = _product("bkgtd,bksd->bkgts", d_tile, v_tile, dtype)
            kept = weights
            if case.dropout_rate > 0.0:
                keep, share = view.keep(at, first, begin), 1.0 / (1.0 - case.dropout_rate)
                d_weights = jnp.where(keep, d_weights * share, 0.0)
                kept = jnp.where(keep, weights * share, 0.0)
            d_scores = weights * (d_weights - view.take(through_rows, at, t=first))
            if seen is not None:
                kept, d_scores = jnp.where(seen, kept, 0.0), jnp.where(seen, d_scores, 0.0)
            low = d_scores.astype(q.dtype)
            d_v += _product("bkgts,bkgtd->bksd", kept.astype(v.dtype), d_tile, dtype)
            d_k += _product("bkgts,bkgtd->bksd", low, q_tile, dtype)
            d_queries = view.add(d_queries, _product("bkgts,bksd->bkgtd", low, k_tile, dtype), at, t=first)
            if d_bias is not None:
                d_bias = view.add(d_bias, d_scores, at, t=first, s=begin)
            return d_queries, d_bias, d_k, d_v

        d_queries, d_bias, d_keys, d_values = state
        shape = (cut.batch, cut.kv_heads, cut.keys)
        tile = view.varying((jnp.zeros((*shape, case.width), dtype), jnp.zeros((*shape, case.value_width), dtype)))
        d_queries, d_bias, d_k, d_v = view.over_queries(at, j, step, (d_queries, d_bias, *tile))
        return d_queries, d_bias, view.add(d_keys, d_k, at, s=begin), view.add(d_values, d_v, at, s=begin)

    empty = (
        jnp.zeros(queries.shape, dtype),
        None if bias is None else jnp.zeros(view.bias.shape, dtype),
        jnp.zeros(keys.shape, dtype),
        jnp.zeros(values.shape, dtype),
    )
    count = -(-case.keys // cut.keys)
    chunk = lambda at, state: _loop(0, count, functools.partial(columns, at), state)
    d_queries, d_bias, d_keys, d_values = view.over_chunks(chunk, view.varying(empty))
    unscaled = 1.0 if _prescaled(case) else case.scale
    d_k = (d_keys * unscaled).transpose(0, 2, 1, 3).astype(k.dtype)
    d_v = d_values.transpose(0, 2, 1, 3).astype(v.dtype)
    d_b = None if bias is None else d_bias.reshape(bias.shape).astype(bias.dtype)
    return _merge(case, d_queries * case.scale).astype(q.dtype), d_k, d_v, d_b, None


_attend.defvjp(_forward, _backward)


class _View:
    """The tiles of one case: what is visible in them, and which of them hold anything visible."""

    def __init__(self, case: Case, cut: Tiles, bias: Array | None, given: Inputs):
        self.case, self.cut, self.given = case, cut, given
        self.mask = None if given.mask is None else _grouped(case, given.mask)
        self.bias: Any = None if bias is None else _grouped(case, bias)
        self.left, self.right = case.window or (None, None)
        if case.causal:
            self.right = 0
        self.like = given.query_offset

    def varying(self, tree: Any) -> Any:
        """Initial values of a loop that vary over the mesh axes that the inputs vary over, as shard_map asks."""
        return vary(tree, self.like)

    def over_chunks(self, chunk: Callable[[Any, Any], Any], state: Any) -> Any:
        """`chunk(at, state)` for each chunk; at = (first row of the batch, first key/value head)."""
        across = self.case.kv_heads // self.cut.kv_heads
        count = self.case.batch // self.cut.batch * across
        corner = lambda i: (i // across * self.cut.batch, i % across * self.cut.kv_heads)
        return chunk((0, 0), state) if count == 1 else _loop(0, count, lambda i, state: chunk(corner(i), state), state)

    def over_keys(self, at: Any, first: Any, step: Callable[[bool, Any, Any], Any], state: Any) -> Any:
        """`step(masked, j, state)` for each key tile that holds something visible to the queries from `first` on."""
        S, size = self.case.keys, self.cut.keys
        low, high, shortest, longest = self._extent(at)
        last = first + self.cut.queries - 1
        end = longest if self.right is None else jnp.minimum(longest, last + high + self.right + 1)
        end = _tiles_up(jnp.clip(end, 0, S), size)
        if self.left is not None:
            begin = jnp.clip(first + low - self.left, 0, S) // size
            return _loop(begin, end, functools.partial(step, True), state)
        whole = shortest if self.right is None else jnp.minimum(shortest, first + low + self.right + 1)
        whole = jnp.minimum(jnp.clip(whole, 0, S) // size, end)
        state = _loop(0, whole, functools.partial(step, False), state)
        if self._always_whole and S % size == 0:
            return state
        return _loop(whole, end, functools.partial(step, True), state)

    def over_queries(self, at: Any, j: Any, step: Callable[[bool, Any, Any], Any], state: Any) -> Any:
        """`step(masked, i, state)` for each query tile that sees something of key tile j."""
        T, S, size = self.case.queries, self.case.keys, self.cut.queries
        low, high, shortest, longest = self._extent(at)
        first, behind = j * self.cut.keys, jnp.minimum(j * self.cut.keys + self.cut.keys, S)
        begin = 0 if self.right is None else jnp.clip(first - self.right - high, 0, T) // size
        end = jnp.asarray(T, jnp.int32) if self.left is None else jnp.clip(behind + self.left - low, 0, T)
        end = jnp.where(first < longest, _tiles_up(end, size), 0)
        if self.left is not None:
            return _loop(begin, end, functools.partial(step, True), state)
        whole = jnp.asarray(0, jnp.int32) if self.right is None else _tiles_up(jnp.clip(behind - 1 - self.right - low, 0, T), size)
        whole = jnp.where((first + self.cut.keys <= S) & (behind <= shortest), jnp.minimum(whole, end), end)
        if not (self._always_whole and S % self.cut.keys == 0):
            state = _loop(begin, whole, functools.partial(step, True), state)
        state = _loop(whole, jnp.minimum(end, T // size), functools.partial(step, False), state)
        if T % size == 0:
            return state
        return _loop(jnp.maximum(whole, T // size), end, functools.partial(step, True), state)

    @property
    def _always_whole(self) -> bool:
        return self.right is None and self.left is None and not self.case.lengths

    def _extent(self, at: Any) -> tuple[Any, Any, Any, Any]:
        """Least and greatest offset, least and greatest number of keys, among the rows of a chunk."""
        S = self.case.keys
        low: Any = self.case.offset
        high = low
        if low is None:
            offsets = self._of_rows(self.given.query_offset, at)
            low, high = jnp.min(offsets), jnp.max(offsets)
        if self.given.kv_lengths is None:
            return low, high, S, S
        lengths = jnp.clip(self._of_rows(self.given.kv_lengths, at), 0, S).astype(jnp.int32)
        return low, high, jnp.min(lengths), jnp.max(lengths)

    def scores(self, at: Any, t: Any, s: Any, q_tile: Array, k_tile: Array, masked: bool, fresh: tuple[Any, Any]) -> tuple[Array, Any]:
        """Scores of the tile at query t and key s, and what of it is visible (None: all).

        A tile at the end reaches back over its neighbour: rows and columns before `fresh` are the neighbour's.
        """
        scores = _product("bkgtd,bkds->bkgts", q_tile, k_tile, self.case.accumulator)
        if not _prescaled(self.case):
            scores = scores * self.case.scale
        seen = None
        if self.mask is not None:
            seen = self._map(self.mask, at, t, s)
        if self.bias is not None:
            bias = self._map(self.bias, at, t, s)
            scores = scores + bias.astype(scores.dtype)
            seen = _and(seen, bias != -jnp.inf)
        return scores, _and(seen, self._inside(at, t, s, fresh)) if masked else seen

    def _inside(self, at: Any, t: Any, s: Any, fresh: tuple[Any, Any]) -> Array:
        rows, columns = self._rows(t), self._columns(s)
        seen = (rows >= fresh[0]) & (columns >= fresh[1])
        if self.right is not None or self.left is not None:
            distance = columns - rows - self._offsets(at)
            if self.right is not None:
                seen &= distance <= self.right
            if self.left is not None:
                seen &= distance >= -self.left
        if self.given.kv_lengths is not None:
            seen &= columns < self._of_rows(self.given.kv_lengths, at).astype(jnp.int32).reshape(-1, 1, 1, 1, 1)
        return seen

    def keep(self, at: Any, t: Any, s: Any) -> Array:
        """Which weights of the tile dropout keeps: the same draw as the dense implementation's."""
        assert self.given.dropout_key is not None
        keys = self.given.dropout_key.reshape(self.case.batch, self.case.kv_heads, self.case.group, 1, 2)
        keys = _slice(keys, (*at, 0, 0, 0), (self.cut.batch, self.cut.kv_heads, self.case.group, 1, 2))
        keys = random.fold(keys, (self._rows(t) + self._offsets(at))[..., 0])
        return random.bits(keys[..., None, :], self._columns(s)) >= np.uint32(random.threshold(self.case.dropout_rate))

    def _rows(self, t: Any) -> Array:
        return t + jnp.arange(self.cut.queries, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)

    def _columns(self, s: Any) -> Array:
        return s + jnp.arange(self.cut.keys, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)

    def _offsets(self, at: Any) -> Any:
        if self.case.offset is not None:
            return self.case.offset
        return self._of_rows(self.given.query_offset, at).reshape(-1, 1, 1, 1, 1)

    def _of_rows(self, x: Array, at: Any) -> Array:
        return _slice(x, (at[0],), (self.cut.batch,)) if x.ndim else x[None]

    def _map(self, x: Array, at: Any, t: Any, s: Any) -> Array:
        starts, sizes = self._corner(x.shape, at, t, s)
        return _slice(x, starts, sizes)

    def _corner(self, shape: tuple[int, ...], at: Any, t: Any, s: Any) -> tuple[Any, Any]:
        """Where the tile lies in an array (B, K, G, T, S) whose axes may have length 1."""
        starts, sizes = (*at, 0, t, s), (self.cut.batch, self.cut.kv_heads, self.case.group, self.cut.queries, self.cut.keys)
        return tuple(0 if n == 1 else i for n, i in zip(shape, starts, strict=True)), tuple(map(min, shape, sizes))

    def take(self, x: Array, at: Any, *, t: Any = None, s: Any = None) -> Array:
        """The tile of an array (B, K, G, T, D) at query t, or of (B, K, S, D) at key s."""
        width = x.shape[-1]
        if s is None:
            return _slice(x, (*at, 0, t, 0), (self.cut.batch, self.cut.kv_heads, self.case.group, self.cut.queries, width))
        return _slice(x, (*at, s, 0), (self.cut.batch, self.cut.kv_heads, self.cut.keys, width))

    def take_across(self, x: Array, at: Any, s: Any) -> Array:
        """The tile of an array (B, K, D, S) at key s."""
        return _slice(x, (*at, 0, s), (self.cut.batch, self.cut.kv_heads, x.shape[2], self.cut.keys))

    def put(self, x: Array, tile: Array, at: Any, *, t: Any) -> Array:
        """`x` (B, K, G, T, D) with the tile written at query t."""
        return _write(x, tile, (*at, 0, t, 0))

    def add(self, x: Array, tile: Array, at: Any, *, t: Any = None, s: Any = None) -> Array:
        """`x` with the tile added: (B, K, G, T, D) at query t, (B, K, S, D) at key s, or a map, whose axes may have length 1, at both."""
        if t is None or s is None:
            starts = (*at, s, 0) if t is None else (*at, 0, t, 0)
            return _write(x, self.take(x, at, t=t, s=s) + tile, starts)
        starts, sizes = self._corner(x.shape, at, t, s)
        shared = tuple(axis for axis, (here, there) in enumerate(zip(sizes, tile.shape, strict=True)) if here < there)
        return _write(x, _slice(x, starts, sizes) + jnp.sum(tile, axis=shared, keepdims=True), starts)


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


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, _number(0, x))


def _number(value: float, like: Array) -> np.ndarray:
    return np.asarray(value, like.dtype)


def _loop(begin: Any, end: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    first, behind = _indices((begin, end))
    return lax.fori_loop(first, behind, body, state)


def _slice(x: Array, starts: tuple[Any, ...], sizes: tuple[int, ...]) -> Array:
    return lax.dynamic_slice(x, _indices(starts), sizes)


def _write(x: Array, tile: Array, starts: tuple[Any, ...]) -> Array:
    return lax.dynamic_update_slice(x, tile, _indices(starts))


def _indices(values: tuple[Any, ...]) -> tuple[Array, ...]:
    """int32 with and without x64: the indices of a slice must have one dtype."""
    return tuple(jnp.asarray(value, jnp.int32) for value in values)


def _tiles_up(length: Any, size: int) -> Any:
    return (length + size - 1) // size


def _and(a: Array | None, b: Array) -> Array:
    return b if a is None else a & b


def _product(pattern: str, a: Array, b: Array, dtype: Any) -> Array:
    return jnp.einsum(pattern, a, b, preferred_element_type=dtype)
