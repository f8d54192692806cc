"""A tokenizer of characters: the sorted set of the characters of a text, one id each."""

import json
from pathlib import Path
from typing import Any, Self

import numpy as np

from flax_gpt.errors import InputError, describe, require

FORMAT = 1
CODE_POINTS = 0x110000


def smallest_unsigned(count: int) -> np.dtype:
    """The smallest unsigned dtype that holds the ids 0 … count - 1."""
    return np.dtype(np.min_scalar_type(max(count - 1, 0)))


def code_points(text: str) -> np.ndarray:
    """The Unicode code points of `text`, (len(text),) uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def check_text(argument: str, text: object, smallest: int = 0) -> None:
    """Raises InputError, naming `argument`, for what is no string and for one of fewer than `smallest` characters, 0 or 1."""
    shown = text if len(repr(text)) <= 40 else describe(text)
    require(isinstance(text, str), argument, shown, f"must be a string, and is of the type {type(text).__name__}")
    require(bool(text) or smallest == 0, argument, text, "must hold at least one character")


class CharTokenizer:
    """Ids 0 … V - 1 for the characters of `characters`, which must be distinct and sorted by code point.

    A character is a Unicode code point; nothing is normalised, so that decode(encode(text)) == text for every text.
    """

    def __init__(self, characters: str):
        check_text("characters", characters, smallest=1)
        require(list(characters) == sorted(set(characters)), "characters", characters, "must be distinct and sorted by code point")
        self.characters = characters
        self.vocab_size = len(characters)
        self.dtype = smallest_unsigned(self.vocab_size)
        self._points = code_points(characters)
        self._ids = np.full(CODE_POINTS, -1, np.int32)
        self._ids[self._points] = np.arange(self.vocab_size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CharTokenizer) and self.characters == other.characters

    def __hash__(self) -> int:
        return hash(self.characters)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The tokenizer of the characters that occur in `text`. Raises InputError for an empty one and for what is no string."""
        check_text("text", text, smallest=1)
        return cls("".join(sorted(set(text))))

    def encode(self, text: str, argument: str = "text") -> np.ndarray:
        """Ids (len(text),) in the smallest unsigned dtype. Raises InputError, naming `argument`, for a character without an id and for no string."""
        check_text(argument, text)
        ids = self._ids[code_points(text)]
        if len(ids) and ids.min() < 0:
            place = int(np.argmax(ids < 0))
            raise InputError(argument, text[place], f"character {place + 1} is not among the {self.vocab_size} characters that the vocabulary holds")
        return ids.astype(self.dtype)

    def decode(self, ids: Any) -> str:
        """The text of ids (T,), in any integer dtype. Raises InputError for an id outside the vocabulary."""
        ids = np.asarray(ids)
        if ids.size == 0:
            return ""
        require(ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer), "ids", f"{ids.dtype}{list(ids.shape)}", "must be a list of integers")
        for value in (int(ids.min()), int(ids.max())):
            require(0 <= value < self.vocab_size, "ids", value, f"must lie in [0, {self.vocab_size}), the vocabulary")
        return self._points[ids].tobytes().decode("utf-32-le", "surrogatepass")

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "kind": "characters", "characters": self.characters}, ensure_ascii=False, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes a JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8", newline="")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads what `save` wrote. Raises InputError for anything else."""
        try:
            values = json.loads(Path(path).read_bytes().decode("utf-8"))
            known = values["format"] == FORMAT and values["kind"] == "characters"
            characters = values["characters"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InputError("tokenizer", str(path), f"cannot be read as a tokenizer: {error}") from error
        require(known and isinstance(characters, str), "tokenizer", str(path), f"must be a character tokenizer of format {FORMAT}")
        return cls(characters)
