"""What a model refuses before it computes, in the same words as `flax_gpt.models.inputs`."""

from typing import Any

from torch import Tensor

from flax_gpt.errors import require
from torch_ref.masks import check_lengths


def check_inputs(
    config: Any,
    tokens: Tensor,
    lengths: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    names: tuple[str, str] = ("tokens", "lengths"),
    vocab_size: int | None = None,
) -> None:
    """Raises InputError for ids outside the vocabulary, a sequence longer than max_len, and lengths or positions that do not fit."""
    name = names[0]
    shape = tuple(tokens.shape)
    require(len(shape) == 2 and min(shape) >= 1, name, list(shape), "must have the shape (B, T), both at least 1")
    _check_ids(name, tokens, config.vocab_size if vocab_size is None else vocab_size)
    require(shape[1] <= config.max_len, name, list(shape), f"has T = {shape[1]} tokens, more than max_len = {config.max_len}")
    if lengths is not None:
        check_lengths(names[1], lengths, shape[1])
        require(tuple(lengths.shape) == shape[:1], names[1], list(lengths.shape), f"must have the shape ({shape[0]},)")
    if positions is not None:
        require(tuple(positions.shape) == shape, "positions", list(positions.shape), f"must have the tokens' shape {list(shape)}")
        _check_ids("positions", positions, config.max_len)


def _check_ids(argument: str, ids: Tensor, limit: int) -> None:
    dtype = str(ids.dtype).removeprefix("torch.")
    require("int" in dtype, argument, dtype, "must be integers")
    wrong = ids[(ids < 0) | (ids >= limit)]
    require(wrong.numel() == 0, argument, wrong[0].item() if wrong.numel() else None, f"must lie in [0, {limit})")
