"""From logits to a token."""

import numbers
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flax_gpt import random
from flax_gpt.config import SampleConfig
from flax_gpt.errors import InputError, is_integer, require

Method = Literal["greedy", "plain", "filtered"]


class Rule(NamedTuple):
    """How a token is drawn: traced values, so that none of them compiles anew."""

    temperature: Any  # () float32
    top_k: Any  # () int32, V when off
    top_p: Any  # () float32, 2 when off
    eos: Any  # () int32, -1 when there is none
    key: Any  # (2,) uint32


def read_rule(temperature: Any, top_k: Any, top_p: Any, eos: Any, key: Any, vocab_size: int) -> tuple[Method, Rule]:
    """Raises InputError for a value outside its range, and for a missing or unfit key where tokens are drawn."""
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        require(number or (name == "top_p" and value is None), name, value, "must be a number")
    require(top_k is None or is_integer(top_k), "top_k", top_k, "must be an integer or None")
    require(eos is None or (is_integer(eos) and 0 <= eos < vocab_size), "eos", eos, f"must be an id in [0, vocab_size = {vocab_size})")
    sample = SampleConfig(temperature, top_k, top_p)
    words = np.zeros(2, np.uint32)
    if temperature > 0:
        require(key is not None, "key", None, "is required when temperature is above 0: pass jax.random.key(seed), or temperature=0")
        try:
            words = np.asarray(random.as_key(key))
        except TypeError:
            words = np.zeros(0, np.uint32)
        if words.shape != (2,):
            raise InputError("key", getattr(key, "dtype", key), "must be one key of jax.random (threefry), or (2,) uint32")
    rule = Rule(
        temperature=np.float32(sample.temperature),
        top_k=np.int32(min(sample.top_k or vocab_size, vocab_size)),
        top_p=np.float32(2.0 if sample.top_p in (None, 1) else sample.top_p),
        eos=np.int32(-1 if eos is None else eos),
        key=words,
    )
    filtered = rule.top_k < vocab_size or rule.top_p <= 1
    return "greedy" if temperature == 0 else "filtered" if filtered else "plain", rule


def row_keys(rule: Rule, rows: int) -> Array:
    """A key a row, (rows, 2) uint32; folded with a position it gives the noise of that place."""
    return random.fold(random.fold_name(rule.key, "generation"), jnp.arange(rows))


def filter_logits(logits: Array, top_k: Any, top_p: Any) -> Array:
    """logits (B, V) with -inf in place of all but the top_k largest and, of these, of all beyond the first whose probabilities reach top_p.

    Equal logits rank by id. The largest always stays.
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    ranked = jnp.where(jnp.arange(logits.shape[-1]) < top_k, ranked, -jnp.inf)
    weights = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    first = jnp.arange(logits.shape[-1]) == 0
    ranked = jnp.where((before < top_p) | first, ranked, -jnp.inf)
    return jnp.put_along_axis(logits, order, ranked, axis=-1, inplace=False)


def gumbel(keys: Array, size: int) -> Array:
    """Standard Gumbel noise (B, size) float32 from keys (B, 2): logits plus it are largest at a draw from their softmax (Gumbel 1954).

    -log(-log(1 - u)), u = (bits + ½) / 2³²: small u, which give the largest noise, keep their full precision.
    """
    u = (random.bits(keys[:, None, :], jnp.arange(size, dtype=jnp.uint32)).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(u, 1 - 2.0**-24)))


def draw(logits: Array, method: Method, rule: Rule, keys: Array, positions: Array) -> Array:
    """One token a row, (B,) int32, from logits (B, V) float32 or better, for the places `positions` (B,); keys (B, 2) as from `row_keys`."""
    if method != "greedy":
        logits = logits / rule.temperature.astype(logits.dtype)
        if method == "filtered":
            logits = filter_logits(logits, rule.top_k, rule.top_p)
        logits = logits + gumbel(random.fold(keys, positions), logits.shape[-1]).astype(logits.dtype)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
