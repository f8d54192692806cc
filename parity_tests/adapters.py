"""One view of other people's programs: any NNX module, Linen module or plain function of parameters, and any torch module."""

import copy
import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import flax.linen
import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (numpy learns bfloat16)
import numpy as np
import torch
from flax import nnx

from flax_gpt.errors import InputError, require

NARROW = ("float32", "bfloat16", "float16")

ARRAYS = (np.ndarray, np.generic, jax.Array, torch.Tensor)


class Leaf(NamedTuple):
    """A parameter or a buffer, as the other framework has to see it."""

    shape: tuple[int, ...]
    kind: str
    """Of the module that holds it: "linear" ((in, out) in JAX, (out, in) in torch), "in_out", "conv", "embed", "norm", or "raw"."""
    attribute: str
    """"weight", "bias", … as torch's standard layers call it."""
    trained: bool = True


class Inputs:
    """What both models are called with: arrays, and anything else that both take as it is."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.args, self.kwargs = args, kwargs

    @classmethod
    def of(cls, inputs: Any) -> "Inputs":
        """A mapping gives keyword arguments, a tuple or list positional ones, anything else is the only argument."""
        if isinstance(inputs, Inputs):
            return inputs
        if isinstance(inputs, Mapping):
            return cls(**inputs)
        return cls(*inputs) if isinstance(inputs, tuple | list) else cls(inputs)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name: the number of a positional argument, the name of another, and the path inside either."""
        return {
            name: as_numpy(value) for name, value in named_leaves({**dict(enumerate(self.args)), **self.kwargs}).items() if isinstance(value, ARRAYS)
        }

    def replaced(self, arrays: Mapping[str, Any]) -> "Inputs":
        """The same call with other arrays under the names of `arrays()`."""
        swap = lambda name, value: arrays.get(name, value)
        return Inputs(
            *(_rebuilt(value, str(i), swap) for i, value in enumerate(self.args)), **{key: _rebuilt(v, key, swap) for key, v in self.kwargs.items()}
        )


def as_numpy(value: Any) -> np.ndarray:
    """Any array as numpy; torch's bfloat16, which numpy lacks, by way of float32."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.float().numpy().astype("bfloat16") if value.dtype == torch.bfloat16 else value.numpy().copy()
    return np.asarray(value)


def named_leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{path: leaf} of nested mappings, sequences and dataclasses, parts joined by "/"; None holds nothing."""
    if tree is None:
        return {}
    children = _children(tree)
    if children is None:
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in children.items():
        found |= named_leaves(value, f"{prefix}/{key}" if prefix else str(key))
    return found


