"""Text from a GPT: one compiled loop over static shapes, with a key/value cache while the context lasts; `torch_ref` has the plain form.

Prompts are padded on the right to a power of two and so is the number of new tokens, so one compilation serves every request of a size. A row's padding lies
after its last token: causal attention never sees it, and the new tokens overwrite it.
"""

import functools
import numbers
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from flax_gpt import random
from flax_gpt.config import SampleConfig
from flax_gpt.errors import InputError, RunError, require
from flax_gpt.generation.cache import KVCache, init_cache

Overflow = Literal["slide", "error"]

SMALLEST_BUCKET = 16


class State(NamedTuple):
    """What a loop carries. Row b holds lengths[b] tokens of its prompt, then `count` new ones; L is the prompts' bucket plus the new tokens'."""

    tokens: Array  # (B, L) int32
    lengths: Array  # (B,) int32
    count: Array  # () int32
    done: Array  # (B,) bool: has drawn eos
    finite: Array  # () bool: every logit so far was
    cache: KVCache | None


class Rule(NamedTuple):
    """How a token is drawn; traced, so that no value of it compiles anew."""

    temperature: Array  # () float32
    top_k: Array  # () int32, V when off
    top_p: Array  # () float32, 2 when off
    eos: Array  # () int32, -1 when there is none
    keys: Array  # (B, 2) uint32, one a row
    first: Array  # (B,) int32: tokens of the prompt before the window that the loop sees


def generate(
    model: nnx.Module,
    tokens: Any,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | None = None,
    key: Any = None,
    overflow: Overflow = "slide",
    lengths: Any = None,
    use_cache: bool = True,
) -> np.ndarray:
    """The prompts with `max_new_tokens` tokens appended, one at a time: softmax(logits / temperature), filter, draw.

    Nothing is dropped out, and the model's own mode stays as it is. A draw depends on (key, row, position) alone: neither the number of rows nor the cache
    changes it.

    Args:
      model: a MiniGPT, or what has its `config`, `__call__` and `step`.
      tokens: (B, T) integers, on the host or a device.
      max_new_tokens: at least 0.
      temperature: divides the logits; 0 takes the largest, the lowest id among equals.
      top_k: keep the k largest logits, the lowest ids among equals; None, 0 and anything from V up keep all.
      top_p: keep the smallest set of tokens whose probability, after top_k, reaches p in (0, 1] (Holtzman et al. 2020, section 3.1); None keeps all.
      eos: a row that has drawn this id is filled up with it; the loop ends when all have.
      key: of jax.random, or (2,) uint32 as from `flax_gpt.random.key_from_seed`; required unless temperature is 0.
      overflow: beyond the model's max_len, "slide" recomputes the last max_len tokens for every new one, at positions 0 … max_len - 1; "error" refuses.
      lengths: (B,) integers in [1, T]: how much of each row is prompt; the rest is ignored. None: all of it.
      use_cache: False recomputes the window for every token from the first on.

    Returns:
      (B, T + max_new_tokens) int32. Row b is its prompt, then its new tokens, then, where lengths[b] < T, eos (or 0) to the end.

    Raises:
      InputError: an argument that does not fit, named with its value and its limit.
      RunError: the logits are NaN or infinite.
    """
    prompts = read_prompts(tokens, lengths, model.config.vocab_size)
    require(_is_integer(max_new_tokens) and max_new_tokens >= 0, "max_new_tokens", max_new_tokens, "must be an integer of at least 0")
    new = np.zeros((len(prompts), 0), np.int32)
    for part in _parts(model, prompts, [max_new_tokens], temperature, top_k, top_p, eos, key, overflow, use_cache):
        new = part
    out = np.full((len(prompts), np.shape(tokens)[1] + max_new_tokens), 0 if eos is None else eos, np.int32)
    for row, prompt, drawn in zip(out, prompts, new, strict=True):
        row[: len(prompt)] = prompt
        row[len(prompt) : len(prompt) + len(drawn)] = drawn
    return out


