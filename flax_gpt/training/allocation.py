"""What becomes of the memory that a step gives back."""

import ctypes
import sys

MMAP_MAX, TRIM_THRESHOLD = -4, -1
"""Parameters of mallopt, as glibc's malloc.h numbers them."""


def keep_memory() -> None:
    """On the processor, lets this process keep freed memory for the next step instead of giving it back to the system.

    XLA asks malloc for the temporary memory of every execution. glibc maps blocks of that size anew each time, and each page that is touched for the
    first time costs a fault, together up to a third of a training step (docs/performance.md). Blocks of a heap stay, but only the main thread's heap
    grows beyond 64 MiB, so executions are made to run in the thread that asks for them. For that to take effect jax must not have looked for its
    devices yet. On an accelerator nothing changes.
    """
    import jax  # here, since torch's side of the benchmark takes the other half

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if jax.default_backend() == "cpu":
        keep_heap()


def keep_heap() -> None:
    """glibc's part: no block is mapped by itself, and nothing at the heap's end is given back. With another C library nothing changes."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(MMAP_MAX, 0)
        libc.mallopt(TRIM_THRESHOLD, -1)
