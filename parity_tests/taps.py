"""Named values inside both programs, forward and backward, in the order of computation, without a change to either.

In JAX the program is traced once. While it is traced, calls of modules mark what goes in and comes out with `jax.ad_checkpoint.checkpoint_name`,
which users may call themselves. The traced program is then evaluated equation by equation: a marked value is kept and gets a zero added, whose
gradient is the cotangent of the value. Activations and softmax need no mark, however they were imported: equations remember which function of
jax.nn they came from. In torch, hooks on modules and on tensors give the same.

A tap is named after the module that it belongs to: PATH for the output (PATH/0, … when there are several), PATH:input for the first argument,
PATH:scores, PATH:map and PATH:activation for functions called inside it, PATH:NAME for what `mark` names; #1, #2, … for further calls. What runs
inside jax.lax.scan, jax.vmap and other transforms is not seen; what is inside jax.jit and jax.checkpoint is.
"""

import contextlib
import functools
import importlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from torch.utils._python_dispatch import TorchDispatchMode

from parity_tests import tolerances
from parity_tests.adapters import named_leaves

ACTIVATIONS = (
    *"gelu relu relu6 silu leaky_relu elu celu selu softplus softsign sigmoid log_sigmoid hard_tanh hard_sigmoid hard_silu hard_swish mish".split(),
    *"glu squareplus soft_sign hardtanh hardsigmoid hardswish logsigmoid tanh".split(),
)

PROJECTIONS = ("q", "k", "v")
"""Names of what the fused weights of nn.MultiheadAttention project to."""

UNDERFLOW = -1075 * math.log(2.0)
"""A score that is further than this below the largest of its row has the weight 0 even in float64: it is hidden, whatever number hides it."""

_FUNCTIONS = ("jax/_src/nn/functions.py", "flax_gpt/nn/feed_forward.py")
"""Where the activations that need no mark are written."""

_SCOPE = "@"

_POINTS = (
    ("nn.block", "Residual.add", lambda self, args, out: {args[-1] if isinstance(args[-1], str) else "residual": out[0]}),
    ("nn.attention", "MultiHeadAttention.queries", lambda self, args, out: {"q": out}),
    ("nn.attention", "MultiHeadAttention.keys_values", lambda self, args, out: {"k": out[0], "v": out[1]}),
    ("models.gpt", "MiniGPT.embed", lambda self, args, out: {"embedding": out}),
    ("models.gpt", "MiniGPT.head", lambda self, args, out: {"head": out}),
    (
        "models.encoder_decoder",
        "EncoderDecoder._embed",
        lambda self, args, out: {"source_embedding" if args[1] is self.source_embed else "target_embedding": out},
    ),
    ("models.encoder_decoder", "EncoderDecoder.head", lambda self, args, out: {"head": out}),
)
"""What the models of this project tap beside their modules: (module of either package, method, the named parts of its result)."""


def mark(x: Any, name: str) -> Any:
    """x itself, named, so that the taps of both programs hold it as MODULE:name: for values inside functional code, in JAX and in torch."""
    if isinstance(x, torch.Tensor):
        if _Recorder.active is not None:
            _Recorder.active.inner(name, x)
        return x
    return checkpoint_name(x, name)


# JAX


