"""What a training step or a beam search needs at least, so that one that can never fit is refused before it begins."""

import os
from typing import Any

import jax

from flax_gpt.config import EncoderDecoderConfig, OptimizerConfig, TrainConfig
from flax_gpt.errors import require

GIB = 2.0**30


def moments(optimizer: OptimizerConfig) -> int:
    """Arrays that the optimizer keeps beside each parameter: Adam's two moments, or the velocity of SGD with momentum."""
    return 2 if optimizer.optimizer != "sgd" else int(optimizer.momentum > 0)


def state_bytes(config: Any, optimizer: OptimizerConfig) -> int:
    """Parameters, gradients and moments of all matrices and embeddings, and the table of positions. Biases and norms are left out."""
    D, attention = config.d_model, 2 * config.d_model * (config.d_model + config.kv_heads * config.head_dim)
    block = attention + (3 if config.gated else 2) * D * config.ff_width
    table = config.max_len * D
    tables = config.vocab_size * D + (table if config.positions == "learned" else 0)
    if isinstance(config, EncoderDecoderConfig):
        numbers = config.num_layers * (2 * block + attention) + tables + config.source_vocab * D
    else:
        numbers = config.num_layers * block + tables
    return (2 + moments(optimizer)) * _size(config.param_dtype) * numbers + (4 * table if config.positions == "sinusoidal" else 0)


def step_bytes(config: Any, tokens: int) -> int:
    """What a step keeps for its backward pass, at least: of each block its input, q, k, v, the attention's output and the hidden layer."""
    return _size(config.dtype) * tokens * config.num_layers * (3 * config.d_model + 2 * config.kv_heads * config.head_dim + config.ff_width)


def check_memory(config: Any, train_config: TrainConfig, length: int, devices: int = 1) -> None:
    """Raises InputError when the state, or with it a step on the rows of one part of a batch, `length` tokens each, is more than the device holds.

    `devices` that share each batch hold a state each; those that are made of the processor hold them, and all rows, in one memory.

    Both are underestimates: what passes may still not fit.
    """
    together = devices if jax.local_devices()[0].platform == "cpu" else 1
    holds, state = device_bytes(), together * state_bytes(config, train_config.optimizer)
    limit = f"and this device holds {holds / GIB:,.1f} GiB"
    kept = "parameters, gradients and moments" if moments(train_config.optimizer) else "parameters and gradients"
    kept += f" on each of {together} devices" if together > 1 else ""
    require(state <= holds, "d_model", config.d_model, f"makes {kept} of at least {state / GIB:,.1f} GiB, {limit}")
    rows = train_config.batch_size // train_config.accumulate * together // devices
    step = state + step_bytes(config, rows * length)
    parts = "" if train_config.accumulate == 1 else f" in {train_config.accumulate} parts"
    needs = f"rows of {length} tokens{parts} make a step need at least {step / GIB:,.1f} GiB"
    require(step <= holds, "batch_size", train_config.batch_size, f"{needs}, {limit}")


def check_beams(config: Any, rows: int, beams: int, positions: int, *, use_cache: bool) -> None:
    """Raises InputError when the scores of all candidates, the hypotheses and their cache are more than the device holds: an underestimate too.

    `positions`: tokens that a hypothesis has room for.
    """
    cached = 2 * config.num_layers * config.kv_heads * config.head_dim * _size(config.dtype) if use_cache else 0
    needs = rows * beams * (max(4, _size(config.dtype)) * config.vocab_size + positions * (2 * 4 + cached))
    holds = device_bytes()
    limit = f"hypotheses for each of {rows} rows need at least {needs / GIB:,.1f} GiB, and this device holds {holds / GIB:,.1f} GiB"
    require(needs <= holds, "beams", beams, limit)


def device_bytes() -> int:
    """Memory of the default device: its own, or the host's."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats["bytes_limit"] if stats and "bytes_limit" in stats else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _size(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)
