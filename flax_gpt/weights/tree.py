"""Weights as a flat {file name: numpy array}, in and out of NNX models."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (registers bfloat16, without which safetensors cannot read it through numpy)
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flax_gpt.errors import InputError, require
from flax_gpt.nn.positions import Buffer
from flax_gpt.weights.torch_names import TABLES, NameTable, check_names

Path = tuple[Any, ...]

# By the kind of the module, never by the shape: a square matrix would hide a wrong orientation.
_TORCH_LEAVES: dict[type, dict[str, tuple[str, bool]]] = {
    nnx.Linear: {"kernel": ("weight", True), "bias": ("bias", False)},
    nnx.Embed: {"embedding": ("weight", False)},
    nnx.RMSNorm: {"scale": ("weight", False)},
    nnx.LayerNorm: {"scale": ("weight", False), "bias": ("bias", False)},
}


def leaf_names(model: nnx.Module) -> dict[Path, tuple[str, bool]]:
    """{path of a variable: (file name, whether the file holds its transpose)}, for every parameter and buffer of the model.

    Raises InputError for a parameter that stands in a module without an entry in the table.
    """
    modules = dict(nnx.iter_modules(model))
    table = _table(model)
    names: dict[Path, tuple[str, bool]] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Any(nnx.Param, Buffer))):
        parents, attribute = path[:-1], str(path[-1])
        if isinstance(variable, Buffer):
            leaf, transposed = attribute, False
        else:
            kinds = _TORCH_LEAVES.get(type(modules[parents]), {})
            require(attribute in kinds, "model", ".".join(map(str, path)), f"has no name in files: {type(modules[parents]).__name__}")
            leaf, transposed = kinds[attribute]
        names[path] = (table.to_file(".".join([*map(str, parents), leaf])), transposed)
    return names


def torch_weights(model: nnx.Module, values: nnx.State | None = None) -> dict[str, np.ndarray]:
    """The model's weights under the names and in the orientation of a torch state dict, aliases and buffers included.

    `values`, a state of the model's structure such as its gradients or a moment of Adam, is spelled the same way instead, without aliases.
    """
    state = nnx.state(model, nnx.Any(nnx.Param, Buffer)) if values is None else values
    names = leaf_names(model)
    arrays = {}
    for path, leaf in nnx.to_flat_state(state):
        name, transposed = names[path]
        array = np.array(leaf[...] if isinstance(leaf, nnx.Variable) else leaf)
        arrays[name] = np.ascontiguousarray(array.T) if transposed else array
    if values is None:
        arrays |= {alias: arrays[name] for alias, name in _table(model).aliases}
        arrays |= _constants(model)
    return arrays


def load_weights(model: nnx.Module, source: Mapping[str, Any] | str | os.PathLike[str]) -> None:
    """Fills the model in place, all or nothing, from {file name: array}, a .safetensors file or a run folder.

    Arrays, torch's tensors too, are cast to the parameters' dtype. Aliases may be absent and must agree when present; buffers may be absent and
    keep what the model has.
    Raises InputError that lists every missing, unexpected, mis-shaped or contradictory name; the model is then unchanged.
    """
    arrays = {name: _numpy(name, array) for name, array in (source if isinstance(source, Mapping) else read_weights(source)).items()}
    table, names = _table(model), leaf_names(model)
    variables = dict(nnx.to_flat_state(nnx.state(model, nnx.Any(nnx.Param, Buffer))))
    wanted = {name: variables[path].shape[::-1] if transposed else variables[path].shape for path, (name, transposed) in names.items()}
    constants = _constants(model)
    wanted |= {alias: wanted[name] for alias, name in table.aliases} | {name: array.shape for name, array in constants.items()}
    problems = [
        f"{alias} differs from {name}, with which it is tied"
        for alias, name in table.aliases
        if alias in arrays and name in arrays and arrays[alias].shape == arrays[name].shape and not _same(arrays[alias], arrays[name])
    ]
    problems += [
        f"{name} is not the model's"
        for name, array in constants.items()
        if name in arrays and arrays[name].shape == array.shape and not _same(arrays[name], array)
    ]
    problems += [
        f"{name} has the dtype {array.dtype}, which holds no weights"
        for name, array in arrays.items()
        if name in wanted and name not in constants and not jnp.issubdtype(array.dtype, jnp.floating)
    ]
    problems += [
        f"{name} holds numbers beyond {variables[path].dtype}"
        for path, (name, _) in names.items()
        if name in arrays and jnp.issubdtype(arrays[name].dtype, jnp.floating) and not _representable(arrays[name], variables[path].dtype)
    ]
    optional = [*table.buffers, *(alias for alias, _ in table.aliases)]
    check_names({name: array.shape for name, array in arrays.items()}, wanted, optional, problems)

    state = nnx.state(model, nnx.Any(nnx.Param, Buffer))
    for path, variable in nnx.to_flat_state(state):
        name, transposed = names[path]
        if name in arrays:
            array = arrays[name].T if transposed else arrays[name]
            variable.set_value(jnp.array(array.astype(variable.dtype), device=_placement(variable)))
    nnx.update(model, state)


def read_weights(source: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of a .safetensors file (any float dtype), or of the newest checkpoint of a run folder."""
    path = pathlib.Path(source)
    if path.is_dir():
        from flax_gpt.training.loop import load_run

        return torch_weights(load_run(path).model)
    require(path.is_file(), "source", str(source), "is neither a file nor a run folder")
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise InputError("source", str(source), f"is not a whole .safetensors file ({error})") from error


def save_weights(model: nnx.Module, path: str | os.PathLike[str]) -> None:
    """Writes torch_weights(model) to a .safetensors file, under a temporary name first."""
    write_arrays(torch_weights(model), path)


def write_arrays(arrays: Mapping[str, np.ndarray], path: str | os.PathLike[str]) -> None:
    """Writes {name: array} to a .safetensors file, under a temporary name first. Raises InputError when its folder does not exist."""
    path = pathlib.Path(path)
    require(path.parent.is_dir() and not path.is_dir(), "path", str(path), "must be a file in a folder that exists")
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _table(model: nnx.Module) -> NameTable:
    kind = type(model).__name__
    require(kind in TABLES, "model", kind, f"has no table of names: {', '.join(TABLES)}")
    return TABLES[kind]


def _constants(model: nnx.Module) -> dict[str, np.ndarray]:
    """Buffers of the original that the model computes instead of holding; True = hidden in `causal_mask`."""
    if "causal_mask" not in _table(model).buffers:
        return {}
    max_len = cast(Any, model).config.max_len
    return {"causal_mask": ~np.tril(np.ones((max_len, max_len), bool))}


def _numpy(name: str, array: Any) -> np.ndarray:
    """`array` as numpy; a tensor of torch goes by DLPack where numpy lacks its dtype, bfloat16."""
    try:
        if hasattr(array, "detach"):
            array = array.detach().cpu().contiguous()
            return np.asarray(jax.dlpack.from_dlpack(array) if str(array.dtype) == "torch.bfloat16" else array)
        return np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError("source", name, f"is no array: {error}") from error


def _representable(array: np.ndarray, dtype: Any) -> bool:
    """Whether the cast makes no finite number infinite."""
    with np.errstate(over="ignore"):
        return bool((np.isfinite(array.astype(dtype)) | ~np.isfinite(array)).all())


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.astype(a.dtype).tobytes()


def _placement(variable: Any) -> Any:
    value = variable[...]
    return value.sharding if isinstance(value, jax.Array) else None
