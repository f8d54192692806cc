"""Holds any JAX model against any torch module: weights by name, outputs, a loss and every gradient, and, where they differ, the values inside."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import os
import platform
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks import machine
from flax_gpt.errors import require
from parity_tests import adapters, arithmetic, diagnosis, judgement, taps, tolerances
from parity_tests import names as naming
from parity_tests.adapters import Inputs, as_numpy, named_leaves
from parity_tests.report import Report, Row

Values = dict[str, np.ndarray]
Pair = tuple[Callable[..., Any], Callable[..., Any]]

DTYPES = ("float32", "bfloat16", "float16")

_QUICK = {"xla_backend_optimization_level": 0}  # a float64 run asks what the program means


@dataclasses.dataclass(eq=False)
class Case:
    """Both programs, and all that they are called with."""

    ours: Any
    theirs: adapters.Torch
    sources: Mapping[str, naming.Source]
    inputs: Inputs
    their_inputs: Inputs
    outputs: Pair = (lambda x: x, lambda x: x)
    loss: Pair | None = None
    own: bool = False
    """Whether the models are this project's, which tap more than their modules."""
    prepare: Callable[[torch.nn.Module], None] = lambda model: None
    """Called with theirs before each pass."""

    @functools.cached_property
    def values(self) -> Values:
        return self.ours.values()

    @functools.cached_property
    def input_axes(self) -> dict[str, tuple[int, ...]]:
        """{float input of both: the order of the axes in which theirs is ours}; without those that are not the same numbers."""
        ours, theirs = self.inputs.arrays(), self.their_inputs.arrays()
        found = {}
        for name in (name for name in ours if name in theirs and jnp.issubdtype(ours[name].dtype, jnp.floating)):
            orders = itertools.permutations(range(theirs[name].ndim))
            axes = next((axes for axes in orders if np.array_equal(theirs[name].transpose(axes), ours[name], equal_nan=True)), None)
            if axes is not None:
                found[name] = axes
        return found

    @functools.cached_property
    def trained(self) -> list[str]:
        return [name for name, leaf in self.ours.leaves.items() if leaf.trained and name in self.sources]

    def our_results(self, dtype: str, rounded: str | None = None) -> Values:
        """output or outputs/PATH, loss, grads/LEAF and grads/inputs.NAME of ours in `dtype`, of numbers that were rounded to `rounded` first."""
        with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision(arithmetic.precision(dtype)):
            call = self.ours.at(dtype, self.values)
            values, arrays = self._flax_numbers(dtype, rounded)
            if dtype == "float64":
                traced = taps.Traced(call, set(), values, self.inputs.replaced(arrays), wide=True)

            def outputs_of(values: Any, arrays: Any) -> Any:
                if dtype == "float64":
                    return self.outputs[0](traced(values, arrays, lambda name, value: value))
                inputs = self.inputs.replaced(arrays)
                return self.outputs[0](call(values, inputs.args, inputs.kwargs))

            def run(values: Any, buffers: Any, floats: Any, others: Any) -> Any:
                def loss_of(values: Any, floats: Any) -> Any:
                    out = outputs_of({**values, **buffers}, {**floats, **others})
                    return self._flax_loss(out), named_leaves(out)

                return jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(values, floats)

            compiled = jax.jit(run, compiler_options=_QUICK if dtype == "float64" else None)
            (loss, out), (grads, input_grads) = compiled(*self._split(values), *_floats(arrays))
        moved = {name: grad for name, grad in input_grads.items() if name in self.input_axes}
        return _named(out, loss, grads, moved)

    def our_taps(self, dtype: str, rounded: str | None = None) -> tuple[Values, Values]:
        """{tap: value} and {tap: cotangent} of ours, in the order of the forward computation."""
        # under a synonym: what jax.jit has traced under the first name, without marks, is traced again
        with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision(arithmetic.synonym(dtype)):
            call = self.ours.at(dtype, self.values)
            values, arrays = self._flax_numbers(dtype, rounded)
            inputs = self.inputs.replaced(arrays)
            traced = taps.Traced(call, taps.model_classes(self.ours.modules), values, inputs, own=self.own, wide=dtype == "float64")

            def run(zeros: Any, values: Any, arrays: Any) -> Any:
                def loss_of(zeros: Any) -> Any:
                    found: dict[str, Any] = {}

                    def tap(name: str, value: Any) -> Any:
                        found[name] = value + zeros[name]
                        return found[name]

                    out = self.outputs[0](traced(values, arrays, tap))
                    return self._flax_loss(out), found

                return jax.grad(loss_of, has_aux=True)(zeros)

            compiled = jax.jit(run, compiler_options=_QUICK if dtype == "float64" else None)
            cotangents, found = compiled(traced.zeros(), values, {name: jnp.asarray(array) for name, array in arrays.items()})
        order = list(traced.shapes)
        return {name: np.asarray(found[name]) for name in order}, {name: np.asarray(cotangents[name]) for name in order}

    def _flax_numbers(self, dtype: str, rounded: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
        cast = functools.partial(_cast, dtype=dtype, rounded=rounded)
        values = {name: jnp.asarray(cast(value)) for name, value in self.values.items()}
        return values, {name: jnp.asarray(cast(array)) for name, array in self.inputs.arrays().items()}

    def _split(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        trained = set(self.trained)
        return {n: v for n, v in values.items() if n in trained}, {n: v for n, v in values.items() if n not in trained}

    def _flax_loss(self, out: Any) -> Any:
        if self.loss is not None:
            return self.loss[0](out)
        terms = [
            jnp.sum(x * jnp.asarray(_projection(name, x.shape), x.dtype))
            for name, x in named_leaves(out).items()
            if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        return functools.reduce(lambda a, b: a + b, terms, jnp.zeros((), terms[0].dtype if terms else None))

    @functools.lru_cache(maxsize=4)  # noqa: B019 (a case lives as long as its check)
    def _torch_model(self, dtype: str, rounded: str | None) -> torch.nn.Module:
        return self.theirs.at(dtype, rounded)

    def their_results(self, dtype: str, rounded: str | None = None) -> Values:
        """The same of theirs, under our names and in our layout."""
        model = self._torch_model(dtype, rounded)
        out, loss, floats = self._torch_pass(model, dtype, rounded)
        theirs = self.theirs.gradients(model)
        grads = {name: self.sources[name].of(theirs) for name in self.trained}
        input_grads = {name: as_numpy(torch.zeros_like(x) if x.grad is None else x.grad) for name, x in floats.items()}
        return _named(out, loss, grads, {name: input_grads[name].transpose(axes) for name, axes in self.input_axes.items()})

    def their_taps(self, dtype: str, rounded: str | None = None) -> tuple[Values, Values]:
        """{tap: value} and {tap: cotangent} of theirs, under their names, in the order of the forward computation."""
        model = self._torch_model(dtype, rounded)
        with taps.recording(model, own=self.own) as recorder:
            self._torch_pass(model, dtype, rounded)
        numbers = lambda found: {name: as_numpy(x) for name, x in found.items()}
        return numbers(recorder.values), numbers(recorder.cotangents)

    def _torch_pass(
        self, model: torch.nn.Module, dtype: str, rounded: str | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad(set_to_none=True)
        self.prepare(model)
        arrays = {name: _tensor(array, dtype, rounded) for name, array in self.their_inputs.arrays().items()}
        floats = {name: x.requires_grad_() for name, x in arrays.items() if x.is_floating_point()}
        inputs = self.their_inputs.replaced(arrays)
        with taps.Wide() if dtype == "float64" else contextlib.nullcontext():
            out = self.outputs[1](model(*inputs.args, **inputs.kwargs))
            loss = self.loss[1](out) if self.loss is not None else self._torch_projection(out)
            if loss.requires_grad:
                loss.backward()
        return named_leaves(out), loss, floats

    def _torch_projection(self, out: Any) -> torch.Tensor:
        terms = [
            (x * torch.from_numpy(_projection(name, tuple(x.shape))).to(x.dtype)).sum()
            for name, x in named_leaves(out).items()
            if x.is_floating_point()
        ]
        return functools.reduce(lambda a, b: a + b, terms, torch.zeros((), dtype=terms[0].dtype if terms else None))


def _projection(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Fixed numbers that turn an output into a share of the default loss, so that every element of it has a gradient of its own."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)


def _cast(array: np.ndarray, dtype: str, rounded: str | None) -> np.ndarray:
    if jnp.issubdtype(array.dtype, jnp.floating):
        return (array if rounded is None else array.astype(jnp.dtype(rounded))).astype(jnp.dtype(dtype))
    return array if array.dtype != np.int64 or dtype == "float64" else array.astype(np.int32)


def _tensor(array: np.ndarray, dtype: str, rounded: str | None) -> torch.Tensor:
    if jnp.issubdtype(array.dtype, jnp.floating):
        wide = torch.from_numpy(np.asarray(array, np.float64))
        return (wide if rounded is None else wide.to(getattr(torch, rounded))).to(getattr(torch, dtype))
    return torch.from_numpy(np.array(array, np.int64 if np.issubdtype(array.dtype, np.integer) else None))


def _floats(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return {n: x for n, x in arrays.items() if is_float(x)}, {n: x for n, x in arrays.items() if not is_float(x)}


def _named(out: Mapping[str, Any], loss: Any, grads: Mapping[str, Any], input_grads: Mapping[str, Any]) -> Values:
    found = {f"outputs/{name}" if name else "output": value for name, value in out.items()} | {"loss": loss}
    found |= {f"grads/{name}": value for name, value in grads.items()} | {f"grads/inputs.{name}": value for name, value in input_grads.items()}
    return {name: as_numpy(value) for name, value in found.items()}


def check(
    ours: Any,
    theirs: torch.nn.Module,
    inputs: Any,
    *,
    names: naming.Table | None = None,
    report: Report | None = None,
    their_inputs: Any = None,
    loss: Pair | None = None,
    outputs: Pair | None = None,
    dtypes: Collection[str] = ("float32",),
    weights: str = "compare",
    train: bool = False,
    tapped: bool | None = None,
    nonfinite: Collection[str] = (),
    logits: Collection[str] = ("*logits*",),
) -> Report:
    """Whether a JAX model and a torch module compute the same; see `parity_tests.check`."""
    require(weights in ("compare", "copy"), "weights", weights, "must be 'compare' or 'copy'")
    require(bool(dtypes) and set(dtypes) <= set(DTYPES), "dtypes", list(dtypes), f"must be some of {', '.join(DTYPES)}")
    report = Report() if report is None else report
    report.environment |= environment()
    given = Inputs.of(inputs)
    mine, other = adapters.ours_of(ours, given, train=train), adapters.Torch(theirs, train=train)
    sources = naming.match(mine.leaves, other.leaves, other.aliases, names, mine.values(), other.values())
    case = Case(mine, other, sources, given, given if their_inputs is None else Inputs.of(their_inputs), outputs or Case.outputs, loss)
    if weights == "copy":
        theirs_now = other.values()
        case.values.update({name: source.of(theirs_now).astype(case.values[name].dtype) for name, source in sources.items()})
    else:
        same_weights(report, case)
        if not report.ok:
            return report
    compare(report, case, dtypes, nonfinite=nonfinite, logits=logits, tapped=tapped)
    return report


def same_weights(report: Report, case: Case) -> None:
    """One row when all agree bit for bit, else one for each that does not."""
    theirs = case.theirs.values()
    rows, telling = [], []
    for name, source in case.sources.items():
        mine, other = case.values[name], source.of(theirs)
        telling += [name] * bool(np.ptp(mine) > 0 or np.ptp(other) > 0)  # constants agree in fresh models too
        if not np.array_equal(mine, other.astype(mine.dtype), equal_nan=True):
            told = diagnosis.weights(mine, name, case.sources, theirs)
            component = name.rpartition(".")[0]
            note = f"differs from {source} of theirs"
            rows.append(Row(f"weights/{name}", "exact", {}, {}, {}, 0.0, note, "weights", component, mine.shape, diagnosis=told))
    if rows and len(rows) == len(telling) and not any(row.diagnosis for row in rows):
        note = "none agrees: fill ours from theirs, or pass weights='copy' to compare the programs alone"
        rows = [Row("weights", "exact", {}, {}, {}, 0.0, note, "weights")]
    report.rows += rows or [Row("weights", "exact", {}, {}, {}, 0.0, kind="weights")]


def compare(report: Report, case: Case, dtypes: Collection[str], *, nonfinite: Collection[str], logits: Collection[str], tapped: bool | None) -> None:
    """Adds the rows of float64 and of each dtype; tapped: with the values inside, by default where something failed."""
    judge = functools.partial(judgement.judge, report, nonfinite=nonfinite, logits=logits)
    for dtype in ("float64", *dtypes):
        rounded = None if dtype == "float64" or dtype == "float32" else dtype
        truth = case.their_results("float64", rounded)
        start = len(report.rows)
        if dtype == "float64":
            judgement.exact(report, "torch repeats itself", case.their_results("float64"), truth)
        arithmetic = "float32" if dtype == "float64" else dtype
        scattered = tolerances.scatter(lambda rounded=rounded: case.their_results("float64", rounded), dtype=arithmetic)
        if dtype == "float64":
            judge(dtype, {"flax": case.our_results(dtype)}, truth, scattered, limit=tolerances.agreement_limit())
        else:
            programs, refused = {}, []
            for program, run in (("flax", case.our_results), ("torch", case.their_results)):
                try:
                    programs[program] = run(dtype, rounded)
                except (ValueError, RuntimeError, NotImplementedError) as error:  # a framework that lacks an operation in half precision
                    refused.append(f"{program} cannot run in {dtype} on this device: {str(error).strip().splitlines()[0]}")
            if refused:
                report.rows.append(Row("program", dtype, {}, {}, {}, 0.0, "; ".join(refused)))
                continue
            judge(dtype, programs, truth, scattered)
        failed = not all(row.ok for row in report.rows[start:])
        if tapped or (tapped is None and failed):
            inside(report, case, dtype, rounded, start)
        if dtype == "float64" and failed:
            return  # what narrower arithmetic does to programs that differ tells nothing


def inside(report: Report, case: Case, dtype: str, rounded: str | None, start: int) -> None:
    """Adds the rows of the taps before those of `dtype`, from `start` on, and their cotangents behind, and says what the first fault looks like."""
    look = Inside.of(case, dtype, rounded)
    limit = tolerances.agreement_limit() if dtype == "float64" else None
    taken = []
    for ours, theirs, truth, scattered in look.sides():
        programs = {"flax": ours} if dtype == "float64" else {"flax": ours, "torch": theirs}
        side = Report()
        judgement.judge(side, dtype, programs, truth, scattered, limit=limit, nonfinite=("taps/*:scores*",), logits=())
        taken.append(side.rows)
    before, behind = taken
    stop = next((i for i in range(start, len(report.rows)) if report.rows[i].dtype not in (dtype, "exact")), len(report.rows))
    rows = before + report.rows[start:stop] + behind
    if dtype == "float64":
        failed = Report()
        failed.rows = rows
        first = failed.first_divergence
        if first is not None:
            told = diagnosis.explain(look, first.name.removeprefix("taps/") if first.kind == "tap" else None, rows)
            rows = [dataclasses.replace(row, diagnosis=told) if row is first else row for row in rows]
    report.rows[start:stop] = rows


@dataclasses.dataclass
class Inside:
    """The taps that both programs have, under our names and in our layout, in the order of the forward computation."""

    case: Case
    ours: Values
    theirs: Values
    """Empty in float64, where theirs are the truth."""
    truth: Values
    scattered: Values
    backward: tuple[Values, Values, Values, Values]
    """The same four for their cotangents."""

    @classmethod
    def of(cls, case: Case, dtype: str, rounded: str | None) -> "Inside":
        ours, our_cotangents = case.our_taps(dtype, rounded)
        truth, cotangent_truth = case.their_taps("float64", rounded)
        layouts = _layouts(case, ours, truth)

        def translated(found: Mapping[str, np.ndarray]) -> Values:
            return {name: move(found[theirs]) for name, (theirs, move) in layouts.items() if theirs in found}

        def both() -> Values:
            sides = zip(("", "d "), case.their_taps("float64", rounded), strict=True)
            return {f"{side}{name}": value for side, found in sides for name, value in found.items()}

        noise = tolerances.scatter(both, dtype="float32" if dtype == "float64" else dtype)
        scattered = [
            {name: np.stack([move(run) for run in noise[side + theirs]]) for name, (theirs, move) in layouts.items() if side + theirs in noise}
            for side in ("", "d ")
        ]
        narrow = ({}, {}) if dtype == "float64" else case.their_taps(dtype, rounded)
        forward = [{name: taps.hidden(x) if ":scores" in name else x for name, x in side.items()} for side in map(translated, (narrow[0], truth))]
        mine = {name: taps.hidden(ours[name]) if ":scores" in name else ours[name] for name in layouts}
        return cls(case, mine, *forward, scattered[0], (our_cotangents, translated(narrow[1]), translated(cotangent_truth), scattered[1]))

    def sides(self) -> Iterator[tuple[Values, ...]]:
        """(ours, theirs, truth, scattered) of what has a row: forward, and the cotangents in the order of the backward computation."""
        shown = self._shown()
        back = [name for name in reversed(self.backward[2]) if _whole(name)]
        for prefix, order, sides in (("taps", shown, (self.ours, self.theirs, self.truth, self.scattered)), ("cotangents", back, self.backward)):
            yield tuple({f"{prefix}/{name}": values[name] for name in order if name in values} for values in sides)

    def _shown(self) -> list[str]:
        """The taps that have rows: an input that is on both sides just what an earlier tap gave has none."""
        shown: list[str] = []
        same = lambda values, a, b: np.array_equal(values[a].ravel(), values[b].ravel())
        for name in self.truth:
            if ":input" not in name or not any(same(self.ours, name, one) and same(self.truth, name, one) for one in shown):
                shown.append(name)
        return shown


def _layouts(case: Case, ours: Values, theirs: Values) -> dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]]:
    """{our tap: (theirs, what brings its array to our layout)}, for those that have a counterpart of as many elements."""
    modules, found = modules_of(case), {}
    images = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in case.theirs.modules.values())
    for name, their_name in taps.pair(list(ours), list(theirs), modules).items():
        layout = taps.in_layout(theirs[their_name], ours[name].shape, images, ours[name])
        if layout is not None:
            axes, shape = layout
            found[name] = (their_name, lambda x, axes=axes, shape=shape: x.transpose(axes).reshape(shape))
    return found


def _whole(tap: str) -> bool:
    """Whether both sides see the cotangent of the value itself: what goes into a module, or comes out beside its result, may also go elsewhere."""
    return ":input" not in tap and re.search(r"/[1-9]\d*(#|$)", tap) is None


def modules_of(case: Case) -> dict[str, str]:
    """{our module: theirs} that stand for each other."""
    if case.own:
        return {path: path for path in case.ours.modules if path in case.theirs.modules}
    parts = {name: tuple(_canonical(case, part) for part in source.parts) for name, source in case.sources.items()}
    first = [name for name in case.theirs.leaves if name not in case.theirs.aliases]
    return taps.pair_modules(parts, first, list(case.theirs.modules))


def _canonical(case: Case, part: naming.Part) -> str:
    return str(dataclasses.replace(part, name=case.theirs.aliases.get(part.name, part.name)))


def environment() -> dict[str, str]:
    """Versions, precision settings and devices."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "torch", "numpy")}
    return {
        "python": platform.python_version(),
        **versions,
        "jax devices": ", ".join(sorted({f"{device.platform} {device.device_kind}" for device in jax.devices()})),
        "torch device": "cpu",
        "matmul precision": f"jax {arithmetic.precision()}, torch {torch.get_float32_matmul_precision()}",
        "machine": f"{platform.system()} {platform.machine()}, {machine.cpu()}, {os.cpu_count()} processors",
    }
