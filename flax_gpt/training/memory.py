"""What a training step needs at least, so that a run that can never fit is refused before it begins."""

import os
from typing import Any

import jax

from flax_gpt.config import EncoderDecoderConfig
from flax_gpt.errors import require

GIB = 2.0**30


def state_bytes(config: Any) -> int:
    """Parameters, gradients and Adam's two moments of all matrices and embeddings, and the table of positions. Biases and norms are left out."""
    D, attention = config.d_model, 2 * config.d_model * (config.d_model + config.kv_heads * config.head_dim)
    block = attention + (3 if config.gated else 2) * D * config.ff_width
    table = config.max_len * D
    tables = config.vocab_size * D + (table if config.positions == "learned" else 0)
    if isinstance(config, EncoderDecoderConfig):
        numbers = config.num_layers * (2 * block + attention) + tables + config.source_vocab * D
    else:
        numbers = config.num_layers * block + tables
    return 4 * _size(config.param_dtype) * numbers + (4 * table if config.positions == "sinusoidal" else 0)


def step_bytes(config: Any, tokens: int) -> int:
    """What a step keeps for its backward pass, at least: of each block its input, q, k, v, the attention's output and the hidden layer."""
    return _size(config.dtype) * tokens * config.num_layers * (3 * config.d_model + 2 * config.kv_heads * config.head_dim + config.ff_width)


def check_memory(config: Any, batch_size: int, length: int) -> None:
    """Raises InputError when the state, or with it a step on `batch_size` rows of `length` tokens, is more than the device holds.

    Both are underestimates: what passes may still not fit.
    """
    holds, state = device_bytes(), state_bytes(config)
    limit = f"and this device holds {holds / GIB:,.1f} GiB"
    require(state <= holds, "d_model", config.d_model, f"makes parameters, gradients and moments of at least {state / GIB:,.1f} GiB, {limit}")
    step = state + step_bytes(config, batch_size * length)
    require(step <= holds, "batch_size", batch_size, f"rows of {length} tokens make a step need at least {step / GIB:,.1f} GiB, {limit}")


def device_bytes() -> int:
    """Memory of the default device: its own, or the host's."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats["bytes_limit"] if stats and "bytes_limit" in stats else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _size(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)
