"""Where compiled programs are kept from one start to the next."""

import contextlib
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import jax

CHECKED = "checked"
"""A file of the cache folder, as old as the last look at its entries."""


def use_compilation_cache() -> None:
    """Keeps compiled programs, small ones too, in the user's cache folder; what JAX_… variables or jax's own configuration say comes first."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None:
        if sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        elif sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "flax-gpt" / "jax"
        drop_torn(folder)
        config.update("jax_compilation_cache_dir", str(folder))
    # A start is made of many compilations below jax's threshold of a second.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def drop_torn(folder: Path) -> None:
    """Removes entries that were written since the last look and are not whole.

    jax writes them in place and never again: one that a killed process left unfinished would be warned of at every start. Another process that is
    writing one at this moment loses it, and compiles it once more later. Nothing here may keep a run from starting.
    """
    with contextlib.suppress(OSError):
        stamp = folder / CHECKED
        since = stamp.stat().st_mtime if stamp.exists() else 0.0
        for path in folder.glob("*-cache"):
            if path.stat().st_mtime >= since and not _whole(path.read_bytes()):
                path.unlink(missing_ok=True)
        if folder.is_dir():
            stamp.touch()


def _whole(entry: bytes) -> bool:
    """Whether a zlib stream has its end; of zstd, which jax uses where it is installed, whether there is anything."""
    if not entry.startswith(b"\x78"):
        return len(entry) > 0
    stream = zlib.decompressobj()
    try:
        stream.decompress(entry)
    except zlib.error:
        return False
    return stream.eof
