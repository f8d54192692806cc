"""Greedy and beam search, for translation and for a GPT: one compiled loop over static shapes; `torch_ref` has the plain form.

Each step extends every unfinished hypothesis by every token and ranks all of them by log P; the 2 · beams first are the candidates, so that at least
`beams` of them do not end. Among the first `beams`, those that end go to the finished ones, of which the `beams` with the highest scores are kept;
the first `beams` that do not end go on. At the last step the first `beams` candidates are finished whether they end or not. Equals rank by parent,
then by token id, and an earlier finished hypothesis before a later one: the same request gives the same answer.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flax_gpt.config import BeamConfig, EncoderDecoderConfig
from flax_gpt.errors import RunError, is_integer, require
from flax_gpt.generation.cache import KVCache, init_cache
from flax_gpt.generation.prompts import bucket, check_model, read_prompts
from flax_gpt.training.memory import check_beams


class Hypotheses(NamedTuple):
    """The n best of each row, best first. Where there are fewer, the rest have length 0 and the score -inf."""

    tokens: np.ndarray
    """(B, n, max_new_tokens) int32: the new tokens, eos included, then padding."""
    lengths: np.ndarray
    """(B, n) int32: how many are no padding."""
    scores: np.ndarray
    """(B, n): log P / length ** length_exponent, in float32 or better."""
    log_probs: np.ndarray
    """(B, n): log P, the sum over the new tokens."""


class Rule(NamedTuple):
    """What a search goes by, traced: none of it compiles anew."""

    until: Any  # () int32: the longest hypothesis, in new tokens
    eos: Any  # () int32, -1 when there is none
    bos: Any  # () int32
    exponent: Any  # () float


class State(NamedTuple):
    """What the loop carries, K beams a row. A hypothesis holds its prompt, prompt_lengths[b] tokens, and its new tokens, L at most together."""

    made: Array  # () int32: new tokens of the unfinished
    live: Array  # (B, K, L) int32
    log_probs: Array  # (B, K), falling; -inf where there is none
    ended: Array  # (B, K, L) int32
    ended_scores: Array  # (B, K), falling; -inf where there is none
    ended_log_probs: Array  # (B, K)
    ended_lengths: Array  # (B, K) int32, new tokens
    done: Array  # (B,) bool: the finished stay as they are
    finite: Array  # () bool: every logit so far was
    cache: KVCache | None  # of B · K rows


class Decoder(NamedTuple):
    """A GPT, or the decoder of a translation and what it translates."""

    step: Callable[[Array, KVCache], tuple[Array, KVCache]]
    """(N, T) tokens appended to a cache of N rows → (N, T, V), and the longer cache."""
    whole: Callable[[Array], Array]
    """(N, T) tokens → (N, T, V), everything computed anew."""


def beam_search(
    model: Any,
    tokens: Any,
    max_new_tokens: int | None = None,
    *,
    lengths: Any = None,
    beams: int = 4,
    n_best: int = 1,
    length_exponent: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    no_repeat_ngram: int = 0,
    eos: int | None = None,
    use_cache: bool = True,
) -> Hypotheses:
    """The most probable continuations that a search with `beams` unfinished hypotheses finds; beams = 1 takes the likeliest token each time.

    A hypothesis Y scores log P(Y) / |Y| ** length_exponent, |Y| its new tokens with eos: the length penalty of fairseq and of Hugging Face (Wu et al.
    2016, equation 14, has (5 + |Y|) / 6 in place of |Y|). It is finished by eos, or by max_new_tokens without. Nothing is dropped out, and the
    model's own mode stays as it is. A row's result depends neither on the other rows nor on padding.

    Args:
      model: an EncoderDecoder or a MiniGPT.
      tokens: (B, T) integers: the source of a translation, or the prompts of a GPT.
      max_new_tokens: the longest hypothesis, at least 1; None: as many as max_len allows. A GPT's prompt and it must fit in max_len: nothing slides.
      lengths: (B,) integers in [1, T]: how much of each row is real, the rest is ignored; None: all of it.
      beams, n_best, length_exponent, no_repeat_ngram: see `BeamConfig`.
      early_stopping: once `beams` hypotheses of a row are finished, its search ends
        True: at once;
        False: when score(log P of the best unfinished one, its present length) is no better than the worst finished score, a heuristic;
        "never": when none can become better than that: log P never rises, so an unfinished one scores at most score(log P, max_new_tokens), or
        score(log P, present length) for an exponent of at most 0.
        These are the meanings that Hugging Face publishes for the same argument. With one beam the first eos ends the search.
      eos: for a GPT, the id that ends a hypothesis; None: no id does. A translation's is its configuration's.
      use_cache: False computes everything anew for each token.

    Raises:
      InputError: an argument that does not fit, named with its value and its limit; more beams than the device's memory holds.
      RunError: the logits are NaN or infinite, or no_repeat_ngram bans every continuation of a row.
    """
    check_model(model, translates=True)
    config, translates = model.config, isinstance(model.config, EncoderDecoderConfig)
    asked = BeamConfig(beams, n_best, length_exponent, early_stopping, no_repeat_ngram)
    # What is traced, or used on the host alone, takes no part in what is compiled.
    plan = dataclasses.replace(asked, n_best=1, length_exponent=0.0, early_stopping=beams == 1 or early_stopping)
    rows = read_prompts(tokens, lengths, config.source_vocab if translates else config.vocab_size)
    require(beams * config.vocab_size < 2**31, "beams", beams, f"times vocab_size = {config.vocab_size} must be below 2**31, a step's candidates")
    until = check_search(config, max(map(len, rows)), max_new_tokens, eos)
    end = config.eos if translates else -1 if eos is None else eos
    width = bucket(max(map(len, rows)), config.max_len)
    positions = min(config.max_len, (1 if translates else width) + bucket(until))
    check_beams(config, len(rows), beams, positions, use_cache=use_cache)
    padded = np.zeros((len(rows), width), np.int32)
    for row, real in zip(padded, rows, strict=True):
        row[: len(real)] = real
    rule = Rule(np.int32(until), np.int32(end), np.int32(config.bos if translates else 0), np.float32(length_exponent))
    sizes = np.array([len(row) for row in rows], np.int32)
    state = _search(model, padded, sizes, rule, plan=plan, room=bucket(until), use_cache=use_cache)
    if not state.finite:
        raise RunError(f"the logits of new token {int(state.made)} are not finite: the weights are damaged or the dtype overflows")
    scores, log_probs, counts = (np.asarray(x)[:, :n_best] for x in (state.ended_scores, state.ended_log_probs, state.ended_lengths))
    for stuck in np.flatnonzero(np.isneginf(scores[:, 0])):
        raise RunError(f"row {stuck} has no continuation of {until} tokens without a repeated sequence of no_repeat_ngram = {no_repeat_ngram}")
    starts = np.ones(len(rows), np.int32) if translates else sizes
    out = np.full((len(rows), n_best, until), config.pad if translates else max(end, 0), np.int32)
    for b, (ended, start) in enumerate(zip(np.asarray(state.ended), starts, strict=True)):
        for n in range(n_best):
            out[b, n, : counts[b, n]] = ended[n, start : start + counts[b, n]]
    return Hypotheses(out, counts, scores, log_probs)


def check_search(config: Any, longest: int, max_new_tokens: Any, eos: Any) -> int:
    """The longest hypothesis that is asked for. Raises InputError when the source or the hypothesis does not fit in max_len."""
    max_len, translates = config.max_len, isinstance(config, EncoderDecoderConfig)
    if translates:
        require(longest <= max_len, "tokens", f"{longest} tokens", f"must be at most max_len = {max_len} tokens long")
        require(eos is None or eos == config.eos, "eos", eos, f"must be the configuration's, {config.eos}")
        room, limit = max_len, f"must be an integer in [1, {max_len}]: max_len = {max_len}"
    else:
        valid = eos is None or (is_integer(eos) and 0 <= eos < config.vocab_size)
        require(valid, "eos", eos, f"must be an id in [0, vocab_size = {config.vocab_size})")
        require(longest < max_len, "tokens", f"{longest} tokens", f"must leave room for a new token: max_len = {max_len}")
        room, limit = max_len - longest, f"must be an integer in [1, {max_len - longest}] after {longest} tokens: max_len = {max_len}"
    until = room if max_new_tokens is None else max_new_tokens
    require(is_integer(until) and 1 <= until <= room, "max_new_tokens", until, limit)
    return int(until)


@functools.partial(jax.jit, static_argnames=("plan", "room", "use_cache"))
def _search(model: Any, tokens: Array, lengths: Array, rule: Rule, *, plan: BeamConfig, room: int, use_cache: bool) -> State:
    """The search from its first step to its last, the encoder included."""
    model.eval()  # a copy, as any argument of a jitted function is
    config, K, B = model.config, plan.beams, tokens.shape[0]
    if isinstance(config, EncoderDecoderConfig):
        source, source_lengths = tokens, lengths
        tokens, lengths = jnp.full((B, 1), rule.bos, jnp.int32), jnp.ones(B, jnp.int32)
    size = min(config.max_len, tokens.shape[1] + room)
    spans = lengths + rule.until - 1  # positions that are ever fed to the model
    if isinstance(config, EncoderDecoderConfig):
        decoder = _translator(model, source, source_lengths, init_cache(config, B, size, spans), K)
    else:
        decoder = Decoder(model.step, lambda fed: model(fed, span=jnp.repeat(spans, K))[0])
    cache = None
    if use_cache:
        cache = init_cache(config, B, size, spans)
        if tokens.shape[1] > 1:  # a prompt, which a GPT alone has
            # What a row's padding writes lies where its new tokens will stand.
            _, cache = model.step(tokens, cache, empty=True)
        cache = jax.tree.map(lambda leaf: jnp.repeat(leaf, K, axis=0), cache)
    live = jnp.repeat(jnp.pad(tokens, ((0, 0), (0, room)))[:, None], K, axis=1)
    nothing = jnp.full((B, K), -jnp.inf, jnp.promote_types(config.dtype, jnp.float32))
    state = State(
        made=jnp.int32(0),
        live=live,
        log_probs=nothing.at[:, 0].set(0),
        ended=live,
        ended_scores=nothing,
        ended_log_probs=nothing,
        ended_lengths=jnp.zeros((B, K), jnp.int32),
        done=jnp.zeros(B, bool),
        finite=jnp.bool_(True),
        cache=cache,
    )
    advance = functools.partial(_advance, decoder, lengths, rule, plan, size)
    return jax.lax.while_loop(lambda s: (s.made < rule.until) & ~jnp.all(s.done) & s.finite, advance, state)


def _translator(model: Any, source: Array, source_lengths: Array, empty: KVCache, beams: int) -> Decoder:
    memory, _ = model.encode(source, source_lengths)
    start = model.start(memory, source_lengths, empty)

    def step(tokens: Array, own: KVCache) -> tuple[Array, KVCache]:
        logits, cache = model.step(tokens, start._replace(own=own))
        return logits, cache.own

    def whole(tokens: Array) -> Array:
        each = lambda x: jnp.repeat(x, beams, axis=0)
        logits, _ = model(each(source), tokens, source_lengths=each(source_lengths), target_lengths=each(empty.spans))
        return logits

    return Decoder(step, whole)


def _advance(decoder: Decoder, lengths: Array, rule: Rule, plan: BeamConfig, size: int, s: State) -> State:
    """One more token on every unfinished hypothesis."""
    B, K, _ = s.live.shape
    rows = jnp.arange(B)[:, None]
    logits, cache = _next_logits(decoder, lengths, size, s)
    V = logits.shape[-1]
    new = jax.nn.log_softmax(logits.astype(s.log_probs.dtype)).reshape(B, K, V)
    if plan.no_repeat_ngram:
        new = jnp.where(_repeats(s.live, lengths + s.made, plan.no_repeat_ngram, V), -jnp.inf, new)
    total, index = jax.lax.top_k((s.log_probs[..., None] + new).reshape(B, K * V), min(2 * K, K * V))
    parent, token = index // V, (index % V).astype(jnp.int32)
    places = jnp.arange(total.shape[1])
    candidates = s.live[rows, parent].at[rows, places, (lengths + s.made)[:, None]].set(token)
    made = s.made + 1
    score = lambda log_prob, length: log_prob / (length.astype(log_prob.dtype) ** rule.exponent.astype(log_prob.dtype))

    ends = token == rule.eos
    finished = (ends | (made == rule.until)) & (places < K) & (total > -jnp.inf) & ~s.done[:, None]
    scores, order = jax.lax.top_k(jnp.concatenate([s.ended_scores, jnp.where(finished, score(total, made), -jnp.inf)], axis=1), K)
    merge = lambda old, new: jnp.concatenate([old, new], axis=1)[rows, order]
    log_probs, kept = jax.lax.top_k(jnp.where(ends, -jnp.inf, total), K)
    flat = (rows * K + parent[rows, kept]).reshape(B * K)

    reached = jnp.where(rule.exponent > 0, rule.until, made) if plan.early_stopping == "never" else made
    best = score(log_probs[:, 0], reached)
    full = scores[:, -1] > -jnp.inf
    enough = full if plan.early_stopping is True else full & (scores[:, -1] >= best)
    return State(
        made=made,
        live=candidates[rows, kept],
        log_probs=log_probs,
        ended=merge(s.ended, candidates),
        ended_scores=scores,
        ended_log_probs=merge(s.ended_log_probs, total),
        ended_lengths=jnp.where(scores > -jnp.inf, merge(s.ended_lengths, jnp.full(total.shape, made)), 0),
        done=s.done | enough | (log_probs[:, 0] == -jnp.inf),
        finite=s.finite & jnp.all(jnp.isfinite(logits)),
        cache=jax.tree.map(lambda leaf: leaf[flat], cache),
    )


def _next_logits(decoder: Decoder, lengths: Array, size: int, s: State) -> tuple[Array, KVCache | None]:
    """Logits (B · K, V) of the token after each unfinished hypothesis."""
    B, K, L = s.live.shape
    last = jnp.repeat(lengths + s.made - 1, K)
    flat = s.live.reshape(B * K, L)
    if s.cache is None:
        return decoder.whole(flat[:, :size])[jnp.arange(B * K), last], None
    logits, cache = decoder.step(jnp.take_along_axis(flat, last[:, None], axis=1), s.cache._replace(lengths=last))
    return logits[:, 0], cache


def _repeats(live: Array, lengths: Array, n: int, vocab_size: int) -> Array:
    """Tokens (B, K, V) that would complete a sequence of n tokens that occurs already in the first lengths[b] of live (B, K, L)."""
    B, K, L = live.shape
    if n > L:
        return jnp.zeros((B, K, vocab_size), bool)
    b, k = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
    starts = jnp.arange(L - n + 1)
    same = jnp.broadcast_to(starts + n <= lengths[:, None, None], (B, K, L - n + 1))
    for i in range(n - 1):
        tail = live[b, k, jnp.maximum(lengths - (n - 1) + i, 0)[:, None, None]]
        same &= live[..., i : i + L - n + 1] == tail
    return jnp.zeros((B, K, vocab_size), bool).at[b, k, live[..., n - 1 :]].max(same)
