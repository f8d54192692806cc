"""Text from a GPT: one compiled loop over static shapes, with a key/value cache while the context lasts; `torch_ref` has the plain form.

Prompts are padded on the right to a power of two and so is the number of new tokens, so one compilation serves every request of a size. A row's
padding lies after its last token: causal attention never sees it, and the new tokens overwrite it.
"""

import functools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flax_gpt.errors import RunError, is_integer, require
from flax_gpt.generation.cache import KVCache, init_cache
from flax_gpt.generation.draws import Method, Rule, draw, read_rule, row_keys
from flax_gpt.generation.prompts import bucket, check_model, check_room, read_prompts
from flax_gpt.training.tokenizer import check_text

Overflow = Literal["slide", "error"]


class State(NamedTuple):
    """What the loop carries. Row b holds lengths[b] tokens of its prompt, then `made` new ones; L is the bucket of both."""

    tokens: Array  # (B, L) int32
    lengths: Array  # (B,) int32
    before: Array  # (B,) int32: tokens of the prompt that no window reaches any more
    spans: Array  # (B,) int32: how many positions are ever fed, for a dynamic RoPE scaling: one for the whole generation, as cached keys ask
    made: Array  # () int32
    done: Array  # (B,) bool: has drawn eos
    finite: Array  # () bool: every logit so far was
    cache: KVCache | None