@contextlib.contextmanager
def _marking() -> Iterator[None]:
    """Calls of NNX modules that carry a path, and of Linen modules, mark what goes in and comes out."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(flax.linen.intercept_methods(_linen_call))
        yield


def _linen_call(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
    path = ".".join(context.module.path)
    return _marked(path, run, args, kwargs) if context.method_name == "__call__" and path else run(*args, **kwargs)


def marking_classes(classes: set[type]) -> contextlib.ExitStack:
    """A context in which instances of the NNX classes that carry `_parity_path` mark their calls."""
    stack = contextlib.ExitStack()
    running: list[int] = []
    for kind in classes:
        if "__call__" in dir(kind):
            stack.enter_context(mock.patch.object(kind, "__call__", _nnx_call(kind.__call__, running), create=True))
    return stack


def _nnx_call(original: Any, running: list[int]) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = getattr(self, "_parity_path", "")
        if not path or running[-1:] == [id(self)]:  # the root, or super().__call__
            return original(self, *args, **kwargs)
        running.append(id(self))
        try:
            return _marked(path, functools.partial(original, self), args, kwargs)
        finally:
            running.pop()

    return call


def _marked(path: str, run: Any, args: Any, kwargs: Any) -> Any:
    with jax.named_scope(_SCOPE + path):
        if args and isinstance(args[0], jax.Array) and jnp.issubdtype(args[0].dtype, jnp.floating):
            args = (checkpoint_name(args[0], f"{_SCOPE}{path}:input"), *args[1:])
        out = run(*args, **kwargs)
        return _marked_leaves(out, _SCOPE + path)


def _marked_leaves(tree: Any, name: str) -> Any:
    if isinstance(tree, jax.Array):
        return checkpoint_name(tree, name)
    if isinstance(tree, tuple | list) and not hasattr(tree, "_fields"):
        return type(tree)(_marked_leaves(part, f"{name}/{i}") for i, part in enumerate(tree))
    if isinstance(tree, dict):
        return {key: _marked_leaves(part, f"{name}/{key}") for key, part in tree.items()}
    return tree


@contextlib.contextmanager
def _own_points(package: str, note: Callable[[str, Any], Any]) -> Iterator[None]:
    """The models of this project, in one of its packages, also tell `_POINTS`, and the scores and map of dense attention, to note(name, value)."""
    with contextlib.ExitStack() as stack:
        for where, method, parts in _POINTS:
            kind_name, name = method.split(".")
            kind = getattr(importlib.import_module(f"{package}.{where}"), kind_name)
            stack.enter_context(mock.patch.object(kind, name, _noting(getattr(kind, name), parts, note)))
        dense = importlib.import_module(f"{package}.kernels.dense")
        scores, mix = dense.scores, dense.mix
        stack.enter_context(mock.patch.object(dense, "scores", lambda *args: note("scores", scores(*args))))
        stack.enter_context(mock.patch.object(dense, "mix", lambda case, weights, v: mix(case, note("map", weights), v)))
        yield


def _noting(original: Any, parts: Any, note: Callable[[str, Any], Any]) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        named = {name: note(name, value) for name, value in parts(self, args, out).items()}
        values = list(named.values())
        return (*values, *out[len(values) :]) if isinstance(out, tuple) else values[0]

    return call


class Traced:
    """A JAX program call(values, args, kwargs) as a list of equations with names for what they compute.

    wide: it is evaluated in float64 throughout. Casts to narrower floats, such as softmax in float32 in jax.nn.dot_product_attention or statistics
    of norms, are left out, so that nothing but the program's meaning is left; those inside loops (scan, while, cond) stay.
    """

    def __init__(
        self, call: Callable[..., Any], classes: set[type], values: Mapping[str, Any], inputs: Any, *, own: bool = False, wide: bool = False
    ):
        self.wide = wide

        def program(values: Any, arrays: Any) -> Any:
            call_inputs = inputs.replaced(arrays)
            return call(values, call_inputs.args, call_inputs.kwargs)

        arrays = {name: jnp.asarray(array) for name, array in inputs.arrays().items()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(_marking())
            stack.enter_context(marking_classes(classes))
            if own:
                stack.enter_context(_own_points("flax_gpt", lambda name, value: checkpoint_name(value, name)))
            self.program, shape = jax.make_jaxpr(program, return_shape=True)(dict(values), arrays)
        self.tree = jax.tree.structure(shape)
        self.shapes: dict[str, Any] = {}
        jax.eval_shape(lambda v, a: self(v, a, self._note), dict(values), arrays)

    def _note(self, name: str, value: Any) -> Any:
        self.shapes[name] = jax.ShapeDtypeStruct(value.shape, value.dtype)
        return value

    def zeros(self) -> dict[str, Any]:
        """What to add to each tap: its gradient is the tap's cotangent."""
        return {name: np.zeros(shape.shape, shape.dtype) for name, shape in self.shapes.items()}

    def __call__(self, values: Any, arrays: Any, tap: Callable[[str, Any], Any]) -> Any:
        """The outputs; tap(name, value) → value is called for each named value in the order of computation."""
        calls: Counter[str] = Counter()

        def once(name: str, value: Any) -> Any:
            if not jnp.issubdtype(value.dtype, jnp.floating):
                return value
            number = calls[name]
            calls[name] += 1
            return tap(f"{name}#{number}" if number else name, value)

        flat = jax.tree.leaves((values, arrays))
        return jax.tree.unflatten(self.tree, _evaluate(self.program.jaxpr, self.program.consts, flat, once, "", self.wide))


