"""What a model refuses before it computes: JAX would clamp, wrap or return NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_gpt.errors import describe, is_integer, is_number, require
from flax_gpt.masks import check_lengths


def check_inputs(
    config: Any,
    tokens: Any,
    lengths: Any = None,
    positions: Any = None,
    span: Any = None,
    *,
    names: tuple[str, str] = ("tokens", "lengths"),
    vocab_size: int | None = None,
) -> None:
    """Raises InputError for ids outside the vocabulary, a sequence longer than max_len, and lengths, positions or a span that do not fit.

    Shapes and dtypes are always checked; values only when they are known on the host.
    """
    name = names[0]
    require(hasattr(tokens, "dtype"), name, describe(tokens), "must be an array of integers")
    shape = np.shape(tokens)
    require(len(shape) == 2 and min(shape) >= 1, name, list(shape), "must have the shape (B, T), both at least 1")
    _check_ids(name, tokens, config.vocab_size if vocab_size is None else vocab_size)
    require(shape[1] <= config.max_len, name, list(shape), f"has T = {shape[1]} tokens, more than max_len = {config.max_len}")
    if lengths is not None:
        check_lengths(names[1], lengths, shape[1])
        require(np.shape(lengths) == shape[:1], names[1], list(np.shape(lengths)), f"must have the shape ({shape[0]},)")
    if positions is not None:
        require(hasattr(positions, "dtype"), "positions", describe(positions), "must be an array of integers")
        require(np.shape(positions) == shape, "positions", list(np.shape(positions)), f"must have the tokens' shape {list(shape)}")
        _check_ids("positions", positions, config.max_len)
    if span is not None:
        _check_span(span, shape[0], config.max_len)


def _check_span(span: Any, rows: int, max_len: int) -> None:
    integers = is_integer(span) or (hasattr(span, "dtype") and jnp.issubdtype(span.dtype, jnp.integer) and np.shape(span) in ((), (rows,)))
    require(integers, "span", span if is_number(span) else describe(span), f"must be an integer, or integers of shape () or ({rows},)")
    if not isinstance(span, jax.core.Tracer):
        inside = bool(np.all((np.asarray(span) >= 1) & (np.asarray(span) <= max_len)))
        require(inside, "span", np.asarray(span).tolist(), f"must lie in [1, max_len = {max_len}]")


def _check_ids(argument: str, ids: Any, limit: int) -> None:
    require(jnp.issubdtype(ids.dtype, jnp.integer), argument, str(ids.dtype), "must be integers")
    if isinstance(ids, jax.core.Tracer):
        return
    values = np.asarray(ids)
    wrong = values[(values < 0) | (values >= limit)]
    require(wrong.size == 0, argument, int(wrong[0]) if wrong.size else None, f"must lie in [0, {limit})")
