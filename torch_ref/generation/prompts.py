"""What generation accepts, in the same words as `flax_gpt.generation.prompts`."""

from typing import Any

import torch
from torch import Tensor

from flax_gpt.config import EncoderConfig, EncoderDecoderConfig
from flax_gpt.errors import is_integer, require
from torch_ref.masks import as_tensor


def read_prompts(tokens: Any, lengths: Any, vocab_size: int) -> list[Tensor]:
    """The rows of tokens (B, T), each cut to its length. Raises InputError for what is empty, no integer, or outside the vocabulary."""
    tokens = as_tensor("tokens", tokens)
    shape = tuple(tokens.shape)
    require(len(shape) == 2 and min(shape) >= 1, "tokens", list(shape), "must have the shape (B, T), both at least 1")
    require("int" in str(tokens.dtype), "tokens", str(tokens.dtype).removeprefix("torch."), "must be integers")
    B, T = shape
    lengths = torch.full((B,), T) if lengths is None else as_tensor("lengths", lengths)
    require(tuple(lengths.shape) == (B,), "lengths", list(lengths.shape), f"must have the shape (B,) = ({B},)")
    require("int" in str(lengths.dtype), "lengths", str(lengths.dtype).removeprefix("torch."), "must be integers")
    wrong = lengths[(lengths < 1) | (lengths > T)]
    require(wrong.numel() == 0, "lengths", wrong[0].item() if wrong.numel() else None, f"must lie in [1, T = {T}]")
    prompts = [row[:length] for row, length in zip(tokens, lengths.tolist(), strict=True)]
    ids = torch.cat(prompts)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    require(wrong.numel() == 0, "tokens", wrong[0].item() if wrong.numel() else None, f"must lie in [0, vocab_size = {vocab_size})")
    return [prompt.to(torch.int64) for prompt in prompts]


def check_model(model: Any, *, translates: bool = False) -> None:
    """Raises InputError for what does not write: a classifier, an encoder-decoder unless the search `translates`, and what is no model."""
    config = getattr(model, "config", None)
    kinds = "a GPT or an encoder-decoder" if translates else "a GPT; an encoder-decoder translates by beam_search"
    wrong = EncoderConfig if translates else EncoderConfig | EncoderDecoderConfig
    require(config is not None and not isinstance(config, wrong), "model", type(model).__name__, f"must be {kinds}")


def check_room(prompts: list[Tensor], new: Any, max_len: int, overflow: Any, smallest: int = 0) -> None:
    """Raises InputError for a number of new tokens below `smallest`, or, when overflow is "error", for one that does not fit."""
    require(is_integer(new) and new >= smallest, "max_new_tokens", new, f"must be an integer of at least {smallest}")
    require(overflow in ("slide", "error"), "overflow", overflow, "must be 'slide' or 'error'")
    longest = max(map(len, prompts))
    limit = f"must be at most {max(max_len - longest, 0)} after {longest} tokens: max_len = {max_len}"
    require(overflow == "slide" or longest + new <= max_len, "max_new_tokens", new, limit)