def generate(
    model: Any,
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

    Nothing is dropped out, and the model's own mode stays as it is. A draw depends on (key, row, position) alone: neither the number of rows nor
    the cache changes it.

    Args:
      model: a MiniGPT, or what has its `config`, `__call__` and `step`.
      tokens: (B, T) integers, on the host or a device.
      max_new_tokens: at least 0.
      temperature: divides the logits; 0 takes the largest, the lowest id among equals.
      top_k: keep the k largest logits, the lowest ids among equals; None, 0 and anything from V up keep all.
      top_p: keep the smallest set of tokens whose probability, after top_k, reaches p in (0, 1] (Holtzman et al. 2020, section 3.1); None keeps all.
      eos: a row that has drawn this id is filled up with it; the loop ends when all have.
      key: of jax.random, or (2,) uint32 as from `flax_gpt.random.key_from_seed`; required unless temperature is 0.
      overflow: beyond the model's max_len, "slide" recomputes the last max_len tokens for every new one, at positions 0 … max_len - 1; "error"
        refuses the request.
      lengths: (B,) integers in [1, T]: how much of each row is prompt; the rest is ignored. None: all of it.
      use_cache: False recomputes the window for every token from the first on.

    Returns:
      (B, T + max_new_tokens) int32. Row b is its prompt, then its new tokens, then, where lengths[b] < T, eos (or 0) to the end.

    Raises:
      InputError: an argument that does not fit, named with its value and its limit.
      RunError: the logits are NaN or infinite.
    """
    check_model(model)
    config = model.config
    prompts = read_prompts(tokens, lengths, config.vocab_size)
    method, rule = read_rule(temperature, top_k, top_p, eos, key, config.vocab_size)
    check_room(prompts, max_new_tokens, config.max_len, overflow)
    out = np.full((len(prompts), np.shape(tokens)[1] + max_new_tokens), 0 if eos is None else eos, np.int32)
    for row, prompt in zip(out, prompts, strict=True):
        row[: len(prompt)] = prompt
    if max_new_tokens:
        (new,) = _produce(model, prompts, [max_new_tokens], method, rule, use_cache)
        for row, prompt, drawn in zip(out, prompts, new, strict=True):
            row[len(prompt) : len(prompt) + len(drawn)] = drawn
    return out


def stream(
    model: Any,
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
    """The text that follows `prompt`, as it is produced: `every` tokens at a time, one piece a sample, empty once eos has ended it.

    A sample's pieces, joined, are the text of its row in `generate` of as many equal rows, up to eos. The other arguments are those of `generate`.
    Raises InputError, at once, as `generate` does, and for a prompt that is empty or no string, and a tokenizer of another vocabulary.
    """
    check_model(model)
    config = model.config
    require(tokenizer.vocab_size == config.vocab_size, "tokenizer", f"{tokenizer.vocab_size} ids", f"must have vocab_size = {config.vocab_size}")
    for name, value in (("samples", samples), ("every", every)):
        require(is_integer(value) and value >= 1, name, value, "must be an integer of at least 1")
    check_text("prompt", prompt, smallest=1)
    prompts = read_prompts(np.repeat(np.asarray(tokenizer.encode(prompt, "prompt"))[None], samples, axis=0), None, config.vocab_size)
    method, rule = read_rule(temperature, top_k, top_p, eos, key, config.vocab_size)
    check_room(prompts, max_new_tokens, config.max_len, overflow, smallest=1)
    stops = [*range(every, max_new_tokens, every), max_new_tokens]

    def pieces() -> Iterator[tuple[str, ...]]:
        shown, open_rows = 0, [True] * samples
        for new in _produce(model, prompts, stops, method, rule, use_cache):
            texts = []
            for b, ids in enumerate(new[:, shown:]):
                kept = ids[: np.argmax(ids == eos)] if eos in ids else ids
                texts.append(tokenizer.decode(kept) if open_rows[b] else "")
                open_rows[b] &= eos not in ids
            shown = new.shape[1]
            yield tuple(texts)

    return pieces()


def _produce(model: Any, prompts: list[np.ndarray], stops: list[int], method: Method, rule: Rule, use_cache: bool) -> Iterator[np.ndarray]:
    """The new tokens so far, (B, stop) int32, at each of `stops`, up to the first at which every row is done."""
    max_len, B = model.config.max_len, len(prompts)
    seen = [prompt[-max_len:] for prompt in prompts]
    lengths = np.array([len(row) for row in seen], np.int32)
    before = np.array([len(row) for row in prompts], np.int32) - lengths
    tokens = np.zeros((B, bucket(lengths.max(), max_len)), np.int32)
    for row, prompt in zip(tokens, seen, strict=True):
        row[: len(prompt)] = prompt
    spans = np.minimum(lengths + np.int32(stops[-1] - 1), np.int32(max_len))
    # The model itself, of which a jitted function gets a copy, so that the caller's keeps its mode: nnx.split would take longer than a token.
    state = _start(model, tokens, lengths, before, spans, room=bucket(stops[-1]), use_cache=use_cache)
    for stop in stops:
        state = _advance(model, state, rule, np.int32(stop), method=method)
        count = int(state.made)
        if not state.finite:
            raise RunError(f"the logits of new token {count} are not finite: the weights are damaged or the dtype overflows")
        new = np.full((B, stop), rule.eos, np.int32)
        for row, buffer, length in zip(new, np.asarray(state.tokens), lengths, strict=True):
            row[:count] = buffer[length : length + count]
        yield new
        if np.asarray(state.done).all():
            return


@functools.partial(jax.jit, static_argnames=("room", "use_cache"))
def _start(model: Any, tokens: Array, lengths: Array, before: Array, spans: Array, *, room: int, use_cache: bool) -> State:
    """The state before the first new token: the padded prompts, and the cache that they fill. What padding writes there lies beyond `lengths`."""
    B, width = tokens.shape
    cache = None
    if use_cache:
        model.eval()
        _, cache = model.step(tokens, init_cache(model.config, B, min(model.config.max_len, width + room), spans), empty=True)
    tokens = jnp.pad(tokens, ((0, 0), (0, room)))
    return State(tokens, lengths, before, spans, jnp.int32(0), jnp.zeros(B, bool), jnp.bool_(True), cache)


@functools.partial(jax.jit, static_argnames="method", donate_argnames="state")
def _advance(model: Any, state: State, rule: Rule, until: Array, *, method: Method) -> State:
    """Appends tokens until there are `until` new ones, every row is done, or a logit is not finite."""
    model.eval()
    B, L = state.tokens.shape
    rows, keys = jnp.arange(B), row_keys(rule, B)
    width = min(model.config.max_len, L)

    def append(s: State, logits: Array) -> State:
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        at = s.lengths + s.made
        token = jnp.where(s.done, rule.eos, draw(logits, method, rule, keys, s.before + at))
        return s._replace(
            tokens=s.tokens.at[rows, at].set(token, mode="promise_in_bounds", unique_indices=True),
            made=s.made + 1,
            done=s.done | (token == rule.eos),
            finite=s.finite & jnp.all(jnp.isfinite(logits)),
        )

    def cached(s: State) -> State:
        assert s.cache is not None
        last = s.lengths + s.made - 1
        logits, cache = model.step(s.tokens[rows, last][:, None], s.cache._replace(lengths=last))
        return append(s, logits[:, 0])._replace(cache=cache)

    def recomputed(s: State) -> State:
        length = s.lengths + s.made
        start = jnp.maximum(length - width, 0)
        logits, _ = model(jnp.take_along_axis(s.tokens, start[:, None] + jnp.arange(width), axis=1), span=s.spans)
        return append(s, logits[rows, length - start - 1])

    def more(s: State) -> Array:
        return (s.made < until) & ~jnp.all(s.done) & s.finite

    if state.cache is not None:
        state = jax.lax.while_loop(lambda s: more(s) & (jnp.max(s.lengths) + s.made <= width), cached, state)
    if state.cache is None or L > width:
        state = jax.lax.while_loop(more, recomputed, state)
    return state
