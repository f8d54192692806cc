"""Pairs of texts -> token ids -> padded batches, and the loss of a translation over them."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from flax_gpt.config import EncoderDecoderConfig
from flax_gpt.errors import require
from flax_gpt.training.loss import cross_entropy, token_losses
from flax_gpt.training.table import Table, pad_rows
from flax_gpt.training.tokenizer import CharTokenizer, check_text

SPECIAL = 3
"""Ids below the characters': pad, bos and eos, as EncoderDecoderConfig has them."""
BOS, EOS = EncoderDecoderConfig.bos, EncoderDecoderConfig.eos


class PairTokenizer:
    """A CharTokenizer a side; the ids of both start at SPECIAL."""

    def __init__(self, source: CharTokenizer, target: CharTokenizer):
        self.source, self.target = source, target
        self.source_vocab_size, self.vocab_size = source.vocab_size + SPECIAL, target.vocab_size + SPECIAL

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PairTokenizer) and (self.source, self.target) == (other.source, other.target)

    def __hash__(self) -> int:
        return hash((self.source, self.target))

    def encode_source(self, text: str, argument: str = "source") -> np.ndarray:
        """Ids (len(text),) int32. Raises InputError, naming `argument`, for a character that has no id, for an empty text, and for no string."""
        check_text(argument, text, smallest=1)
        return self.source.encode(text, argument).astype(np.int32) + SPECIAL

    def encode_target(self, text: str, argument: str = "target") -> np.ndarray:
        """Ids (len(text),) int32, without bos and eos. Raises InputError as `encode_source`."""
        check_text(argument, text, smallest=1)
        return self.target.encode(text, argument).astype(np.int32) + SPECIAL

    def decode_target(self, ids: Any) -> str:
        """The text of ids (T,) without their last eos; U+FFFD stands for pad, bos or eos anywhere else."""
        ids = np.asarray(ids)
        ids = ids[:-1] if len(ids) and ids[-1] == EOS else ids
        return "".join("\ufffd" if i < SPECIAL else self.target.characters[i - SPECIAL] for i in ids)

    def to_json(self) -> str:
        values = {"format": 1, "kind": "pairs of characters", "source": self.source.characters, "target": self.target.characters}
        return json.dumps(values, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError or LookupError for anything that `to_json` did not write."""
        values = json.loads(text)
        if (values["format"], values["kind"]) != (1, "pairs of characters"):
            raise ValueError(f"it is of the kind {values['kind']!r}, format {values['format']}")
        return cls(CharTokenizer(values["source"]), CharTokenizer(values["target"]))


class PairBatch(NamedTuple):
    """Pairs of one step. From its length on a row is padding; a row that is no pair has the lengths 0."""

    source: np.ndarray
    """(B, S) int32."""
    source_lengths: np.ndarray
    """(B,) int32."""
    target: np.ndarray
    """(B, T) int32: bos, then the target, which the decoder reads."""
    target_lengths: np.ndarray
    """(B,) int32, bos included."""
    labels: np.ndarray
    """(B, T) int32: the target, then eos: what follows each token of `target`."""
    weights: np.ndarray
    """(B, T) float32: 1 for a real label, by length."""


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Rows as ids."""

    sources: list[np.ndarray]
    targets: list[np.ndarray]
    """Without bos and eos."""

    def __len__(self) -> int:
        return len(self.sources)

    def batch(self, chosen: Sequence[int], batch_size: int, max_len: int) -> PairBatch:
        """The chosen pairs, padded."""
        source, source_lengths = pad_rows([self.sources[i] for i in chosen], batch_size, max_len)
        target, target_lengths = pad_rows([np.append(BOS, self.targets[i]) for i in chosen], batch_size, max_len)
        labels, _ = pad_rows([np.append(self.targets[i], EOS) for i in chosen], batch_size, max_len)
        weights = (np.arange(target.shape[1]) < target_lengths[:, None]).astype(np.float32)
        return PairBatch(source, source_lengths, target, target_lengths, labels, weights)


def encode_pairs(table: Table, tokenizer: PairTokenizer, max_len: int) -> Pairs:
    """Raises InputError, naming the line, for a character that the tokenizer lacks and for a side that does not fit in max_len."""
    sources, targets = [], []
    sides = [("source", set(tokenizer.source.characters)), ("target", set(tokenizer.target.characters))]
    for i, (source, target) in enumerate(table.rows):
        place = table.place(i)
        for (side, known), text in zip(sides, (source, target), strict=True):
            strange = next((c for c in text if c not in known), None)
            limit = f"holds {strange!r} in its {side}, which is not among the {len(known)} characters of the vocabulary"
            require(strange is None, "data", place, limit)
        require(len(source) <= max_len, "data", place, f"has a source of {len(source)} tokens, more than max_len = {max_len}")
        require(len(target) < max_len, "data", place, f"has a target of {len(target)} tokens, which with its end is more than max_len = {max_len}")
        sources.append(tokenizer.encode_source(source))
        targets.append(tokenizer.encode_target(target))
    return Pairs(sources, targets)


def pair_loss(model: Any, batch: PairBatch, label_smoothing: float = 0.0) -> jax.Array:
    """Mean cross-entropy of the labels under teacher forcing, over real labels."""
    logits, _ = model(batch.source, batch.target, source_lengths=batch.source_lengths, target_lengths=batch.target_lengths)
    return cross_entropy(logits, batch.labels, batch.weights, label_smoothing=label_smoothing)


def pair_totals(model: Any, batch: PairBatch) -> dict[str, jax.Array]:
    """The summed loss of the real labels, and how many they are."""
    logits, _ = model(batch.source, batch.target, source_lengths=batch.source_lengths, target_lengths=batch.target_lengths)
    return {"loss": jnp.sum(token_losses(logits, batch.labels) * batch.weights), "count": jnp.sum(batch.weights)}
