"""A .pt file's weights as a .safetensors file."""

import os
import pathlib

from safetensors.torch import save_file

from flax_gpt.errors import require
from torch_ref.weights.tree import read_weights


def convert(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Writes every tensor of `source` to `out` under its own name, bit for bit, under a temporary name first.

    Tensors that share memory, such as tied weights, are written once a name. Raises InputError as `read_weights`.
    """
    out = pathlib.Path(out)
    require(out.parent.is_dir() and not out.is_dir(), "out", str(out), "must be a file in a folder that exists")
    tensors = read_weights(source)
    temporary = out.with_name(f"{out.name}.tmp{os.getpid()}")
    try:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, temporary)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