def _children(tree: Any) -> Mapping[Any, Any] | None:
    if isinstance(tree, Mapping):
        return tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return tree._asdict()
    if isinstance(tree, tuple | list):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type | nnx.Module):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def _rebuilt(tree: Any, name: str, swap: Callable[[str, Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _rebuilt(value, f"{name}/{key}", swap) for key, value in tree.items()}
    if isinstance(tree, tuple | list) and not hasattr(tree, "_fields"):
        return type(tree)(_rebuilt(value, f"{name}/{i}", swap) for i, value in enumerate(tree))
    return swap(name, tree)


class Ours(Protocol):
    """A JAX program whose parameters have names."""

    leaves: dict[str, Leaf]
    """By dotted name, in the order of definition."""
    modules: dict[str, Any]
    """{dotted path: module}; empty for a plain function."""

    def values(self) -> dict[str, np.ndarray]: ...

    def at(self, dtype: str, values: Mapping[str, np.ndarray]) -> Callable[..., Any]:
        """A function (values, args, kwargs) → outputs that computes in `dtype`. Runs under the caller's jax.enable_x64, as the function does."""
        ...


# How torch spells the leaves of the modules that both frameworks have; by the name of the class or of one that it derives from.
_KINDS = {
    **dict.fromkeys(("Linear", "LinearGeneral", "Dense", "DenseGeneral"), "linear"),
    **dict.fromkeys(("Embed",), "embed"),
    **dict.fromkeys(("Conv", "ConvLocal"), "conv"),
    **dict.fromkeys(("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm", "InstanceNorm"), "norm"),
}
_SPELLING = {"kernel": "weight", "scale": "weight", "embedding": "weight", "mean": "running_mean", "var": "running_var"}


def kind_of(module: Any) -> str:
    """The kind of a JAX module, see `Leaf`."""
    return next((_KINDS[base.__name__] for base in type(module).__mro__ if base.__name__ in _KINDS and base.__module__.startswith("flax.")), "raw")


def _leaf(name: str, array: Any, modules: Mapping[str, Any], trained: bool) -> Leaf:
    path, _, attribute = name.rpartition(".")
    kind = kind_of(modules[path]) if path in modules else "raw"
    return Leaf(tuple(array.shape), kind, _SPELLING.get(attribute, attribute) if kind != "raw" else attribute, trained)


def _is_float(array: Any) -> bool:
    return isinstance(array, ARRAYS) and not isinstance(array, torch.Tensor) and jnp.issubdtype(array.dtype, jnp.floating)


class NNX:
    """An nnx.Module. The model itself is left as it is; in eval mode, or in train mode, or, with None, in the one it is in."""

    def __init__(self, model: nnx.Module, *, train: bool | None = False):
        self.model = nnx.clone(model)
        if train is not None:
            self.model.train() if train else self.model.eval()
        self.modules = {".".join(map(str, path)): module for path, module in _modules(self.model)}
        flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(self.model))}
        self.arrays = {name: leaf[...] if isinstance(leaf, nnx.Variable) else leaf for name, leaf in flat.items()}
        floats = {name: leaf for name, leaf in flat.items() if _is_float(self.arrays[name])}
        order = {name: number for number, name in enumerate(_definition_order(model))}
        names = sorted(floats, key=lambda name: order.get(name, len(order)))
        self.leaves = {name: _leaf(name, self.arrays[name], self.modules, isinstance(floats[name], nnx.Param)) for name in names}

    def values(self) -> dict[str, np.ndarray]:
        return {name: np.array(self.arrays[name]) for name in self.leaves}

    def at(self, dtype: str, values: Mapping[str, np.ndarray]) -> Callable[..., Any]:
        model = nnx.clone(self.model)
        for path, module in _modules(model):
            module._parity_path = ".".join(map(str, path))  # a static attribute: it outlives the splits of nnx's transforms
            for name, value in list(vars(module).items()):
                if not name.startswith("_") and (changed := in_dtype(value, dtype)) is not value:
                    setattr(module, name, changed)
        graph, state = nnx.split(model)
        pairs, tree = jax.tree_util.tree_flatten_with_path(state)
        leaves = {".".join(_key(part) for part in path if not isinstance(part, jax.tree_util.GetAttrKey)): leaf for path, leaf in pairs}

        def call(values: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
            filled = [values.get(name, leaf) for name, leaf in leaves.items()]
            return nnx.merge(graph, jax.tree_util.tree_unflatten(tree, filled), copy=True)(*args, **kwargs)

        return call


def _modules(model: nnx.Module) -> list[tuple[Any, nnx.Module]]:
    return [(path, module) for path, module in nnx.iter_modules(model)]


def _definition_order(model: nnx.Module) -> Iterator[str]:
    """Dotted names of variables in the order in which __init__ assigned them."""
    seen: set[int] = set()

    def walk(node: Any, path: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, nnx.Variable | jax.Array | np.ndarray):
            yield ".".join(path)
        elif isinstance(node, nnx.Module | list | tuple | dict) and id(node) not in seen:
            seen.add(id(node))
            parts = enumerate(node) if isinstance(node, nnx.List | list | tuple) else (node if isinstance(node, dict) else vars(node)).items()
            for key, value in parts:
                if not str(key).startswith("_"):
                    yield from walk(value, (*path, str(key)))

    return walk(model, ())


def in_dtype(value: Any, dtype: str) -> Any:
    """`value` itself, or, where it names a float dtype (alone or as a field of a frozen dataclass), the same with `dtype` in its place."""
    if isinstance(value, type | np.dtype | str) and not (isinstance(value, str) and value not in NARROW):
        try:
            name = np.dtype(value).name
        except TypeError:
            return value
        return (dtype if isinstance(value, str) else jnp.dtype(dtype)) if name in NARROW else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type | nnx.Module):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        changed = {name: new for name, field in fields.items() if (new := in_dtype(field, dtype)) is not field}
        return dataclasses.replace(value, **changed) if changed else value
    return value