def _evaluate(program: Any, consts: Any, args: Any, tap: Callable[[str, Any], Any], scope: str, wide: bool) -> list[Any]:
    known: dict[Any, Any] = dict(zip([*program.constvars, *program.invars], [*consts, *args], strict=True))
    read = lambda var: var.val if hasattr(var, "val") else known[var]
    starts, ends = _functions(program)
    for number, equation in enumerate(program.eqns):
        inside = _scope_of(equation, scope)
        if number in starts:
            name, var = starts[number]
            known[var] = tap(f"{inside}:{name}", known[var])
        values = [_widened(read(var)) if wide else read(var) for var in equation.invars]
        inner = _inner(equation, wide)
        if equation.primitive.name == "name":
            name = equation.params["name"]
            results = [tap(name[1:] if name.startswith(_SCOPE) else f"{inside}:{name}", values[0])]
        elif inner is not None:
            results = _evaluate(*inner, values, tap, inside, wide)
        else:
            results = _bound(equation, values, wide)
        known.update(zip(equation.outvars, results, strict=True))
        if number in ends:
            name, var = ends[number]
            known[var] = tap(f"{inside}:{name}", known[var])
    return [_widened(read(var)) if wide else read(var) for var in program.outvars]


def _inner(equation: Any, wide: bool) -> tuple[Any, Any] | None:
    """(program, constants) of an equation that only calls another program, or, when `wide`, has a derivative of its own and narrow arguments."""
    kind, params = equation.primitive.name, equation.params
    if kind in ("jit", "pjit", "closed_call", "core_call"):
        inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        return inner.jaxpr, inner.consts
    if kind in ("remat2", "checkpoint"):
        return params["jaxpr"], []
    if wide and kind == "custom_jvp_call" and any(_is_narrow(var.aval.dtype) for var in equation.invars):
        return params["call_jaxpr"].jaxpr, params["call_jaxpr"].consts
    return None


def _bound(equation: Any, values: list[Any], wide: bool) -> list[Any]:
    """The results of one equation."""
    params = equation.params
    if wide and any(hasattr(part, "eqns") or hasattr(part, "jaxpr") or callable(part) for part in jax.tree.leaves(list(params.values()))):
        values = [jnp.asarray(x, var.aval.dtype) if _is_narrow(var.aval.dtype) else x for x, var in zip(values, equation.invars, strict=True)]
    elif wide:
        is_narrow = lambda value: isinstance(value, np.dtype | type) and _is_narrow(value)
        params = {name: np.dtype("float64") if is_narrow(value) else value for name, value in params.items()}
    bound = equation.primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ([], bound)
    with equation.ctx.manager:
        result = equation.primitive.bind(*functions, *values, **params)
    return list(result) if equation.primitive.multiple_results else [result]


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 8


def _widened(value: Any) -> Any:
    dtype = getattr(value, "dtype", None)
    return jnp.asarray(value, "float64") if dtype is not None and _is_narrow(dtype) else value


def _scope_of(equation: Any, outer: str) -> str:
    found = [part for part in str(equation.source_info.name_stack).split("/") if part.startswith(_SCOPE)]
    return found[-1][1:] if found else outer


