"""Greedy and beam search the plain way: each row alone, lists of hypotheses, everything computed anew for each token."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flax_gpt.config import BeamConfig, EncoderDecoderConfig
from flax_gpt.errors import RunError, is_integer, require
from torch_ref.generation.prompts import check_model, read_prompts


class Hypotheses(NamedTuple):
    """The n best of each row, best first. Where there are fewer, the rest have length 0 and the score -inf."""

    tokens: Tensor
    """(B, n, max_new_tokens) int64: the new tokens, eos included, then padding."""
    lengths: Tensor
    """(B, n) int64: how many are no padding."""
    scores: Tensor
    """(B, n): log P / length ** length_exponent, in float32 or better."""
    log_probs: Tensor
    """(B, n): log P, the sum over the new tokens."""


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A prompt and the new tokens after it."""

    tokens: list[int]
    log_prob: Tensor
    score: Tensor


@torch.no_grad()
def beam_search(
    model: nn.Module,
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
) -> Hypotheses:
    """The most probable continuations that a search with `beams` unfinished hypotheses finds; beams = 1 takes the likeliest token each time.

    Arguments, results and errors are those of `flax_gpt.generation.beam.beam_search`. The model's own mode stays as it is.
    """
    check_model(model, translates=True)
    config: Any = model.config
    translates = isinstance(config, EncoderDecoderConfig)
    plan = BeamConfig(beams, n_best, length_exponent, early_stopping, no_repeat_ngram)
    rows = read_prompts(tokens, lengths, config.source_vocab if translates else config.vocab_size)
    require(beams * config.vocab_size < 2**31, "beams", beams, f"times vocab_size = {config.vocab_size} must be below 2**31, a step's candidates")
    until = check_search(config, max(map(len, rows)), max_new_tokens, eos)
    eos = config.eos if translates else eos
    found = []
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for b, row in enumerate(rows):
            prompt = [config.bos] if translates else row.tolist()
            follow = _translation(model, row, until) if translates else _continuation(model, len(prompt) + until - 1)
            found.append(_search(follow, prompt, until, plan, eos))
            if not found[-1]:
                raise RunError(f"row {b} has no continuation of {until} tokens without a repeated sequence of no_repeat_ngram = {no_repeat_ngram}")
    finally:
        for module, training in modes.items():
            module.training = training
    fill = config.pad if translates else eos or 0
    out = torch.full((len(rows), n_best, until), fill)
    counts = torch.zeros((len(rows), n_best), dtype=torch.int64)
    scores = torch.full((len(rows), n_best), -torch.inf, dtype=found[0][0].score.dtype)
    log_probs = scores.clone()
    for b, (row, hypotheses) in enumerate(zip(rows, found, strict=True)):
        for n, hypothesis in enumerate(hypotheses[:n_best]):
            new = hypothesis.tokens[1 if translates else len(row) :]
            out[b, n, : len(new)], counts[b, n] = torch.tensor(new), len(new)
            scores[b, n], log_probs[b, n] = hypothesis.score, hypothesis.log_prob
    return Hypotheses(out, counts, scores, log_probs)


Follow = Callable[[list[list[int]]], Tensor]
"""Hypotheses of one length → log probabilities (n, V) of the token after each, in float32 or better."""


def _search(follow: Follow, prompt: list[int], until: int, plan: BeamConfig, eos: int | None) -> list[Hypothesis]:
    """The finished hypotheses of one row, best first, `beams` at most."""
    live = [(prompt, torch.tensor(0.0))]
    ended: list[Hypothesis] = []
    for made in range(1, until + 1):
        new = follow([tokens for tokens, _ in live])
        for (tokens, _), row in zip(live, new, strict=True):
            row[sorted(_repeats(tokens, plan.no_repeat_ngram))] = -torch.inf
        total = torch.stack([log_prob.to(new) for _, log_prob in live])[:, None] + new
        log_probs, order = torch.sort(total.flatten(), descending=True, stable=True)
        live_next = []
        for rank in range(min(2 * plan.beams, len(order))):
            log_prob, (parent, token) = log_probs[rank], divmod(int(order[rank]), new.shape[1])
            if log_prob == -torch.inf:
                break
            tokens = [*live[parent][0], token]
            if rank < plan.beams and (token == eos or made == until):
                ended.append(Hypothesis(tokens, log_prob, _score(log_prob, made, plan)))
            if token != eos:
                live_next.append((tokens, log_prob))
        ended = sorted(ended, key=lambda hypothesis: -hypothesis.score)[: plan.beams]
        live = live_next[: plan.beams]
        if not live or _enough(ended, live[0][1], made, until, plan):
            break
    return ended


def _enough(ended: list[Hypothesis], best: Tensor, made: int, until: int, plan: BeamConfig) -> bool:
    """Whether the search ends, though the log P of its best unfinished hypothesis is `best`."""
    if len(ended) < plan.beams:
        return False
    if plan.early_stopping is True or plan.beams == 1:
        return True
    length = until if plan.early_stopping == "never" and plan.length_exponent > 0 else made
    return bool(ended[-1].score >= _score(best, length, plan))


def _score(log_prob: Tensor, length: int, plan: BeamConfig) -> Tensor:
    return log_prob / torch.tensor(length, dtype=log_prob.dtype) ** plan.length_exponent


def _repeats(tokens: list[int], n: int) -> set[int]:
    """Tokens that would complete a sequence of n tokens that occurs already."""
    if n == 0 or len(tokens) < n:
        return set()
    tail = tokens[len(tokens) - (n - 1) :]
    return {tokens[i + n - 1] for i in range(len(tokens) - n + 1) if tokens[i : i + n - 1] == tail}


def _translation(model: Any, source: Tensor, until: int) -> Follow:
    def follow(hypotheses: list[list[int]]) -> Tensor:
        n, length = len(hypotheses), len(hypotheses[0])
        target = torch.tensor([tokens + [model.config.pad] * (until - length) for tokens in hypotheses])
        # The length that a dynamic RoPE scaling goes by is that of the longest hypothesis; what is not written yet lies behind the causal mask.
        logits, _ = model(source.expand(n, -1), target, target_lengths=torch.full((n,), until))
        return _log_softmax(logits[:, length - 1])

    return follow


def _continuation(model: Any, span: int) -> Follow:
    return lambda hypotheses: _log_softmax(model(torch.tensor(hypotheses), span=span)[0][:, -1])


def _log_softmax(logits: Tensor) -> Tensor:
    if not torch.isfinite(logits).all():
        raise RunError("the logits are not finite: the weights are damaged or the dtype overflows")
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


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
