"""Tab-separated files of two columns -> rows, a held-out part that shares nothing with the rest, and an order of batches."""

import dataclasses
import hashlib
import importlib.resources
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from flax_gpt.errors import InputError, describe, require
from flax_gpt.generation.prompts import bucket

SHIPPED = "shipped:"
"""Begins the name of a file that the package ships."""


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of a tab-separated file."""

    rows: tuple[tuple[str, str], ...]
    """(what stands before the tab, what stands after it)."""
    lines: tuple[int, ...]
    """The number of each row's line, from 1."""
    source: str
    """The file, or shipped:NAME."""
    digest: str
    """SHA-256 of the file."""

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, row: int) -> str:
        return f"{self.source}, line {self.lines[row]}"

    def select(self, chosen: Sequence[int]) -> "Table":
        return dataclasses.replace(self, rows=tuple(self.rows[i] for i in chosen), lines=tuple(self.lines[i] for i in chosen))


def read_table(data: str | Path, *, names: tuple[str, str] = ("source", "target")) -> Table:
    """Reads a UTF-8 file of lines SOURCE TAB TARGET; `data` is a path, or shipped:NAME for a file of the package.

    A byte order mark is dropped, line ends are LF or CRLF. Raises InputError, naming the file and the line, for a line without a tab or with several,
    an empty side, a byte that is not UTF-8, a NUL, and for what is missing, empty or no regular file.
    """
    require(isinstance(data, str | os.PathLike), "data", describe(data), "must be a path, or shipped:NAME")
    shipped = isinstance(data, str) and data.startswith(SHIPPED)
    name = str(data)
    try:
        if shipped:
            content = (importlib.resources.files("flax_gpt.corpus") / name.removeprefix(SHIPPED)).read_bytes()
        else:
            name, path = os.path.abspath(data), Path(data)
            # A pipe would be waited for.
            require(path.is_file() or path.is_dir() or not path.exists(), "data", str(data), "is not a regular file")
            content = path.read_bytes()
    except OSError as error:
        raise InputError("data", str(data), f"cannot be read: {error.strerror}") from error
    rows, lines = [], []
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        place = f"{data}, line {number}"
        try:
            line = raw.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError("data", place, f"is not UTF-8: byte 0x{raw[error.start]:02x} at byte {error.start} of the line") from error
        # UTF-16 of plain letters is UTF-8 too, every other character a NUL.
        require("\0" not in line, "data", place, f"holds a NUL at byte {raw.find(0)} of the line, as UTF-16 does: it must be UTF-8 text")
        if number > content.count(b"\n") and not line:
            break
        tabs = line.count("\t")
        require(tabs == 1, "data", place, f"must be {names[0]} TAB {names[1]}, and has {f'{tabs} tabs' if tabs else 'no tab'}")
        for side, text in zip(names, line.split("\t"), strict=True):
            require(len(text) > 0, "data", place, f"has an empty {side}")
        rows.append(tuple(line.split("\t")))
        lines.append(number)
    require(bool(rows), "data", str(data), "holds no line")
    return Table(tuple(rows), tuple(lines), name, hashlib.sha256(content).hexdigest())  # type: ignore[arg-type]


def split_rows(table: Table, held_out: float, *, shared: Sequence[int] = (0, 1)) -> tuple[Table, Table]:
    """(training rows, held-out rows) such that no text of a held-out row occurs in training on the same side.

    Rows that share a text in one of the columns `shared` form a group, and so do rows that are linked by others; groups come in the order of the
    SHA-256 of their first text, which neither the seed nor the order of the file changes, and are held out as long as they fit in
    floor(held_out · rows). Raises InputError when held_out is above 0 and one side would be left empty.
    """
    group = list(range(len(table)))

    def root(i: int) -> int:
        while group[i] != i:
            group[i] = group[group[i]]
            i = group[i]
        return i

    for column in shared:
        first: dict[str, int] = {}
        for i, row in enumerate(table.rows):
            group[root(i)] = root(first.setdefault(row[column], i))
    members: dict[int, list[int]] = {}
    for i in range(len(table)):
        members.setdefault(root(i), []).append(i)

    def key(rows: list[int]) -> bytes:
        return hashlib.sha256(min(table.rows[i][shared[0]] for i in rows).encode("utf-8")).digest()

    room, away = int(held_out * len(table)), set[int]()
    for rows in sorted(members.values(), key=key):
        if len(away) + len(rows) <= room:
            away.update(rows)
    train = [i for i in range(len(table)) if i not in away]
    if held_out > 0:
        limit = f"leaves {len(train)} rows to train on and {len(away)} to evaluate, of {len(table)} in {len(members)} groups that share a text"
        require(bool(train and away), "held_out", held_out, limit)
    return table.select(train), table.select(sorted(away))


def pad_rows(rows: Sequence[np.ndarray], batch_size: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as an array (batch_size, bucket of the longest) int32 filled up with 0, and their lengths."""
    lengths = np.zeros(batch_size, np.int32)
    lengths[: len(rows)] = [len(row) for row in rows]
    out = np.zeros((batch_size, bucket(max(lengths.max(), 1), limit)), np.int32)
    for line, row in zip(out, rows, strict=False):
        line[: len(row)] = row
    return out, lengths


class Shuffled:
    """`batches[step]` is the batch of that step, a pure function of (rows, batch_size, seed, step).

    Every epoch is a permutation of all rows (grain's index shuffle, as for windows); the last batch of an epoch is filled up with rows of length 0.
    """

    def __init__(self, count: int, batch: Callable[[Sequence[int]], Any], *, batch_size: int, seed: int):
        self.count, self._batch = count, batch
        order = grain.MapDataset.range(count).shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
        self._rows = order.batch(batch_size, drop_remainder=False, batch_fn=np.asarray)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._rows)

    def __getitem__(self, step: int) -> Any:
        return self._batch(self._rows[step])


def in_order(count: int, batch_size: int) -> Iterator[Sequence[int]]:
    """Every row once, batch_size at a time."""
    for start in range(0, count, batch_size):
        yield range(start, min(start + batch_size, count))
