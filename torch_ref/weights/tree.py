"""Weights as a flat {file name: array}, in and out of the torch models. A model's state_dict speaks the file's names by itself."""

import os
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from flax_gpt.errors import InputError, require
from flax_gpt.weights.torch_names import TABLES, NameTable, check_names


def speak_file_names(model: nn.Module) -> None:
    """Makes state_dict and load_state_dict of `model` use the names of the original's files, aliases and buffers included.

    Loading is all or nothing: an InputError lists every missing, unexpected, mis-shaped or contradictory name and the model is unchanged.
    """
    model.register_state_dict_post_hook(_write_names)
    model.register_load_state_dict_pre_hook(_read_names)


def torch_weights(model: nn.Module, values: Mapping[str, Tensor] | None = None) -> dict[str, np.ndarray]:
    """The model's weights as numpy under the file's names, aliases and buffers included.

    `values`, by the model's own parameter names, such as its gradients, is spelled the same way instead, without aliases.
    """
    if values is None:
        return {name: _numpy(tensor) for name, tensor in model.state_dict().items()}
    table = _table(model)
    return {table.to_file(name): _numpy(tensor) for name, tensor in values.items()}


def gradients(model: nn.Module) -> dict[str, np.ndarray]:
    """{file name: gradient} of every parameter; zeros where backward reached nothing."""
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return torch_weights(model, found)


def load_weights(model: nn.Module, source: Mapping[str, Any] | str | os.PathLike[str]) -> None:
    """Fills the model in place, all or nothing, from {file name: array}, a .safetensors file or a .pt file of tensors.

    Raises InputError that lists every missing, unexpected, mis-shaped or contradictory name; the model is then unchanged.
    """
    arrays = source if isinstance(source, Mapping) else read_weights(source)
    model.load_state_dict({name: array if isinstance(array, Tensor) else _tensor(array) for name, array in arrays.items()})


def read_weights(source: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a .pt file, which is read with weights_only=True: no code in it runs."""
    path = pathlib.Path(source)
    require(path.is_file(), "source", str(source), "is not a file")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise InputError("source", str(source), f"is not a whole .safetensors file ({error})") from error
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises whatever the bytes lead torch's reader to
        # torch's own words advise to read the file unsafely, or name what its reader stumbled over.
        reason = "it holds more than tensors" if isinstance(error, pickle.UnpicklingError) else "torch.save did not write it, or it is damaged"
        raise InputError("source", str(source), f"is not a .pt file of plain tensors ({reason})") from error
    whole = isinstance(found, Mapping) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items())
    require(whole, "source", str(source), "must hold a mapping of names to tensors")
    for name, tensor in found.items():
        plain = (
            tensor.layout is torch.strided and tensor.device.type == "cpu" and not (tensor.is_quantized or tensor.is_nested or tensor.is_complex())
        )
        require(plain, "source", str(source), f"holds {name!r}, which is no plain tensor")
        speakable = name != "__metadata__" and name.encode("utf-8", "replace").decode() == name
        require(speakable, "source", str(source), f"holds the name {name!r}, which no .safetensors file can carry")
    return dict(found)


def _write_names(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    table = _table(model)
    for name in [name for name in state if name.startswith(prefix)]:
        state[prefix + table.to_file(name.removeprefix(prefix))] = state.pop(name)
    for alias, name in table.aliases:
        state[prefix + alias] = state[prefix + name]
    for name, tensor in _constants(model).items():
        state[prefix + name] = tensor


def _read_names(model: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    table = _table(model)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    found = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    constants = _constants(model)
    wanted = {table.to_file(name): tuple(tensor.shape) for name, tensor in own.items()}
    wanted |= {alias: wanted[name] for alias, name in table.aliases} | {name: tuple(tensor.shape) for name, tensor in constants.items()}
    problems = [
        f"{alias} differs from {name}, with which it is tied"
        for alias, name in table.aliases
        if alias in found and name in found and found[alias].shape == found[name].shape and not _same(found[alias], found[name])
    ]
    problems += [
        f"{name} is not the model's"
        for name, tensor in constants.items()
        if name in found and found[name].shape == tensor.shape and not _same(found[name], tensor)
    ]
    problems += [
        f"{name} has the dtype {str(tensor.dtype).removeprefix('torch.')}, which holds no weights"
        for name, tensor in found.items()
        if name in wanted and name not in constants and not tensor.is_floating_point()
    ]
    optional = [*table.buffers, *(alias for alias, _ in table.aliases)]
    check_names({name: tuple(tensor.shape) for name, tensor in found.items()}, wanted, optional, problems)
    for name, tensor in own.items():
        state[prefix + name] = found.get(table.to_file(name), tensor.detach())


def _table(model: nn.Module) -> NameTable:
    kind = type(model).__name__
    require(kind in TABLES, "model", kind, f"has no table of names: {', '.join(TABLES)}")
    return TABLES[kind]


def _constants(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of the original that the model computes instead of holding; True = hidden in `causal_mask`."""
    if "causal_mask" not in _table(model).buffers:
        return {}
    max_len = cast(Any, model).config.max_len
    return {"causal_mask": ~torch.ones(max_len, max_len, dtype=torch.bool).tril()}


def _same(a: Tensor, b: Tensor) -> bool:
    return _numpy(a).tobytes() == _numpy(b.to(a.dtype)).tobytes()


def _numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:  # numpy has no bfloat16 of its own: the bits travel as integers
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return tensor.numpy().copy()


def _tensor(array: Any) -> Tensor:
    array = np.asarray(array, order="C")  # ascontiguousarray would make a scalar (1,)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
