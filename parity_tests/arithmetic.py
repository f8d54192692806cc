"""On which device, and with which products of matrices, JAX computes what is compared; torch and the float64 truth stay on the host's processor."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax

from flax_gpt.errors import InputError, require

PRECISIONS = ("highest", "default")
"""Of float32 products: "highest" computes them in float32; "default" leaves them to JAX, which rounds their factors to TF32 on GPUs that have it and
to bfloat16 on TPUs, and computes them in float32 on the processor."""

DEVICES = ("cpu", "gpu", "tpu")

_precision: contextvars.ContextVar[str] = contextvars.ContextVar("precision", default="highest")


def precision(dtype: str = "float32") -> str:
    """What `jax.default_matmul_precision` is given for programs in `dtype`: float64, the judge, is never shortened."""
    return "highest" if dtype == "float64" else _precision.get()


def synonym(dtype: str) -> str:
    """JAX's other name for the same precision: what jax.jit traced under the first is traced again under this one."""
    return {"highest": "float32", "default": "bfloat16"}[precision(dtype)]


def device_of(name: str | None) -> Any:
    """The first JAX device of a platform, of JAX's own choice for None. Raises InputError where there is none."""
    require(name is None or name in DEVICES, "device", name, f"must be one of {', '.join(DEVICES)}")
    if name is None:
        return jax.devices()[0]
    try:
        return jax.devices(name)[0]
    except RuntimeError:
        seen = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise InputError("device", name, f"JAX sees no such device here, it sees {seen}") from None


def title_of(device: Any) -> str:
    """The platform as `DEVICES` has it."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)


@contextlib.contextmanager
def using(device: Any, precision: str = "highest") -> Iterator[None]:
    """Within it JAX computes on `device`, and multiplies in `precision`. Raises InputError for another precision than PRECISIONS."""
    require(precision in PRECISIONS, "precision", precision, f"must be one of {', '.join(PRECISIONS)}")
    token = _precision.set(precision)
    try:
        with jax.default_device(device):
            yield
    finally:
        _precision.reset(token)