def _functions(program: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """{first equation: (name, its argument)} and {last equation: (name, its result)} of each stretch that one function of jax.nn left."""
    starts: dict[int, Any] = {}
    ends: dict[int, Any] = {}
    labels = [_function_of(equation) for equation in program.eqns]
    number = 0
    while number < len(labels):
        last = number
        while last + 1 < len(labels) and labels[last + 1] == labels[number]:
            last += 1
        if labels[number]:
            result = program.eqns[last].outvars[0]
            made = {var for equation in program.eqns[number : last + 1] for var in equation.outvars}
            given = [
                var
                for equation in program.eqns[number : last + 1]
                for var in equation.invars
                if not hasattr(var, "val") and var not in made and var.aval.shape == result.aval.shape
            ]
            names = ("scores", "map") if labels[number] == "softmax" else ("activation:input", "activation")
            if given:
                starts[number] = (names[0], given[0])
            ends[last] = (names[1], result)
        number = last + 1
    return starts, ends


def _function_of(equation: Any) -> str:
    """The function of jax.nn, or of this project's feed-forward, that an equation came from, "" for none: softmax or an activation."""
    traceback = equation.source_info.traceback
    names = [frame.function_name for frame in traceback.frames if frame.file_name.endswith(_FUNCTIONS)] if traceback is not None else []
    if equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        inner = equation.params.get("call_jaxpr") or equation.params.get("fun_jaxpr")
        info = getattr(getattr(inner, "jaxpr", None), "debug_info", None)
        names.append(str(getattr(info, "func_src_info", "")).split(" ")[0])
    names = [name.rpartition(".")[2] for name in reversed(names)]
    return next(("softmax" if name == "softmax" else name for name in names if name in ("softmax", *ACTIVATIONS)), "")


# torch


class Wide(TorchDispatchMode):
    """Leaves out casts to narrower floats, and makes new tensors of them in float64, as `Traced` does in JAX."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in (torch.float32, torch.bfloat16, torch.float16):
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


class _Recorder:
    """Hooks on a torch module that keep what its modules and functions compute, and the gradients that arrive there."""

    active: "_Recorder | None" = None

    def __init__(self, model: torch.nn.Module):
        self.values: dict[str, torch.Tensor] = {}
        self.cotangents: dict[str, torch.Tensor] = {}
        self.calls: Counter[str] = Counter()
        self.paths: list[str] = []
        self.within = False
        self.model = model

    def keep(self, name: str, x: torch.Tensor) -> None:
        if not x.is_floating_point():
            return
        number = self.calls[name]
        self.calls[name] += 1
        name = f"{name}#{number}" if number else name
        self.values[name] = x.detach().clone()
        if x.requires_grad:
            x.register_hook(lambda grad: self.cotangents.__setitem__(name, grad.detach().clone()))

    def inner(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if not tolerances.Rounding.composing:
            self.keep(f"{self.paths[-1] if self.paths else ''}:{name}", x)
        return x

    def _before(self, path: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            self.paths.append(path)
            if args and isinstance(args[0], torch.Tensor):
                self.keep(f"{path}:input", args[0])

        return hook

    def _after(self, path: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            for name, leaf in named_leaves(out).items():
                if isinstance(leaf, torch.Tensor):
                    self.keep(f"{path}/{name}" if name else path, leaf)
            self.paths.pop()

        return hook

    @contextlib.contextmanager
    def recording(self, own: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for path, module in self.model.named_modules():
                if path:
                    stack.callback(module.register_forward_pre_hook(self._before(path), with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self._after(path), with_kwargs=True).remove)
            for place, name in _torch_functions():
                stack.enter_context(mock.patch.object(place, name, self._function(name, getattr(place, name))))
            if own:
                stack.enter_context(_own_points("torch_ref", self.inner))
            for name in ("_in_projection_packed", "_in_projection"):
                original = getattr(torch.nn.functional, name)
                stack.enter_context(mock.patch.object(torch.nn.functional, name, self._projections(original)))
            stack.enter_context(mock.patch.object(_Recorder, "active", self))
            yield

    def _projections(self, original: Any) -> Any:
        """nn.MultiheadAttention projects in a function: its three results stand for the modules that others have there."""
        return lambda *args, **kwargs: [self.inner(name, x) for name, x in zip(PROJECTIONS, original(*args, **kwargs), strict=True)]

    def _function(self, name: str, original: Any) -> Any:
        if name == "scaled_dot_product_attention":
            return functools.partial(_attention, self)
        names = ("scores", "map") if name == "softmax" else ("activation:input", "activation")

        @functools.wraps(original)
        def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.within:  # one function of these calls another
                return original(x, *args, **kwargs)
            self.inner(names[0], x)
            self.within = True
            try:
                out = original(x, *args, **kwargs)
            finally:
                self.within = False
            return self.inner(names[1], out)

        return call


def _torch_functions() -> Iterator[tuple[Any, str]]:
    functional = torch.nn.functional
    yield from ((functional, name) for name in ("softmax", "scaled_dot_product_attention", *ACTIVATIONS) if hasattr(functional, name))
    yield from ((place, name) for place in (torch, torch.Tensor) for name in ("softmax", "relu", "sigmoid", "tanh"))


def _attention(
    recorder: _Recorder,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention in the steps that its documentation gives, so that scores and map are seen."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    recorder.inner("scores", scores)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0).detach())
    weights = recorder.inner("map", weights / weights.sum(-1, keepdim=True))
    return torch.dropout(weights, dropout_p, dropout_p > 0) @ value


@contextlib.contextmanager
def recording(model: torch.nn.Module, *, own: bool = False) -> Iterator[_Recorder]:
    """Within it the model's calls fill .values, and backward passes .cotangents, by the names of the taps."""
    recorder = _Recorder(model)
    with recorder.recording(own):
        yield recorder


# Which tap of theirs stands for which of ours.


def pair(ours: list[str], theirs: list[str], modules: Mapping[str, str]) -> dict[str, str]:
    """{our tap: theirs}, both in the order of computation, by the modules that stand for each other ({our path: their path}).

    Functions in modules that have no counterpart are paired between the taps around them, where both sides call as many.
    """
    known, found = set(theirs), {}
    for name in ours:
        path, suffix = _split(name)
        if path in modules:  # the only result of one may be the first of several of the other
            spellings = (suffix, suffix.removeprefix("/0") if suffix.startswith("/0") else f"/0{suffix}")
            match = next((modules[path] + spelling for spelling in spellings if modules[path] + spelling in known), None)
            if match is not None:
                found[name] = match
    found |= _between(ours, theirs, found)
    return {name: found[name] for name in ours if name in found}


def _between(ours: list[str], theirs: list[str], anchors: dict[str, str]) -> dict[str, str]:
    place = {name: number for number, name in enumerate(theirs)}
    groups: dict[tuple[int, str], list[str]] = {}
    reached = -1
    for name in ours:
        if name in anchors:
            reached = max(reached, place[anchors[name]])
        elif (kind := _function(name)) is not None:
            groups.setdefault((reached, kind), []).append(name)
    taken, ends, found = set(anchors.values()), sorted(place[name] for name in anchors.values()), {}
    for (start, kind), names in groups.items():
        end = next((number for number in ends if number > start), len(theirs))
        candidates = [name for name in theirs[start + 1 : end] if name not in taken and _function(name) == kind]
        if len(candidates) == len(names):
            found.update(zip(names, candidates, strict=True))
    return found


def path_of(name: str) -> str:
    """The module that a tap belongs to."""
    return _split(name)[0]


def _split(name: str) -> tuple[str, str]:
    """PATH and what follows it."""
    read = re.match(r"([^:/#]*)(.*)", name)
    assert read is not None
    return read[1], read[2]


def _function(name: str) -> str | None:
    read = re.search(r":(scores|map|activation:input|activation)(#\d+)?$", name)
    return read[1] if read else None


def pair_modules(our_leaves: Mapping[str, tuple[str, ...]], their_leaves: list[str], their_modules: list[str]) -> dict[str, str]:
    """{our module: theirs} that hold the same weights. our_leaves: {our leaf: the names, or the named parts, of theirs that fill it}."""
    ours: dict[str, set[str]] = {}
    for name, parts in our_leaves.items():
        for path in _ancestors(name):
            ours.setdefault(path, set()).update(parts)
    whole = {part.partition("[")[0]: set() for parts in our_leaves.values() for part in parts}
    for parts in our_leaves.values():
        for part in parts:
            whole[part.partition("[")[0]].add(part)
    theirs: dict[str, set[str]] = {}
    for name in their_leaves:
        for path in _ancestors(name):
            if path in their_modules:
                theirs.setdefault(path, set()).update(whole.get(name, ()))
    by_set: dict[frozenset[str], tuple[list[str], list[str]]] = {}
    for side, sets in enumerate((ours, theirs)):
        for path, held in sets.items():
            if held:
                by_set.setdefault(frozenset(held), ([], []))[side].append(path)
    found = {"": ""}
    for path in ours:  # a module of ours for a third of a fused one
        thirds = {re.fullmatch(r"(?:(.*)\.)?in_proj_(?:weight|bias)\[(\d)/3\]", part) for part in ours[path]}
        places = {(third[1] or "", third[2]) for third in thirds if third is not None}
        if len(places) == 1 and None not in thirds:
            ((owner, index),) = places
            found[path] = f"{owner}:{PROJECTIONS[int(index)]}"
    for mine, others in by_set.values():
        mine, others = (sorted(paths, key=lambda path: path.count(".") if path else -1) for paths in (mine, others))
        # the innermost stand for each other, then those around them
        found.update((a, b) for a, b in zip(reversed(mine), reversed(others), strict=False) if a)
    return found


def _ancestors(name: str) -> Iterator[str]:
    parts = name.split(".")[:-1]
    for length in range(len(parts), -1, -1):
        yield ".".join(parts[:length])


# The numbers.


def hidden(scores: np.ndarray) -> np.ndarray:
    """Scores with −∞ wherever the weight is 0 for certain: −∞, the lowest number and −1e9 all hide."""
    with np.errstate(invalid="ignore"):
        return np.where(scores - scores.max(-1, keepdims=True, initial=-np.inf) < UNDERFLOW, -np.inf, scores)


def in_layout(
    theirs: np.ndarray, ours: tuple[int, ...], channels_first: bool, reference: np.ndarray | None = None
) -> tuple[Any, tuple[int, ...]] | None:
    """(axes, shape) that bring their array to our shape by a permutation and a split or merge of neighbours; None where nothing does.

    reference: our array, which decides where several permutations of other shapes fit.
    """
    if theirs.size != math.prod(ours):
        return None
    same = tuple(range(theirs.ndim))
    last = (0, *range(2, theirs.ndim), 1) if theirs.ndim > 2 else same
    order = [axes for axes in ((last, same) if channels_first and theirs.ndim > 3 else (same,)) if tuple(theirs.shape[i] for i in axes) == ours]
    if len(order) > 1 and reference is not None:  # as many channels as rows and columns
        order.sort(key=lambda axes: float(np.max(np.abs(theirs.transpose(axes) - reference), initial=0.0)))
    if order:
        return order[0], ours

    def fits(axes: tuple[int, ...]) -> bool:
        cuts = [set(np.cumprod(shape).tolist()) for shape in (tuple(theirs.shape[i] for i in axes), ours)]
        return cuts[0] <= cuts[1] or cuts[1] <= cuts[0]

    options = (
        [axes for axes in (*((last,) if channels_first else ()), same, last, *itertools.permutations(same)) if fits(axes)] if theirs.ndim <= 5 else []
    )
    if len(options) > 1 and reference is not None:
        with np.errstate(invalid="ignore"):
            distance = lambda axes: float(np.max(np.nan_to_num(np.abs(theirs.transpose(axes).reshape(ours) - reference), nan=0.0), initial=0.0))
            options.sort(key=distance)  # stable: the first of equals
    return (options[0], ours) if options else None


def model_classes(modules: Mapping[str, Any]) -> set[type]:
    return {type(module) for module in modules.values() if isinstance(module, nnx.Module)}
