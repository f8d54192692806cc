"""What generation accepts, and the sizes to which it pads."""

from typing import Any

import jax
import numpy as np

from flax_gpt.config import EncoderConfig, EncoderDecoderConfig
from flax_gpt.errors import is_integer, require
from flax_gpt.masks import host_array

SMALLEST_BUCKET = 16


def read_prompts(tokens: Any, lengths: Any, vocab_size: int) -> list[np.ndarray]:
    """The rows of tokens (B, T), each cut to its length. Raises InputError for what is empty, no integer, or outside the vocabulary."""
    tokens = np.asarray(host_array("tokens", tokens))
    require(tokens.ndim == 2 and min(tokens.shape) >= 1, "tokens", list(tokens.shape), "must have the shape (B, T), both at least 1")
    require(tokens.dtype.kind in "iu", "tokens", str(tokens.dtype), "must be integers")
    B, T = tokens.shape
    lengths = np.full(B, T) if lengths is None else np.asarray(host_array("lengths", lengths))
    require(lengths.shape == (B,), "lengths", list(lengths.shape), f"must have the shape (B,) = ({B},)")
    require(lengths.dtype.kind in "iu", "lengths", str(lengths.dtype), "must be integers")
    wrong = lengths[(lengths < 1) | (lengths > T)]
    require(wrong.size == 0, "lengths", int(wrong[0]) if wrong.size else None, f"must lie in [1, T = {T}]")
    prompts = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    ids = np.concatenate(prompts)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    require(wrong.size == 0, "tokens", int(wrong[0]) if wrong.size else None, f"must lie in [0, vocab_size = {vocab_size})")
    return [prompt.astype(np.int32) for prompt in prompts]


def check_model(model: Any, *, translates: bool = False) -> None:
    """Raises InputError for what does not write: a classifier, an encoder-decoder unless the search `translates`, what is no model and no tree."""
    config = getattr(model, "config", None)
    kinds = "a GPT or an encoder-decoder" if translates else "a GPT; an encoder-decoder translates by beam_search"
    wrong = EncoderConfig if translates else EncoderConfig | EncoderDecoderConfig
    require(config is not None and not isinstance(config, wrong), "model", type(model).__name__, f"must be {kinds}")
    tree = not jax.tree_util.all_leaves([model])
    require(tree, "model", type(model).__name__, "must be a module that jax can take apart, an nnx.Module without pytree=False")


def check_translator(run: Any) -> None:
    """Raises InputError for a run whose model is no encoder-decoder."""
    model = getattr(run, "model", None)
    translates = isinstance(getattr(model, "config", None), EncoderDecoderConfig)
    require(translates, "run", type(run if model is None else model).__name__, "must be a run of the kind 'encoder-decoder'")


def check_room(prompts: list[np.ndarray], new: Any, max_len: int, overflow: Any, smallest: int = 0) -> None:
    """Raises InputError for a number of new tokens below `smallest`, or, when overflow is "error", for one that does not fit."""
    require(is_integer(new) and new >= smallest, "max_new_tokens", new, f"must be an integer of at least {smallest}")
    require(overflow in ("slide", "error"), "overflow", overflow, "must be 'slide' or 'error'")
    longest = max(map(len, prompts))
    limit = f"must be at most {max(max_len - longest, 0)} after {longest} tokens: max_len = {max_len}"
    require(overflow == "slide" or longest + new <= max_len, "max_new_tokens", new, limit)


def bucket(size: int, limit: int | None = None) -> int:
    """The power of two from 16 up that holds `size`, at most `limit`."""
    power = max(SMALLEST_BUCKET, 1 << (int(size) - 1).bit_length())
    return power if limit is None else min(power, limit)