class _Pytree:
    """A program whose parameters are a pytree of arrays."""

    def __init__(self, params: Any, modules: Mapping[str, Any], trained: Callable[[str], bool]):
        pairs, self.tree = jax.tree_util.tree_flatten_with_path(params)
        self.arrays = {".".join(_key(part) for part in path): array for path, array in pairs}
        self.modules = dict(modules)
        self.leaves = {name: self._leaf(name, array, trained(name)) for name, array in self.arrays.items() if _is_float(array)}

    def _leaf(self, name: str, array: Any, trained: bool) -> Leaf:
        return _leaf(name, array, self.modules, trained)

    def values(self) -> dict[str, np.ndarray]:
        return {name: np.array(self.arrays[name]) for name in self.leaves}

    def _filled(self, values: Mapping[str, Any]) -> Any:
        return jax.tree_util.tree_unflatten(self.tree, [values.get(name, array) for name, array in self.arrays.items()])


class Function(_Pytree):
    """A plain function f(params, *inputs, **options) of a pytree of parameters. It must compute in the dtype of its parameters."""

    def __init__(self, f: Callable[..., Any], params: Any, **options: Any):
        super().__init__(params, {}, lambda name: True)
        self.f, self.options = f, options

    def at(self, dtype: str, values: Mapping[str, np.ndarray]) -> Callable[..., Any]:
        return lambda values, args, kwargs: self.f(self._filled(values), *args, **kwargs, **self.options)


