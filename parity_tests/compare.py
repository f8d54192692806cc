"""Compares the named results of two programs, tensor by tensor, with the budget that `tolerances` derives."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity_tests import oracle, tolerances
from parity_tests.report import Report, Row

Values = Mapping[str, np.ndarray]


def check(ours: Any, theirs: Any, inputs: Mapping[str, Any], *, names: Mapping[str, str] | None = None, report: Report | None = None) -> Report:
    """Whether an NNX model and a torch model compute the same: maps, logits, loss, gradient norm and every gradient, in float64 and in float32.

    ours, theirs: a model of `flax_gpt` and one of `torch_ref` (or of its interface), whose weights must already agree bit for bit.
    inputs: tokens (B, T) and targets ((B, T), or (B,) for a classifier), optionally lengths (B,) and a dropout_key (2,), which turns dropout on.
    names: {our parameter name: theirs} where they differ. Rows go to `report`, or to a new one.
    """
    report = Report() if report is None else report
    batch = oracle.Batch.of(inputs)
    own, other = oracle.flax_weights(ours, names), oracle.torch_weights(theirs)
    exact(report, "weights", own, other)
    if not report.ok:
        return report
    wide = oracle.in_float64(theirs)
    truth = oracle.torch_values(wide, batch)
    deviations = tolerances.scatter(lambda: oracle.torch_values(wide, batch))
    judge(report, "float64", {"flax": oracle.flax_values(oracle.in_float64(ours), batch, names)}, truth, deviations)
    judge(report, "float32", {"flax": oracle.flax_values(ours, batch, names), "torch": oracle.torch_values(theirs, batch)}, truth, deviations)
    return report


def judge(report: Report, dtype: str, programs: Mapping[str, Values], truth: Values, deviations: Values, *, reference: str = "torch") -> None:
    """Adds a row for each name of `truth`: the errors of every program in `dtype`, against the float64 values.

    The first program is ours: where `reference` is among the others, ours is also held to its grade.
    """
    for name in truth:
        missing = [program for program, values in programs.items() if name not in values]
        wrong = [p for p, values in programs.items() if name in values and values[name].shape != truth[name].shape]
        if missing or wrong:
            shapes = ", ".join(f"{p} {list(programs[p][name].shape)} for {list(truth[name].shape)}" for p in wrong)
            report.rows.append(Row(name, dtype, {}, {}, {}, 0.0, note=f"missing from {', '.join(missing)}" if missing else f"shape: {shapes}"))
            continue
        report.rows.append(_row(name, dtype, {p: values[name] for p, values in programs.items()}, truth[name], deviations[name], reference))
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
    names = [n for n in {**theirs, **ours} if n not in ours or n not in theirs or not np.array_equal(ours[n], theirs[n])]
    note = f"differs: {', '.join(names)}" if names else ""
    report.rows.append(Row(name, "exact", {}, {}, {}, 0.0, note=note))
