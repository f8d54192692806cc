"""What a figure depends on beside the code: hardware, commit, environment."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PREFIXES = ("XLA_", "JAX_", "OMP_", "MKL_", "KMP_", "MALLOC_", "TORCH", "PYTORCH_", "CUDA_", "LD_PRELOAD", "GLIBC_TUNABLES")
"""Of environment variables that change what is measured."""


def describe() -> dict[str, Any]:
    """date, commit, cpu, cpus, memory_bytes, system, load, environment."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "load": list(os.getloadavg()),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    }


def commit() -> str | None:
    """Of the source tree that runs, with + when it was changed since; None outside a repository."""
    folder = Path(__file__).resolve().parent
    git = lambda *arguments: subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout.strip()
    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu() -> str:
    """The processor's name and the vector extensions that decide its speed."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    known = set(fields.get("flags", "").split())
    extensions = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in known]
    model = f"family {fields.get('cpu family', '?')} model {fields.get('model', '?')}"
    return f"{fields.get('model name') or platform.processor() or platform.machine()} ({', '.join([model, *extensions])})"