class Linen(_Pytree):
    """A Linen module with its variables; `options` are further arguments of the call, such as train=False, that only it takes."""

    def __init__(self, module: flax.linen.Module, variables: Mapping[str, Any], **options: Any):
        self.module, self.options = module, options
        self.collections = {name: value for name, value in variables.items() if name in ("params", "batch_stats")}
        self.rest = {name: value for name, value in variables.items() if name not in self.collections}
        self.modules: dict[str, Any] = {}
        super().__init__(self.collections, {}, lambda name: name.startswith("params."))
        strip = lambda name: name.split(".", 1)[1]
        require(len({strip(name) for name in self.arrays}) == len(self.arrays), "variables", list(self.arrays), "must have one name a leaf")
        self.arrays = {strip(name): array for name, array in self.arrays.items()}
        self.leaves = {strip(name): leaf for name, leaf in self.leaves.items()}

    def trace(self, inputs: Inputs) -> None:
        """Finds the modules by an abstract call, since the variables do not tell what they belong to, and the order in which they run."""
        found: dict[str, Any] = {}

        def note(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
            found.setdefault(".".join(context.module.path), context.module)
            return run(*args, **kwargs)

        variables = {**self.collections, **self.rest}
        with flax.linen.intercept_methods(note):
            jax.eval_shape(lambda: self.module.apply(variables, *inputs.args, **inputs.kwargs, **self.options, mutable=["batch_stats"]))
        self.modules = {path: module.clone(parent=None) for path, module in found.items()}
        order = {path: number for number, path in enumerate(found)}
        self.leaves = {
            name: self._leaf(name, self.arrays[name], leaf.trained)
            for name, leaf in sorted(self.leaves.items(), key=lambda item: order.get(item[0].rpartition(".")[0], len(order)))
        }

    def at(self, dtype: str, values: Mapping[str, np.ndarray]) -> Callable[..., Any]:
        def widen(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
            for name in ("dtype", "param_dtype"):
                value = getattr(context.module, name, None)
                if (changed := in_dtype(value, dtype)) is not value:
                    object.__setattr__(context.module, name, changed)  # a clone made for this call
            return run(*args, **kwargs)

        def call(values: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
            with flax.linen.intercept_methods(widen):
                out = self.module.apply({**self._filled(values), **self.rest}, *args, **kwargs, **self.options, mutable=["batch_stats"])
            return out[0]

        return call


def _key(part: Any) -> str:
    return str(next(getattr(part, name) for name in ("key", "idx", "name") if hasattr(part, name)))


def ours_of(model: Any, inputs: Inputs, *, train: bool | None = False) -> NNX | Function | Linen:
    """The view of a JAX model. Raises InputError for what is none."""
    if isinstance(model, nnx.Module):
        return NNX(model, train=train)
    if isinstance(model, Linen):
        model.trace(inputs)
    require(
        isinstance(model, NNX | Function | Linen),
        "ours",
        type(model).__name__,
        "must be an nnx.Module, Linen(module, variables) or Function(f, params)",
    )
    return model


class Torch:
    """A torch module. The model itself is left as it is; in eval mode, or in train mode, or, with None, in the one it is in."""

    def __init__(self, model: torch.nn.Module, *, train: bool | None = False):
        require(isinstance(model, torch.nn.Module), "theirs", type(model).__name__, "must be a torch.nn.Module")
        self.model = copy.deepcopy(model)
        if train is not None:
            self.model.train(train)
        self.modules = dict(self.model.named_modules(remove_duplicate=False))
        self.aliases: dict[str, str] = {}
        """{further name of a shared parameter: its first}."""
        self.leaves: dict[str, Leaf] = {}
        first: dict[int, str] = {}
        for trained, pairs in (
            (True, self.model.named_parameters(remove_duplicate=False)),
            (False, self.model.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in pairs:
                if first.setdefault(id(tensor), name) != name:
                    self.aliases[name] = first[id(tensor)]
                if tensor.is_floating_point():
                    self.leaves[name] = self._leaf(name, tensor, trained)

    def _leaf(self, name: str, tensor: torch.Tensor, trained: bool) -> Leaf:
        path, _, attribute = name.rpartition(".")
        module = self.modules[path]
        kind = "raw"
        if isinstance(module, torch.nn.Linear | torch.nn.MultiheadAttention):
            kind = "linear"
        elif isinstance(module, torch.nn.Embedding):
            kind = "embed"
        elif isinstance(module, torch.nn.modules.conv._ConvNd) and not module.transposed:
            kind = "conv"
        elif type(module).__name__ == "Conv1D":  # GPT-2's: (in, out)
            kind = "in_out"
        elif isinstance(module, torch.nn.modules.batchnorm._NormBase | torch.nn.LayerNorm | torch.nn.GroupNorm | torch.nn.RMSNorm):
            kind = "norm"
        if attribute in ("in_proj_weight", "in_proj_bias"):
            attribute = attribute.removeprefix("in_proj_")
        return Leaf(tuple(tensor.shape), kind, attribute, trained)

    def values(self) -> dict[str, np.ndarray]:
        return {name: as_numpy(tensor) for name, tensor in self._tensors(self.model).items()}

    def _tensors(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        found = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
        return {name: found[name] for name in self.leaves}

    def at(self, dtype: str, rounded: str | None = None) -> torch.nn.Module:
        """A copy that computes in `dtype`, of weights rounded to `rounded` first."""
        model = copy.deepcopy(self.model)
        model = model if rounded is None else model.to(getattr(torch, rounded))
        model = model.to(getattr(torch, dtype))
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.dtype):
                    if str(value).removeprefix("torch.") in NARROW:
                        setattr(module, name, getattr(torch, dtype))
                elif (changed := in_dtype(value, dtype)) is not value:
                    setattr(module, name, changed)
        return model

    def gradients(self, model: torch.nn.Module) -> dict[str, np.ndarray]:
        """By name, aliases included; zeros for what the loss does not depend on."""
        tensors = {name: tensor for name, tensor in self._tensors(model).items() if self.leaves[name].trained}
        return {name: as_numpy(torch.zeros_like(t) if t.grad is None else t.grad) for name, t in tensors.items()}


def matches(name: str, patterns: Any) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def refuse(argument: str, value: object, problems: list[str]) -> None:
    """Raises one InputError for all problems, if there are any."""
    if problems:
        raise InputError(argument, value, "; ".join(problems))
