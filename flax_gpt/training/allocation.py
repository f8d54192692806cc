"""What becomes of the memory that a step gives back."""

import ctypes
import sys

import jax

MMAP_MAX, TRIM_THRESHOLD = -4, -1
"""Parameters of mallopt, as glibc's malloc.h numbers them."""


def keep_memory() -> None:
    """On the processor, lets this process keep freed memory for the next step instead of giving it back to the system.

    XLA asks malloc for the temporary memory of every execution. glibc maps blocks of that size anew each time, and each page that is touched for the
    first time costs a fault, together up to a third of a training step (docs/performance.md). Blocks of a heap stay, but only the main thread's heap
    grows beyond 64 MiB, so executions are made to run in the thread that asks for them. For that to take effect jax must not have looked for its
    devices yet. With another C library, and on an accelerator, nothing changes.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(MMAP_MAX, 0)
        libc.mallopt(TRIM_THRESHOLD, -1)