def stream(
    model: nnx.Module,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int,
    *,
    samples: int = 1,
    every: int = 8,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | None = None,
    key: Any = None,
    overflow: Overflow = "slide",
    use_cache: bool = True,
) -> Iterator[tuple[str, ...]]:
    """Yields the text that follows `prompt` as it is produced, `every` tokens at a time: one piece a sample, empty where eos has ended it.

    Joined, the pieces of a sample are the text of its row in `generate` of as many equal rows, up to eos; the other arguments are those of `generate`, and
    nothing is refused later than at the first piece. Raises InputError also for a tokenizer of another vocabulary.
    """
    size = model.config.vocab_size
    require(tokenizer.vocab_size == size, "tokenizer", f"{tokenizer.vocab_size} ids", f"must have the model's vocab_size = {size}")
    for name, value in (("samples", samples), ("every", every), ("max_new_tokens", max_new_tokens)):
        require(_is_integer(value) and value >= 1, name, value, "must be an integer of at least 1")
    require(len(prompt) > 0, "prompt", prompt, "must hold at least one character")
    row = np.asarray(tokenizer.encode(prompt))
    prompts = read_prompts(np.repeat(row[None], samples, axis=0), None, size)
    stops = [*range(every, max_new_tokens, every), max_new_tokens]
    shown, ended = 0, np.zeros(samples, bool)
    for new in _parts(model, prompts, stops, temperature, top_k, top_p, eos, key, overflow, use_cache):
        pieces = []
        for b, ids in enumerate(new[:, shown:]):
            stop = np.flatnonzero(ids == eos) if eos is not None else ()
            pieces.append("" if ended[b] else tokenizer.decode(ids[: stop[0]] if len(stop) else ids))
            ended[b] |= len(stop) > 0
        shown = new.shape[1]
        yield tuple(pieces)


def read_prompts(tokens: Any, lengths: Any, vocab_size: int) -> list[np.ndarray]:
    """The rows of tokens (B, T), each cut to its length. Raises InputError for what is empty, no integer, or outside the vocabulary."""
    tokens = np.asarray(tokens)
    require(tokens.ndim == 2 and min(tokens.shape) >= 1, "tokens", list(tokens.shape), "must have the shape (B, T), both at least 1")
    require(tokens.dtype.kind in "iu", "tokens", str(tokens.dtype), "must be integers")
    B, T = tokens.shape
    if lengths is None:
        lengths = np.full(B, T)
    lengths = np.asarray(lengths)
    require(lengths.shape == (B,), "lengths", list(lengths.shape), f"must have the shape (B,) = ({B},)")
    require(lengths.dtype.kind in "iu", "lengths", str(lengths.dtype), "must be integers")
    wrong = lengths[(lengths < 1) | (lengths > T)]
    require(wrong.size == 0, "lengths", int(wrong[0]) if wrong.size else None, f"must lie in [1, T = {T}]")
    prompts = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    ids = np.concatenate(prompts)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    require(wrong.size == 0, "tokens", int(wrong[0]) if wrong.size else None, f"must lie in [0, vocab_size = {vocab_size})")
    return [prompt.astype(np.int32) for prompt in prompts]


