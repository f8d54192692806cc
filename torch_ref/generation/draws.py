"""From logits to a token; the noise is bit for bit that of `flax_gpt.generation.draws` where XLA's logarithms are `torch_ref.xla_math`'s."""

import numbers
from typing import Any

import torch
from torch import Tensor

from flax_gpt.config import SampleConfig
from flax_gpt.errors import InputError, is_integer, require
from torch_ref import random
from torch_ref.xla_math import log, log1p


def read_rule(temperature: Any, top_k: Any, top_p: Any, eos: Any, key: Any, vocab_size: int) -> tuple[SampleConfig, Tensor | None]:
    """Raises InputError for a value outside its range, and for a missing or unfit key where tokens are drawn."""
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        require(number or (name == "top_p" and value is None), name, value, "must be a number")
    require(top_k is None or is_integer(top_k), "top_k", top_k, "must be an integer or None")
    require(eos is None or (is_integer(eos) and 0 <= eos < vocab_size), "eos", eos, f"must be an id in [0, vocab_size = {vocab_size})")
    sample = SampleConfig(temperature, top_k, top_p)
    if temperature == 0:
        return sample, None
    require(key is not None, "key", None, "is required when temperature is above 0: pass torch_ref.jax_random.key(seed), or temperature=0")
    try:
        key = random.as_key(key)
    except (TypeError, RuntimeError):
        key = torch.zeros(0)
    if tuple(key.shape) != (2,):
        raise InputError("key", getattr(key, "dtype", key), "must be a (2,) tensor of 32-bit words")
    return sample, random.fold_name(key, "generation")


def filter_logits(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """logits (B, V) with -inf in place of all but the top_k largest and, of these, of all beyond the first whose probabilities reach top_p.

    Equal logits rank by id. The largest always stays.
    """
    ranked, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranked = ranked.masked_fill(torch.arange(logits.shape[-1], device=logits.device) >= top_k, -torch.inf)
    weights = torch.softmax(ranked, dim=-1)
    before = torch.cumsum(weights, dim=-1) - weights
    ranked = ranked.masked_fill(before >= top_p, -torch.inf)
    return torch.empty_like(logits).scatter(-1, order, ranked)


def gumbel(keys: Tensor, size: int) -> Tensor:
    """Standard Gumbel noise (B, size) float32 from keys (B, 2): logits plus it are largest at a draw from their softmax (Gumbel 1954).

    -log(-log(1 - u)), u = (bits + ½) / 2³²: small u, which give the largest noise, keep their full precision.
    """
    u = (random.bits(keys[:, None, :], torch.arange(size, device=keys.device)).to(torch.float32) + 0.5) * 2.0**-32
    return -log(-log1p(-torch.clamp(u, max=1 - 2.0**-24)))


def draw(logits: Tensor, sample: SampleConfig, keys: Tensor | None, positions: Tensor) -> Tensor:
    """One token a row, (B,) int64, from logits (B, V) float32 or better, for the places `positions` (B,); keys (B, 2), one a row."""
    if keys is not None:
        logits = logits / sample.temperature
        V = logits.shape[-1]
        if sample.top_k or sample.top_p not in (None, 1):
            logits = filter_logits(logits, sample.top_k or V, 2.0 if sample.top_p in (None, 1) else sample.top_p)
        logits = logits + gumbel(random.fold(keys, positions), V).to(logits)
    return torch.argmax(logits, dim=-1)
