"""Text on disk -> one array of token ids -> windows, each a pure function of (seed, step)."""

import codecs
import contextlib
import dataclasses
import hashlib
import importlib.resources
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import grain
import numpy as np

from flax_gpt.errors import InputError, describe, require
from flax_gpt.training.tokenizer import CODE_POINTS, CharTokenizer, code_points, smallest_unsigned

OnBadFile = Literal["error", "skip"]
SHIPPED = "shipped"
EXCLUDED = ("site-packages", "dist-packages", "__pycache__")
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as token ids, and where it came from."""

    tokens: np.ndarray
    """Ids (n,) in the smallest unsigned dtype."""
    tokenizer: CharTokenizer
    """The vocabulary of the ids."""
    source: str
    """The file or folder, or 'shipped'."""
    digest: str
    """SHA-256 of the contents of the files used, in order, each after its length."""
    files: int
    """Files used, empty ones included."""
    skipped: tuple[str, ...]
    """Files left out, with the reason."""
    glob: str
    """The names that were read, where `source` is a folder."""
    on_bad_file: OnBadFile
    """What was done with files that are not UTF-8."""


def load_corpus(
    data: str | Path | None = None,
    *,
    glob: str = "*.txt",
    on_bad_file: OnBadFile = "error",
    exclude: Sequence[str] = EXCLUDED,
    tokenizer: CharTokenizer | None = None,
) -> Corpus:
    """Reads a UTF-8 file, the files of a folder whose names match `glob`, or, for None, the corpus that the package ships.

    Folders named in `exclude` and hidden ones are left out; files are sorted by path and put one after the other with nothing between.

    Read once, in pieces, whatever the platform's encoding and line ends are; a byte order mark is dropped. Memory: the token array, plus a copy while
    its dtype grows. Without `tokenizer` the vocabulary is the sorted set of the characters.

    Raises InputError for a path that is neither, a folder without a match, a text without characters, a character that `tokenizer` lacks, and, with
    on_bad_file 'error', a file that cannot be read, is not UTF-8 or holds a NUL (named with the byte's offset); 'skip' leaves such files out.
    """
    require(data is None or isinstance(data, str | os.PathLike), "data", describe(data), "must be a path, or None")
    require(on_bad_file in ("error", "skip"), "on_bad_file", on_bad_file, "must be 'error' or 'skip'")
    with contextlib.ExitStack() as stack:
        if data is None or data == SHIPPED:
            source = SHIPPED
            root = stack.enter_context(importlib.resources.as_file(importlib.resources.files("flax_gpt.corpus") / "shipped.txt"))
        else:
            source, root = os.path.abspath(data), Path(data)
        paths = _paths(root, str(data), glob, exclude)
        builder = _Builder(sum(os.path.getsize(path) for path in paths), tokenizer)
        digest, used, skipped = hashlib.sha256(), 0, []
        for path in paths:
            try:
                digest.update(builder.read(path))
                used += 1
            except _BadFile as bad:
                if on_bad_file == "error":
                    raise InputError("data", str(path), f"{bad}; on_bad_file = 'skip' leaves such files out") from bad
                skipped.append(f"{path}: {bad}")
    require(
        builder.size > 0, "data", str(data), "holds no text" + (f": {len(skipped)} of its files were skipped, e.g. {skipped[0]}" if skipped else "")
    )
    tokens, tokenizer = builder.finish()
    return Corpus(tokens, tokenizer, source, digest.hexdigest(), used, tuple(skipped), glob, on_bad_file)


def _paths(root: Path, given: str, glob: str, exclude: Sequence[str]) -> list[Path]:
    if root.is_file():
        return [root]
    require(root.is_dir(), "data", given, "is neither a file nor a folder")
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in exclude and not name.startswith(".")]
        relative = PurePosixPath(Path(folder).relative_to(root).as_posix())
        found += [relative / name for name in names if (relative / name).match(glob) and os.path.isfile(os.path.join(folder, name))]
    require(bool(found), "data", given, f"holds no file that matches glob = {glob!r}")
    return [root / path for path in sorted(found)]


class _BadFile(Exception):
    pass


class _Builder:
    """Appends files to one id array. Without a tokenizer, ids are given in order of appearance and put in code-point order at the end."""

    def __init__(self, size_hint: int, tokenizer: CharTokenizer | None):
        self.tokenizer, self.size = tokenizer, 0
        self.table = np.full(CODE_POINTS, -1, np.int32)
        self.points: list[int] = []
        if tokenizer is not None:
            self.points = code_points(tokenizer.characters).tolist()
            self.table[self.points] = np.arange(len(self.points))
        # A character takes at least one byte; pages that are never written cost nothing.
        self.tokens = np.empty(size_hint, smallest_unsigned(len(self.points)))

    def read(self, path: Path) -> bytes:
        """Appends the file and returns its length (8 bytes) and SHA-256. Raises _BadFile, having appended nothing."""
        size, known, digest, length = self.size, len(self.points), hashlib.sha256(), 0
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            with open(path, "rb", buffering=0) as file:
                while True:
                    chunk = file.read(_CHUNK)
                    if b"\0" in chunk:  # UTF-16 of plain letters is UTF-8 too, every other character a NUL
                        at = chunk.index(b"\0")
                        raise UnicodeDecodeError("utf-8", chunk, at, at + 1, "a NUL")
                    text = decoder.decode(chunk, final=not chunk)
                    digest.update(chunk)
                    self._append(text.removeprefix("\ufeff") if self.size == size else text, path)
                    length += len(chunk)
                    if not chunk:
                        return length.to_bytes(8, "little") + digest.digest()
        except (UnicodeDecodeError, OSError) as error:
            self.table[self.points[known:]] = -1
            del self.points[known:]
            self.size = size
            if isinstance(error, OSError):
                raise _BadFile(f"cannot be read: {error.strerror}") from error
            offset = length + len(chunk) - len(error.object) + error.start
            hint = ", a NUL, as UTF-16 has" if error.object[error.start] == 0 else ""
            raise _BadFile(f"is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset}{hint}") from error

    def _append(self, text: str, path: Path) -> None:
        points = code_points(text)
        ids = self.table[points]
        if len(ids) and ids.min() < 0:
            if self.tokenizer is not None:
                place = int(np.argmax(ids < 0))
                raise InputError("data", str(path), f"holds {text[place]!r}, which is not among the {len(self.points)} characters of the vocabulary")
            new = np.unique(points[ids < 0])
            self.table[new] = np.arange(len(self.points), len(self.points) + len(new))
            self.points += new.tolist()
            ids = self.table[points]
        end = self.size + len(ids)
        dtype = smallest_unsigned(len(self.points))
        if dtype.itemsize > self.tokens.itemsize or end > len(self.tokens):
            grown = np.empty(max(end, len(self.tokens)), dtype)
            grown[: self.size] = self.tokens[: self.size]
            self.tokens = grown
        self.tokens[self.size : end] = ids
        self.size = end

    def finish(self) -> tuple[np.ndarray, CharTokenizer]:
        tokens = self.tokens[: self.size]
        if self.tokenizer is not None:
            return tokens, self.tokenizer
        order = np.argsort(self.points)
        rank = np.empty(len(order), tokens.dtype)
        rank[order] = np.arange(len(order))
        for start in range(0, len(tokens), _CHUNK):
            piece = tokens[start : start + _CHUNK]
            piece[:] = rank[piece]
        return tokens, CharTokenizer("".join(chr(self.points[i]) for i in order))


def split(tokens: np.ndarray, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """(training part, held-out part): the last floor(held_out * n) of n tokens are held out; views, not copies."""
    cut = len(tokens) - int(held_out * len(tokens))
    return tokens[:cut], tokens[cut:]


class Batch(NamedTuple):
    """Windows of one step; padding has weight 0 and id 0."""

    tokens: np.ndarray
    """(B, T) int32."""
    targets: np.ndarray
    """(B, T) int32: the token that follows each token."""
    weights: np.ndarray
    """(B, T) float32: 1 for a real target."""


class Windows:
    """Training windows: `windows[step]` is the batch of that step, a pure function of (tokens, window, stride, batch_size, seed, step).

    Windows start at 0, stride, 2 * stride, … while a whole one fits. Every epoch is a permutation of all of them (grain's index shuffle, seeded by
    (seed, epoch), so nothing is stored). The last batch of an epoch is padded to `batch_size` rows with weight 0, so that shapes never change.
    """

    def __init__(self, tokens: np.ndarray, *, window: int, batch_size: int, seed: int, stride: int = 1):
        self.tokens, self.window, self.batch_size, self.stride = tokens, window, batch_size, stride
        size = len(tokens)
        require(size > window, "data", f"{size} tokens to train on", f"must hold more than window = {window} tokens: each needs the one after it")
        self.count = (size - window - 1) // stride + 1
        require(self.count < 2**32, "stride", stride, f"makes {self.count} windows; the order holds at most 2**32")
        order = grain.MapDataset.range(self.count).shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
        self._starts = order.batch(batch_size, drop_remainder=False, batch_fn=np.asarray)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._starts)

    def __getitem__(self, step: int) -> Batch:
        starts = self._starts[step] * self.stride
        rows = np.zeros((self.batch_size, self.window + 1), np.int32)
        rows[: len(starts)] = self.tokens[starts[:, None] + np.arange(self.window + 1)]
        weights = np.zeros((self.batch_size, self.window), np.float32)
        weights[: len(starts)] = 1
        return Batch(rows[:, :-1].copy(), rows[:, 1:].copy(), weights)


def evaluation_batches(tokens: np.ndarray, *, window: int, batch_size: int) -> Iterator[Batch]:
    """Every token but the first is a target once: non-overlapping windows in order; the last window and the last batch are padded with weight 0.

    Raises InputError for fewer than two tokens.
    """
    require(len(tokens) >= 2, "data", f"{len(tokens)} tokens to evaluate", "must hold at least 2 tokens")
    span = window * batch_size
    for start in range(0, len(tokens) - 1, span):
        piece = tokens[start : start + span + 1]
        real = len(piece) - 1
        inputs, targets, weights = np.zeros(span, np.int32), np.zeros(span, np.int32), np.zeros(span, np.float32)
        inputs[:real], targets[:real], weights[:real] = piece[:-1], piece[1:], 1
        shape = (batch_size, window)
        yield Batch(inputs.reshape(shape), targets.reshape(shape), weights.reshape(shape))