def filter_logits(logits: Array, top_k: Any, top_p: Any) -> Array:
    """logits (B, V) with -inf in place of all but the top_k largest and, of these, of all beyond the first whose probabilities reach top_p.

    Equal logits rank by id. The largest always stays.
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    ranked = jnp.where(jnp.arange(logits.shape[-1]) < top_k, ranked, -jnp.inf)
    weights = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    ranked = jnp.where(before < top_p, ranked, -jnp.inf)
    return jnp.put_along_axis(logits, order, ranked, axis=-1, inplace=False)


def gumbel(keys: Array, size: int) -> Array:
    """Standard Gumbel noise (B, size) float32 from keys (B, 2): logits plus it are largest at a draw from their softmax (Gumbel 1954).

    -log(-log(1 - u)), u = (bits + ½) / 2³²: small u, which give the largest noise, keep their full precision.
    """
    u = (random.bits(keys[:, None, :], jnp.arange(size, dtype=jnp.uint32)).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(u, 1 - 2.0**-24)))


def draw(logits: Array, rule: Rule, positions: Array, *, greedy: bool, filtered: bool) -> Array:
    """One token a row, (B,) int32, from logits (B, V) float32 or better, for the place `positions` (B,) in the text."""
    if not greedy:
        logits = logits / rule.temperature.astype(logits.dtype)
        if filtered:
            logits = filter_logits(logits, rule.top_k, rule.top_p)
        logits = logits + gumbel(random.fold(rule.keys, positions), logits.shape[-1]).astype(logits.dtype)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("graph", "width"), donate_argnames="state")
def _prefill(graph: nnx.GraphDef, weights: nnx.State, state: State, width: int) -> State:
    """Fills the cache from the prompts, padded to `width`; what their padding writes lies beyond `lengths` and is overwritten."""
    _, cache = _evaluating(graph, weights).step(state.tokens[:, :width], state.cache)
    return state._replace(cache=cache)


@functools.partial(jax.jit, static_argnames=("graph", "greedy", "filtered", "slides"), donate_argnames="state")
def _advance(
    graph: nnx.GraphDef, weights: nnx.State, state: State, rule: Rule, until: Array, *, greedy: bool, filtered: bool, slides: bool
) -> State:
    """Appends tokens until `until` new ones are there, every row is done, or a logit is not finite."""
    model = _evaluating(graph, weights)
    rows = jnp.arange(state.tokens.shape[0])
    width = min(model.config.max_len, state.tokens.shape[1])

    def append(s: State, logits: Array) -> State:
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        at = s.lengths + s.count
        token = draw(logits, rule, rule.first + at, greedy=greedy, filtered=filtered)
        token = jnp.where(s.done, rule.eos, token)
        return s._replace(
            tokens=s.tokens.at[rows, at].set(token, mode="promise_in_bounds", unique_indices=True),
            count=s.count + 1,
            done=s.done | (token == rule.eos),
            finite=s.finite & jnp.all(jnp.isfinite(logits)),
        )

    def cached(s: State) -> State:
        last = s.lengths + s.count - 1
        logits, cache = model.step(s.tokens[rows, last][:, None], s.cache._replace(lengths=last))
        return append(s, logits[:, 0])._replace(cache=cache)

    def recomputed(s: State) -> State:
        length = s.lengths + s.count
        start = jnp.maximum(length - width, 0)
        window = jnp.take_along_axis(s.tokens, start[:, None] + jnp.arange(width), axis=1)
        logits, _ = model(window)
        return append(s, logits[rows, length - start - 1])

    def more(s: State) -> Array:
        return (s.count < until) & ~jnp.all(s.done) & s.finite

    def fits(s: State) -> Array:
        return jnp.max(s.lengths) + s.count <= width

    if state.cache is not None:
        state = jax.lax.while_loop(lambda s: more(s) & fits(s), cached, state)
    if state.cache is None or slides:
        state = jax.lax.while_loop(more, recomputed, state)
    return state


def _evaluating(graph: nnx.GraphDef, weights: nnx.State) -> Any:
    """A copy of the model in eval mode, so that the caller's keeps its own."""
    model = nnx.merge(graph, weights, copy=True)
    model.eval()
    return model


