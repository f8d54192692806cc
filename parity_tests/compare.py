"""Compares the named results of two programs, tensor by tensor, with the budget that `tolerances` derives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flax_gpt.config import OptimizerConfig
from parity_tests import oracle, tolerances
from parity_tests.report import Report, Row

Values = Mapping[str, np.ndarray]
Program = Callable[..., Values]


def check(
    ours: Any, theirs: Any, inputs: Mapping[str, Any], *, names: Mapping[str, str] | None = None, report: Report | None = None, **others: Values
) -> Report:
    """Whether an NNX model and a torch model compute the same: maps, logits, loss, gradient norm and every gradient, in float64 and in float32.

    ours, theirs: a model of `flax_gpt` and one of `torch_ref` (or of its interface), whose weights must already agree bit for bit.
    inputs: tokens (B, T) and targets ((B, T), or (B,) for a classifier), optionally lengths (B,), positions (B, T)
        and a dropout_key (2,), which turns dropout on.
    names: {our parameter name: theirs} where they differ. Rows go to `report`, or to a new one. `others` are float32 results of further programs.
    """
    report = Report() if report is None else report
    batch = oracle.Batch.of(inputs)
    own, other = oracle.flax_weights(ours, names), oracle.torch_weights(theirs)
    exact(report, "weights", own, other)
    if not report.ok:
        return report
    models = {"float32": (ours, theirs), "float64": (oracle.in_float64(ours), oracle.in_float64(theirs))}
    return check_programs(
        lambda dtype: oracle.flax_values(models[dtype][0], batch, names),
        lambda dtype: oracle.torch_values(models[dtype][1], batch),
        report=report,
        **others,
    )


def check_steps(
    ours: Any,
    theirs: Any,
    inputs: Mapping[str, Any],
    config: OptimizerConfig,
    steps: Sequence[int],
    *,
    report: Report | None = None,
    **others: Values,
) -> Report:
    """Whether optimizer steps on one batch agree: losses, gradient norms, and each parameter and both of its moments after each number of `steps`.

    ours, theirs, inputs as in `check`; the models stay as they were. `others` are float32 results of further programs under the same names.
    """
    batch = oracle.Batch.of(inputs)
    models = {"float32": (ours, theirs), "float64": (oracle.in_float64(ours), oracle.in_float64(theirs))}
    return check_programs(
        lambda dtype: oracle.flax_steps(models[dtype][0], batch, config, steps),
        lambda dtype, powers=None: oracle.torch_steps(models[dtype][1], batch, config, steps, powers),
        has_powers=True,
        report=report,
        **others,
    )


def check_programs(ours: Program, theirs: Program, *, has_powers: bool = False, report: Report | None = None, **others: Values) -> Report:
    """Whether two programs compute the same, in float64 and in float32. Each takes a dtype's name and returns named arrays; `theirs` runs in torch.

    `others` are float32 results of further programs. `has_powers`: `theirs` also takes a generator for its `tolerances.RoundedPower`s.
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
    judge(report, "float32", {"flax": ours("float32"), "torch": theirs("float32")} | others, truth, deviations)
    return report


def judge(report: Report, dtype: str, programs: Mapping[str, Values], truth: Values, deviations: Values, *, reference: str = "torch") -> None:
    """Adds a row for each name of `truth`: the errors of every program in `dtype`, against the float64 values.

    The first program is ours: where `reference` is among the others, ours is also held to its grade. These two must have every name of `truth`,
    further programs need not; a name that `truth` does not have fails.
    """
    total = [program for program in programs if program == reference or program == next(iter(programs))]
    for name in truth:
        found = {program: values[name] for program, values in programs.items() if name in values}
        notes = [f"missing from {program}" for program in total if program not in found]
        notes += [f"{p} has the shape {list(x.shape)}, not {list(truth[name].shape)}" for p, x in found.items() if x.shape != truth[name].shape]
        if notes:
            report.rows.append(Row(name, dtype, {}, {}, {}, 0.0, note="; ".join(notes)))
        else:
            report.rows.append(_row(name, dtype, found, truth[name], deviations[name], reference))
    for program, values in programs.items():
        for name in values:
            if name not in truth:
                report.rows.append(Row(name, dtype, {}, {}, {}, 0.0, note=f"only in {program}"))


def _row(name: str, dtype: str, results: Mapping[str, np.ndarray], truth: np.ndarray, deviations: np.ndarray, reference: str) -> Row:
    unit = tolerances.UNIT[dtype] / tolerances.UNIT["float32"]
    size, noise = _largest(truth), _largest(deviations)
    if noise >= size:  # zero in theory: the size of the terms that cancelled
        size = noise / tolerances.UNIT["float32"] or 1.0
    with np.errstate(invalid="ignore"):
        errors = {program: np.asarray(value, np.float64) - truth for program, value in results.items()}
    grades = {program: tolerances.grade(error, deviations, dtype) for program, error in errors.items()}
    limits = dict.fromkeys(results, tolerances.reference_limit())
    ours = next(iter(results))
    if reference in results and reference != ours:
        limits[ours] = tolerances.our_limit(grades[reference])
    return Row(name, dtype, {p: _largest(e) / size for p, e in errors.items()}, grades, limits, noise * unit / size)


def _largest(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), initial=0.0))


def exact(report: Report, name: str, ours: Values, theirs: Values) -> None:
    """Adds one row: whether both hold the same names with the same values, bit for bit."""
    names = [n for n in {**theirs, **ours} if n not in ours or n not in theirs or not np.array_equal(ours[n], theirs[n], equal_nan=True)]
    note = f"differs: {', '.join(names)}" if names else ""
    report.rows.append(Row(name, "exact", {}, {}, {}, 0.0, note=note))
