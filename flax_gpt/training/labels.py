"""Labelled texts -> token ids and classes -> padded batches, and the loss of a classifier over them."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from flax_gpt.errors import require
from flax_gpt.training.loss import cross_entropy, token_losses
from flax_gpt.training.table import Table, pad_rows
from flax_gpt.training.tokenizer import CharTokenizer, check_text


class LabelTokenizer:
    """Characters of the texts, and the sorted labels: the class of a label is its place among them."""

    def __init__(self, text: CharTokenizer, labels: Sequence[str]):
        require(list(labels) == sorted(set(labels)) and len(labels) > 0, "labels", labels, "must be distinct and sorted")
        self.text, self.labels = text, tuple(labels)
        self.vocab_size = text.vocab_size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LabelTokenizer) and (self.text, self.labels) == (other.text, other.labels)

    def __hash__(self) -> int:
        return hash((self.text, self.labels))

    def encode(self, text: str, argument: str = "text") -> np.ndarray:
        """Ids (len(text),) int32. Raises InputError, naming `argument`, for a character that has no id, for an empty text, and for no string."""
        check_text(argument, text, smallest=1)
        return self.text.encode(text, argument).astype(np.int32)

    def to_json(self) -> str:
        values = {"format": 1, "kind": "labelled characters", "characters": self.text.characters, "labels": self.labels}
        return json.dumps(values, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError or LookupError for anything that `to_json` did not write."""
        values = json.loads(text)
        if (values["format"], values["kind"]) != (1, "labelled characters"):
            raise ValueError(f"it is of the kind {values['kind']!r}, format {values['format']}")
        return cls(CharTokenizer(values["characters"]), values["labels"])


class LabelBatch(NamedTuple):
    """Texts of one step. From its length on a row is padding; a row that is no text has the length 0."""

    tokens: np.ndarray
    """(B, T) int32."""
    lengths: np.ndarray
    """(B,) int32."""
    labels: np.ndarray
    """(B,) int32: classes."""
    weights: np.ndarray
    """(B,) float32: 1 for a text, by length."""


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Rows as ids and classes."""

    texts: list[np.ndarray]
    classes: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, chosen: Sequence[int], batch_size: int, max_len: int) -> LabelBatch:
        """The chosen texts, padded."""
        tokens, lengths = pad_rows([self.texts[i] for i in chosen], batch_size, max_len)
        labels = np.zeros(batch_size, np.int32)
        labels[: len(chosen)] = self.classes[np.asarray(chosen, np.int64)]
        return LabelBatch(tokens, lengths, labels, (lengths > 0).astype(np.float32))


def encode_labelled(table: Table, tokenizer: LabelTokenizer, max_len: int) -> Labelled:
    """Raises InputError, naming the line, for a character or a label that the tokenizer lacks and for a text longer than max_len."""
    known, classes = set(tokenizer.text.characters), {label: i for i, label in enumerate(tokenizer.labels)}
    for i, (text, label) in enumerate(table.rows):
        place = table.place(i)
        strange = next((c for c in text if c not in known), None)
        require(strange is None, "data", place, f"holds {strange!r}, which is not among the {len(known)} characters of the vocabulary")
        require(label in classes, "data", place, f"has the label {label!r}, which is none of {', '.join(tokenizer.labels)}")
        require(len(text) <= max_len, "data", place, f"has {len(text)} tokens, more than max_len = {max_len}")
    return Labelled([tokenizer.encode(text) for text, _ in table.rows], np.array([classes[label] for _, label in table.rows], np.int32))


def label_loss(model: Any, batch: LabelBatch, label_smoothing: float = 0.0) -> jax.Array:
    """Mean cross-entropy of the classes, over real texts."""
    logits, _ = model(batch.tokens, lengths=batch.lengths)
    return cross_entropy(logits, batch.labels, batch.weights, label_smoothing=label_smoothing)


def label_totals(model: Any, batch: LabelBatch) -> dict[str, jax.Array]:
    """The summed loss of the real texts, how many the model labels right, and how many they are."""
    logits, _ = model(batch.tokens, lengths=batch.lengths)
    right = (jnp.argmax(logits, axis=-1) == batch.labels) * batch.weights
    losses = token_losses(logits, batch.labels) * batch.weights
    return {"loss": jnp.sum(losses), "accuracy": jnp.sum(right), "count": jnp.sum(batch.weights)}
