"""Compares the named results of two programs, tensor by tensor, with the budget that `tolerances` derives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_gpt.config import OptimizerConfig
from flax_gpt.models.encoder import TinyTransformer
from flax_gpt.models.gpt import MiniGPT
from flax_gpt.training.loss import cross_entropy
from parity_tests import adapters, oracle, ports, tolerances
from parity_tests import names as naming
from parity_tests.judgement import Values, exact, judge
from parity_tests.report import Report

Program = Callable[..., Values]


def check(
    ours: Any,
    theirs: Any,
    inputs: Any,
    *,
    names: Mapping[Any, Any] | None = None,
    report: Report | None = None,
    dtypes: Sequence[str] = ("float32",),
    tapped: bool | None = None,
    **options: Any,
) -> Report:
    """Whether a JAX model and a torch module compute the same: outputs, a loss and every gradient, in float64 and in each of `dtypes`.

    ours: any nnx.Module; Linen(module, variables) or Function(f, params) of `parity_tests` for other programs. theirs: any torch.nn.Module.
    Copies of both run, in eval mode. In float64 both must agree to 1e-9 of the size of the terms that were added up, or the programs differ, not
    the rounding; in narrower dtypes each is held to what rounding explains; see tolerances.py.

    inputs: what both are called with: a mapping of keyword arguments, a tuple of positional ones, one array, or Inputs(*args, **kwargs).
    names: {our name: theirs}, in patterns, for what is not found by itself; see names.py.
    report: the rows go to it, or to a new one.
    dtypes: some of "float32", "bfloat16" and "float16".
    tapped: with the values inside, forward and backward; by default only where something differs.

    Options:
      their_inputs: what theirs is called with instead, such as images with the channels first.
      outputs: (f, g) that bring the outputs of ours and of theirs to one structure, whose arrays are compared by path.
      loss: (f, g) that take those outputs to the scalar that is differentiated; by default the sum of all elements times fixed random numbers.
      weights: "compare" (they must agree bit for bit) or "copy" (ours is run with theirs).
      train: leaves both in train mode.
      nonfinite: patterns of the names that may hold NaN or infinity, in both in the same places.
      logits: patterns of the outputs that are read as distributions over their last axis, by default those with "logits" in their name.

    A MiniGPT or TinyTransformer of both packages is instead given tokens (B, T) and targets ((B, T), or (B,) for a classifier), optionally
    lengths (B,), positions (B, T) and a dropout_key (2,), which turns dropout on; the loss is the cross-entropy, and maps are compared too.
    `names` is then {our parameter name: theirs}, and options are float32 results of further programs.

    Raises InputError for names that are unfilled, left over or ambiguous, all of them together, and for other bad arguments.
    """
    if not (isinstance(ours, MiniGPT | TinyTransformer) and isinstance(inputs, Mapping) and "targets" in inputs):
        return ports.check(ours, theirs, inputs, names=names, report=report, dtypes=dtypes, tapped=tapped, **options)
    report = Report() if report is None else report
    report.environment |= ports.environment()
    start = len(report.rows)
    batch = oracle.Batch.of(inputs)
    own, other = oracle.flax_weights(ours, names), oracle.torch_weights(theirs)
    exact(report, "weights", own, other)
    if not report.ok:
        return report
    models = {"float32": (ours, theirs), "float64": (oracle.in_float64(ours), oracle.in_float64(theirs))}
    kept: dict[str, Values] = {}

    def own_values(dtype: str) -> Values:
        kept[dtype] = oracle.flax_values(models[dtype][0], batch, names)
        return kept[dtype]

    def their_values(dtype: str) -> Values:
        kept[f"torch {dtype}"] = oracle.torch_values(models[dtype][1], batch)
        return kept[f"torch {dtype}"]

    check_programs(own_values, their_values, report=report, narrow="float32" in dtypes, **options)
    if "float32" in dtypes:
        report.maps = {
            name: {"flax": kept["float32"][name], "torch": kept["torch float32"][name]} for name in kept["float32"] if name.startswith("att")
        }
    for dtype in (dtype for dtype in dtypes if dtype != "float32"):
        rounded = {name: x.astype(dtype).astype(np.float32) if x.dtype == np.float32 else x for name, x in own.items()}
        truth = oracle.torch_model(ours.config, rounded, dtype="float64")
        deviations = tolerances.scatter(lambda truth=truth: oracle.torch_values(truth, batch), dtype=dtype)
        narrow = oracle.flax_model(ours.config, rounded, dtype=dtype), oracle.torch_model(ours.config, rounded, dtype=dtype)
        programs = {"flax": oracle.flax_values(narrow[0], batch, names), "torch": oracle.torch_values(narrow[1], batch)}
        report.maps = {name: {p: values[name] for p, values in programs.items()} for name in programs["flax"] if name.startswith("att")}
        judge(report, dtype, programs, oracle.torch_values(truth, batch), deviations)
    look_inside(report, start, dtypes, tapped, lambda dtype: _own_case(*models[dtype], batch))
    return report


def look_inside(report: Report, start: int, dtypes: Sequence[str], tapped: bool | None, case_of: Callable[[str], ports.Case]) -> None:
    """Adds the taps of a case, in float64 and, if it is among `dtypes`, in float32, to the rows from `start` on; `tapped` as in `check`."""
    for dtype in ("float64", *(["float32"] if "float32" in dtypes else [])):
        rows = [row for row in report.rows[start:] if row.dtype == dtype]
        if tapped or (tapped is None and not all(row.ok for row in rows)):
            first = next(i for i, row in enumerate(report.rows) if row is rows[0])
            ports.inside(report, case_of(dtype), dtype, None, first)
            if not all(row.ok for row in rows):
                break  # what narrower arithmetic does to programs that differ tells nothing


def _own_case(ours: Any, theirs: Any, batch: oracle.Batch) -> ports.Case:
    """A pair of this project's models as `ports` sees them, for their taps."""
    oracle.set_dropout(ours, batch.dropout_key)
    mine, other = adapters.NNX(ours, train=None), adapters.Torch(theirs, train=None)
    sources = naming.match(mine.leaves, other.leaves, other.aliases, None, mine.values(), other.values())
    loss = (
        lambda out: cross_entropy(out[0], jnp.asarray(batch.targets), None if batch.weights is None else jnp.asarray(batch.weights)),
        lambda out: oracle.torch_loss(out[0], batch),
    )
    inputs = adapters.Inputs(batch.tokens, **batch.options, return_attention=True)
    return ports.Case(mine, other, sources, inputs, inputs, loss=loss, own=True, prepare=lambda model: oracle.prepare_torch(model, batch.dropout_key))


