"""What a model refuses before it computes, in the same words as `flax_gpt.models.inputs`."""

from typing import Any

import torch
from torch import Tensor

from flax_gpt.errors import describe, is_integer, is_number, require
from torch_ref.masks import check_lengths


def check_inputs(
    config: Any,
    tokens: Tensor,
    lengths: Tensor | None = None,
    positions: Tensor | None = None,
    span: Tensor | int | None = None,
    *,
    names: tuple[str, str] = ("tokens", "lengths"),
    vocab_size: int | None = None,
) -> None:
    """Raises InputError for ids outside the vocabulary, a sequence longer than max_len, and lengths, positions or a span that do not fit."""
    name = names[0]
    require(isinstance(tokens, Tensor), name, describe(tokens), "must be an array of integers")
    shape = tuple(tokens.shape)
    require(len(shape) == 2 and min(shape) >= 1, name, list(shape), "must have the shape (B, T), both at least 1")
    _check_ids(name, tokens, config.vocab_size if vocab_size is None else vocab_size)
    require(shape[1] <= config.max_len, name, list(shape), f"has T = {shape[1]} tokens, more than max_len = {config.max_len}")
    if lengths is not None:
        check_lengths(names[1], lengths, shape[1])
        require(tuple(lengths.shape) == shape[:1], names[1], list(lengths.shape), f"must have the shape ({shape[0]},)")
    if positions is not None:
        require(isinstance(positions, Tensor), "positions", describe(positions), "must be an array of integers")
        require(tuple(positions.shape) == shape, "positions", list(positions.shape), f"must have the tokens' shape {list(shape)}")
        _check_ids("positions", positions, config.max_len)
    if span is not None:
        _check_span(span, shape[0], config.max_len)


def _check_span(span: Any, rows: int, max_len: int) -> None:
    tensor = isinstance(span, Tensor) and "int" in str(span.dtype) and tuple(span.shape) in ((), (rows,))
    require(is_integer(span) or tensor, "span", span if is_number(span) else describe(span),
            f"must be an integer, or integers of shape () or ({rows},)")  # fmt: skip
    values = torch.as_tensor(span) if tensor or abs(span) < 2**62 else torch.tensor(-1)
    inside = bool(((values >= 1) & (values <= max_len)).all())
    require(inside, "span", values.tolist() if tensor else int(span), f"must lie in [1, max_len = {max_len}]")


def _check_ids(argument: str, ids: Tensor, limit: int) -> None:
    dtype = str(ids.dtype).removeprefix("torch.")
    require("int" in dtype, argument, dtype, "must be integers")
    wrong = ids[(ids < 0) | (ids >= limit)]
    require(wrong.numel() == 0, argument, wrong[0].item() if wrong.numel() else None, f"must lie in [0, {limit})")