def _parts(
    model: Any,
    prompts: Sequence[np.ndarray],
    stops: Iterable[int],
    temperature: Any,
    top_k: Any,
    top_p: Any,
    eos: Any,
    key: Any,
    overflow: Any,
    use_cache: bool,
) -> Iterator[np.ndarray]:
    """The new tokens so far, (B, stop) int32, at each of `stops`; nothing after all rows are done but what fills the last."""
    config, B = model.config, len(prompts)
    stops = list(stops)
    longest = max(map(len, prompts))
    sample = check_sampling(temperature, top_k, top_p, eos, key, config.vocab_size)
    require(overflow in ("slide", "error"), "overflow", overflow, "must be 'slide' or 'error'")
    if overflow == "error":
        left = max(config.max_len - longest, 0)
        limit = f"with a prompt of {longest} tokens must be at most {left}: max_len = {config.max_len}"
        require(longest + stops[-1] <= config.max_len, "max_new_tokens", stops[-1], limit)
    if stops[-1] == 0:
        return

    seen = [prompt[-config.max_len :] for prompt in prompts]
    width = bucket(max(map(len, seen)), config.max_len)
    room = bucket(stops[-1])
    tokens = np.zeros((B, width + room), np.int32)
    for row, prompt in zip(tokens, seen, strict=True):
        row[: len(prompt)] = prompt
    state = State(
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray([len(prompt) for prompt in seen], jnp.int32),
        count=jnp.int32(0),
        done=jnp.zeros(B, bool),
        finite=jnp.bool_(True),
        cache=init_cache(config, B, min(config.max_len, width + room)) if use_cache else None,
    )
    greedy = sample.temperature == 0
    seed = jnp.zeros(2, jnp.uint32) if greedy else random.fold_name(random.as_key(key), "generation")
    rule = Rule(
        temperature=jnp.float32(sample.temperature),
        top_k=jnp.int32(min(sample.top_k or config.vocab_size, config.vocab_size)),
        top_p=jnp.float32(2.0 if sample.top_p in (None, 1) else sample.top_p),
        eos=jnp.int32(-1 if eos is None else eos),
        keys=random.fold(seed, jnp.arange(B)),
        first=jnp.asarray([len(prompt) - len(window) for prompt, window in zip(prompts, seen, strict=True)], jnp.int32),
    )
    graph, weights = nnx.split(model)
    if use_cache:
        state = _prefill(graph, weights, state, width=width)
    filtered = bool(sample.top_k) or sample.top_p not in (None, 1)
    slides = width + room > config.max_len  # by bucket, so that no request of this size compiles anew
    for stop in stops:
        state = _advance(graph, weights, state, rule, jnp.int32(stop), greedy=greedy, filtered=filtered and not greedy, slides=slides)
        count = int(state.count)
        if not state.finite:
            raise RunError(f"the model's logits are not finite at new token {count}: its weights are damaged or its dtype overflows")
        new = np.full((B, stop), 0 if eos is None else eos, np.int32)
        for row, buffer, prompt in zip(new, np.array(state.tokens), seen, strict=True):
            row[:count] = buffer[len(prompt) : len(prompt) + count]
        yield new
        if count < stop:
            return


def check_sampling(temperature: Any, top_k: Any, top_p: Any, eos: Any, key: Any, vocab_size: int) -> SampleConfig:
    """Raises InputError for a value outside its range, and for a missing or unfit key where tokens are drawn."""
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        require(number or (name == "top_p" and value is None), name, value, "must be a number")
    require(top_k is None or _is_integer(top_k), "top_k", top_k, "must be an integer or None")
    require(eos is None or (_is_integer(eos) and 0 <= eos < vocab_size), "eos", eos, f"must be an id in [0, vocab_size = {vocab_size})")
    sample = SampleConfig(temperature, top_k, top_p)
    if temperature > 0:
        require(key is not None, "key", None, "is required when temperature is above 0: jax.random.key(seed), or temperature=0 for the likeliest token")
        try:
            fits = random.as_key(key).ndim == 1
        except TypeError:
            fits = False
        if not fits:
            raise InputError("key", getattr(key, "dtype", key), "must be one key of jax.random (threefry), or (2,) uint32")
    return sample


def bucket(size: int, limit: int | None = None) -> int:
    """The power of two from 16 up that holds `size`, at most `limit`."""
    power = max(SMALLEST_BUCKET, 1 << (size - 1).bit_length())
    return power if limit is None else min(power, limit)


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