def check_steps(
    ours: Any,
    theirs: Any,
    inputs: Mapping[str, Any],
    config: OptimizerConfig,
    steps: Sequence[int],
    *,
    narrow: bool = True,
    report: Report | None = None,
    **others: Values,
) -> Report:
    """Whether optimizer steps on one batch agree: losses, gradient norms, and each parameter and both of its moments after each number of `steps`.

    ours, theirs, inputs as in `check`; the models stay as they were. Without `narrow` only in float64. `others` are
    float32 results of further programs under the same names.
    """
    batch = oracle.Batch.of(inputs)
    models = {"float32": (ours, theirs), "float64": (oracle.in_float64(ours), oracle.in_float64(theirs))}
    return check_programs(
        lambda dtype: oracle.flax_steps(models[dtype][0], batch, config, steps),
        lambda dtype, powers=None: oracle.torch_steps(models[dtype][1], batch, config, steps, powers),
        has_powers=True,
        narrow=narrow,
        report=report,
        **others,
    )


def check_programs(
    ours: Program, theirs: Program, *, has_powers: bool = False, narrow: bool = True, report: Report | None = None, **others: Values
) -> Report:
    """Whether two programs compute the same, in float64 and in float32. Each takes a dtype's name and returns named arrays; `theirs` runs in torch.

    `others` are float32 results of further programs. `has_powers`: `theirs` also takes a generator for its `tolerances.RoundedPower`s. Without
    `narrow` only in float64.
    """
    report = Report() if report is None else report
    truth = theirs("float64")
    exact(report, "torch repeats itself", theirs("float64"), truth)
    deviations = tolerances.scatter(lambda: theirs("float64"))
    in_double = dict(deviations)
    if has_powers:
        powers = tolerances.scatter_powers(lambda generator: theirs("float64", generator))
        in_double = {name: deviations[name] + powers[name] for name in deviations}
    judge(report, "float64", {"flax": ours("float64")}, truth, in_double)
    if narrow:
        judge(report, "float32", {"flax": ours("float32"), "torch": theirs("float32")} | others, truth, deviations)
    return report
