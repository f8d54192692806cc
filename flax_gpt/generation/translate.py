"""Translations of texts by a run's encoder-decoder."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flax_gpt.errors import require
from flax_gpt.generation.beam import beam_search
from flax_gpt.generation.prompts import check_translator


class Translation(NamedTuple):
    """A hypothesis as text."""

    text: str
    score: float
    """log P / length ** length_exponent."""


def translate(run: Any, sources: Sequence[str], max_new_tokens: int | None = None, **options: Any) -> list[list[Translation]]:
    """The translations of each source, best first, as many as n_best; `options` are those of `beam_search`.

    `run` has a `model` and a `tokenizer` of pairs. Raises InputError for a run of another kind, for no list of sources or an empty one, for a
    source that is empty, no string, longer than max_len or has unknown characters, and for what `beam_search` refuses.
    """
    check_translator(run)
    listed = isinstance(sources, Sequence) and not isinstance(sources, str | bytes)
    require(listed, "sources", sources, "must be a list of strings")
    require(len(sources) > 0, "sources", list(sources), "must hold at least one text")
    rows = [run.tokenizer.encode_source(text) for text in sources]
    limit = run.model.config.max_len
    for row in rows:
        require(len(row) <= limit, "source", f"{len(row)} tokens", f"must be at most max_len = {limit} tokens long")
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = row
    found = beam_search(run.model, tokens, max_new_tokens, lengths=lengths, **options)
    return [
        [
            Translation(run.tokenizer.decode_target(ids[:n]), float(score))
            for ids, n, score in zip(found.tokens[b], found.lengths[b], found.scores[b], strict=True)
            if n > 0
        ]
        for b in range(len(rows))
    ]
