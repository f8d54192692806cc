"""What a run leaves on disk, written so that a kill at any moment loses nothing that was whole, and read so that damage is noticed.

orbax restores a file with a flipped bit without a word, so every checkpoint carries the SHA-256 of each of its files and every restore verifies them.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from flax_gpt.errors import InputError, require

FORMAT = 1
DIGESTS = "digests.json"
_ARRAYS = "arrays"
_TEMPORARY = ".tmp"
_OLD = ".old"
_STEP = re.compile(r"0|[1-9][0-9]*")
_LEFTOVER = re.compile(rf"({_STEP.pattern})({re.escape(_OLD)})?{re.escape(_TEMPORARY)}")


class Damaged(Exception):
    """Something on disk is not what was written."""


# Files


def write_file(path: Path, content: bytes) -> None:
    """Writes under a temporary name, flushes to the disk and renames: readers see the old content or the new one, whole."""
    temporary = path.with_name(path.name + _TEMPORARY)
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def seal(values: Mapping[str, Any]) -> bytes:
    """JSON that ends with its own SHA-256."""
    digest = hashlib.sha256(_json(values)).hexdigest()
    return _json({**values, "sha256": digest})


def unseal(content: bytes) -> dict[str, Any]:
    """The values of `seal`. Raises Damaged when a single bit differs from what was written."""
    try:
        values = json.loads(content.decode("utf-8"))
        if not isinstance(values, dict) or _json(values) != content:
            raise ValueError("its layout is not the one that was written")
        digest = values.pop("sha256", None)
    except ValueError as error:
        raise Damaged(str(error)) from error
    if digest != hashlib.sha256(_json(values)).hexdigest():
        raise Damaged("its SHA-256 differs")
    return values


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, ensure_ascii=False, indent=1) + "\n").encode("utf-8")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Holds `folder`/lock, which names this process. Raises InputError while another living process holds it; a dead one's lock is free."""
    with open(folder / "lock", "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().decode("ascii", "replace").strip() or "unknown"
            raise InputError("out", str(folder), f"is being written by process {owner}") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def unfinished(folder: Path) -> bool:
    """Whether `folder`, which has no run.json, holds nothing but what a run leaves that was killed before it wrote one."""
    names = {path.name for path in folder.iterdir()}
    if not names:
        return True
    known = {"lock", "tokenizer.json", f"tokenizer.json{_TEMPORARY}", f"run.json{_TEMPORARY}"}
    if "lock" not in names or names - known or any(path.is_symlink() or not path.is_file() for path in folder.iterdir()):
        return False
    return re.fullmatch(rb"([0-9]+\n)?", (folder / "lock").read_bytes()) is not None


# Checkpoints


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose digests agreed when it was read."""

    path: Path
    step: int
    """Completed updates."""
    arrays: dict[str, tuple[tuple[int, ...], str]]
    """{name: (shape, dtype)} of what it holds."""
    notes: dict[str, Any]
    """What the caller of `save` wrote beside the arrays."""


def save(folder: Path, step: int, arrays: Mapping[str, jax.Array], notes: Mapping[str, Any]) -> None:
    """Writes checkpoints/<step>: the arrays through orbax, then digests.json, everything flushed to the disk, then the rename that makes it count.

    A checkpoint of that name can only be a damaged one, which this replaces.
    """
    target = folder / "checkpoints" / str(step)
    temporary = target.with_name(target.name + _TEMPORARY)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((temporary / _ARRAYS).absolute(), args=ocp.args.PyTreeSave(dict(arrays)))
    values = {
        "format": FORMAT,
        "step": step,
        "notes": dict(notes),
        "arrays": {name: [list(array.shape), str(array.dtype)] for name, array in arrays.items()},
        "files": {path.relative_to(temporary).as_posix(): [path.stat().st_size, _sha256(path)] for path in _files(temporary)},
    }
    for path in _files(temporary):
        sync_file(path)
    write_file(temporary / DIGESTS, seal(values))
    for path in [*(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
        _sync_folder(path)
    if os.path.lexists(target):
        _discard(target)
    os.rename(temporary, target)
    for path in (target.parent, folder):
        _sync_folder(path)


def verify(path: Path) -> Checkpoint:
    """Compares every file with digests.json. Raises Damaged, naming the first file that is missing, strange, of another size or content."""
    try:
        values = unseal((path / DIGESTS).read_bytes())
    except (OSError, Damaged) as error:
        raise Damaged(f"{DIGESTS}: {error}") from error
    if values["format"] != FORMAT:
        raise Damaged(f"{DIGESTS}: its format is {values['format']}, this version reads {FORMAT}")
    if str(values["step"]) != path.name:
        raise Damaged(f"it is the checkpoint of step {values['step']}")
    present = {file.relative_to(path).as_posix() for file in _files(path)} - {DIGESTS}
    for name in sorted(present ^ set(values["files"])):
        raise Damaged(f"{name}: {'is not of this checkpoint' if name in present else 'is missing'}")
    for name, (size, digest) in values["files"].items():
        try:
            actual = (path / name).stat().st_size
            if actual != size:
                raise Damaged(f"{name}: has {actual} bytes instead of {size}")
            if _sha256(path / name) != digest:
                raise Damaged(f"{name}: its SHA-256 differs")
        except OSError as error:
            raise Damaged(f"{name}: {error}") from error
    arrays = {name: (tuple(shape), dtype) for name, (shape, dtype) in values["arrays"].items()}
    return Checkpoint(path, values["step"], arrays, values["notes"])


def restore(checkpoint: Checkpoint, target: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays that `target` ({name: anything with shape and dtype}) names, which may be some of the checkpoint's.

    orbax would cast to the target's dtype in silence: a name that is missing, or of another shape or dtype, raises InputError with all of them.
    """
    problems = []
    for name, wanted in target.items():
        shape, dtype = checkpoint.arrays.get(name, (None, None))
        if shape is None:
            problems.append(f"{name} is missing")
        elif (shape, dtype) != (tuple(wanted.shape), str(wanted.dtype)):
            problems.append(f"{name} is {dtype}{list(shape)} instead of {wanted.dtype}{list(wanted.shape)}")
    require(not problems, "checkpoint", str(checkpoint.path), "; ".join(problems))
    item = {name: jax.ShapeDtypeStruct(tuple(wanted.shape), wanted.dtype) for name, wanted in target.items()}
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in item}
    with ocp.PyTreeCheckpointer() as checkpointer:
        args = ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True)
        return checkpointer.restore((checkpoint.path / _ARRAYS).absolute(), args=args)


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints that have their final name, whole or not, oldest first; files, links and names such as 06 are none."""
    return sorted(int(path.name) for path in _folders(folder / "checkpoints", _STEP))


def _folders(parent: Path, name: re.Pattern[str]) -> list[Path]:
    if not parent.is_dir():
        return []
    return [path for path in parent.iterdir() if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def newest_whole(folder: Path, argument: str = "out") -> Checkpoint | None:
    """The newest checkpoint that verifies, with a warning for each newer one that does not; None when there is none of either kind.

    Raises InputError, naming `argument`, when there are checkpoints and none is whole.
    """
    found = steps(folder)
    for step in reversed(found):
        path = folder / "checkpoints" / str(step)
        try:
            return verify(path)
        except Damaged as damage:
            if not path.exists():  # a writer at work has dropped it for a newer one
                return newest_whole(folder, argument)
            warnings.warn(f"checkpoint {path} is damaged and passed over: {damage}", stacklevel=2)
    require(not found, argument, str(folder), f"holds no whole checkpoint: those of the steps {', '.join(map(str, found))} are damaged")
    return None


def prune(folder: Path, keep: Sequence[int]) -> None:
    """Removes the checkpoints whose step is not in `keep`, and the folders of checkpoints/ that a killed `save` or `prune` left half-made."""
    for step in steps(folder):
        if step not in keep:
            _discard(folder / "checkpoints" / str(step))
    for path in _folders(folder / "checkpoints", _LEFTOVER):
        shutil.rmtree(path)


def _discard(path: Path) -> None:
    # Renamed first: a half-removed folder must not pass for a damaged checkpoint.
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    away = path.with_name(f"{path.name}{_OLD}{_TEMPORARY}")
    shutil.rmtree(away, ignore_errors=True)
    os.rename(path, away)
    shutil.rmtree(away)


# Metrics


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Adds one JSON object as a line. It outlives this process at once, and a power cut from `sync_file` on."""
    with open(path, "ab") as file:
        file.write((json.dumps(values) + "\n").encode())


def sync_file(path: Path) -> None:
    """Flushes a file to the disk, if there is one."""
    if path.exists():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are objects with a step."""
    return [values for _, values in _lines(path) if values is not None]


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Every line as it stands, with its values; None for one that is no object with a step."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    if lines and not lines[-1]:
        lines.pop()
    return [(line, _values(line)) for line in lines]


def _values(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and type(values.get("step")) is int else None


def cut_lines(path: Path, step: int) -> None:
    """Drops what came after `step` completed updates, and a torn last line. Warns of any other line that cannot be read, and leaves it as it is."""
    kept, beyond, lines = [], False, _lines(path)
    for number, (line, values) in enumerate(lines, start=1):
        if values is not None:
            beyond = values["step"] > step
        elif number == len(lines):
            continue
        elif not beyond:
            warnings.warn(f"{path}, line {number} is no JSON object with a step; it is left as it is", stacklevel=2)
        if not beyond:
            kept.append(line + b"\n")
    write_file(path, b"".join(kept))
