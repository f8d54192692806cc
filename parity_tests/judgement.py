"""The verdict on named results: a row for each, with the errors of every program against the float64 values."""

import dataclasses
import fnmatch
import re
from collections.abc import Collection, Mapping

import numpy as np

from parity_tests import metrics, tolerances
from parity_tests.report import Report, Row

Values = Mapping[str, np.ndarray]


def judge(
    report: Report,
    dtype: str,
    programs: Mapping[str, Values],
    truth: Values,
    deviations: Values,
    *,
    reference: str = "torch",
    nonfinite: Collection[str] = (),
    logits: Collection[str] = ("logits",),
    limit: float | None = None,
) -> None:
    """Adds a row for each name of `truth`: the errors of every program in `dtype`, against the float64 values.

    The first program is ours: where `reference` is among the others, ours is also held to its grade (`our_limit`), or to `limit`, when that is given.
    These two must have every name of `truth`, further programs need not; a name that `truth` does not have fails. nonfinite: patterns of the names
    that may hold NaN and infinity, in all programs in the same places. logits: patterns of the names whose last axis is a distribution over tokens.
    """
    total = [program for program in programs if program == reference or program == next(iter(programs))]
    for name in truth:
        found = {program: values[name] for program, values in programs.items() if name in values}
        notes = [f"missing from {program}" for program in total if program not in found]
        notes += [f"{p} has the shape {list(x.shape)}, not {list(truth[name].shape)}" for p, x in found.items() if x.shape != truth[name].shape]
        if notes:
            report.rows.append(_empty(name, dtype, "; ".join(notes), truth[name].shape))
            continue
        row = _row(name, dtype, found, truth[name], deviations[name], reference, limit, _matches(name, nonfinite))
        report.rows.append(_with_distributions(row, found, truth[name]) if _matches(name, logits) and not row.nonfinite else row)
    for program, values in programs.items():
        for name in values:
            if name not in truth:
                report.rows.append(_empty(name, dtype, f"only in {program}", values[name].shape))


def _empty(name: str, dtype: str, note: str, shape: tuple[int, ...] = ()) -> Row:
    return Row(name, dtype, {}, {}, {}, 0.0, note, kind_of(name), component_of(name), shape)


def _row(
    name: str,
    dtype: str,
    results: Mapping[str, np.ndarray],
    truth: np.ndarray,
    deviations: np.ndarray,
    reference: str,
    limit: float | None,
    may_be_nonfinite: bool,
) -> Row:
    unit = tolerances.UNIT[dtype] / tolerances.UNIT["float32"]
    results = {program: np.asarray(value, np.float64) for program, value in results.items()}
    worst = {program: metrics.worst(value, truth) for program, value in results.items()}
    note, finite = _where_finite(results, truth, may_be_nonfinite)
    known = np.where(finite, truth, 0.0)
    deviations = np.where(finite, deviations, 0.0)
    size, noise = _largest(known), _largest(deviations)
    vanishes = noise >= size  # zero in theory: the size of the terms that cancelled
    if vanishes:
        size = noise / tolerances.UNIT["float32"] or 1.0
    with np.errstate(invalid="ignore"):
        errors = {program: np.where(finite, value - truth, 0.0) for program, value in results.items()}
    budget = tolerances.Budget(deviations)
    grades = {program: budget.grade(error, dtype) for program, error in errors.items()}
    limits = dict.fromkeys(results, tolerances.reference_limit())
    ours = next(iter(results))
    if limit is not None:
        limits[ours] = limit
    elif reference in results and reference != ours:
        limits[ours] = tolerances.our_limit(grades[reference], budget.floor)
    return Row(
        name,
        dtype,
        {p: _largest(e) / size for p, e in errors.items()},
        grades,
        limits,
        noise * unit / size,
        note,
        kind_of(name),
        component_of(name),
        truth.shape,
        worst={p: w for p, w in worst.items() if w is not None},
        ulps={p: abs(w.value - w.expected) / metrics.ulp(size if vanishes else w.expected, dtype) for p, w in worst.items() if w is not None},
        cosines={} if vanishes else {p: metrics.cosine(np.where(finite, x, 0.0), known) for p, x in results.items() if np.isfinite(x[finite]).all()},
        nonfinite=int(finite.size - np.count_nonzero(finite)) if not note else 0,
    )


def _where_finite(results: Mapping[str, np.ndarray], truth: np.ndarray, allowed: bool) -> tuple[str, np.ndarray]:
    """Why the row fails, if what is not finite does not stand in the same places everywhere or is not expected; and the places that are judged."""
    finite = np.isfinite(truth)
    if allowed and all(metrics.same(value, truth)[~finite].all() for value in results.values()):
        return "", finite
    if finite.all():
        return "", finite  # a grade of infinity is what fails
    place = list(map(int, np.argwhere(~finite)[0]))
    told = f"{truth[tuple(place)]} at {place} of the float64 value"
    return f"{told}, not the same in all programs" if allowed else f"{told}, where the case expects a number", finite


def _with_distributions(row: Row, results: Mapping[str, np.ndarray], truth: np.ndarray) -> Row:
    found = {program: value for program, value in results.items() if truth.ndim and np.isfinite(value.astype(np.float64)).all()}
    return dataclasses.replace(
        row,
        divergences={program: metrics.divergence(value, truth) for program, value in found.items()},
        top_k={program: metrics.top_k(value, truth) for program, value in found.items()},
    )


_KINDS = {"taps": "tap", "cotangents": "cotangent", "grads": "gradient", "grad_norm": "gradient", "loss": "loss", "weights": "step"}


def kind_of(name: str) -> str:
    """Which of report.KINDS a name stands for: by its first part, as this package writes them."""
    first = name.split("/")[0]
    return "step" if re.fullmatch(r"step\d+|losses|grad_norms", first) else _KINDS.get(first, "output")


def component_of(name: str) -> str:
    """The module of ours that a tensor belongs to: taps/PATH and taps/PATH:VALUE → PATH, grads/PATH.LEAF → PATH."""
    if "/" not in name or kind_of(name) == "output":
        return ""
    path = name.rsplit("/", 1)[1]
    return path.split(":")[0] if kind_of(name) in ("tap", "cotangent") else path.rpartition(".")[0]


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _largest(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), initial=0.0))


def exact(report: Report, name: str, ours: Values, theirs: Values) -> None:
    """Adds one row: whether both hold the same names with the same values, bit for bit."""
    names = [n for n in {**theirs, **ours} if n not in ours or n not in theirs or not np.array_equal(ours[n], theirs[n], equal_nan=True)]
    note = f"differs: {', '.join(names)}" if names else ""
    report.rows.append(Row(name, "exact", {}, {}, {}, 0.0, note=note, kind="weights"))
