"""What a comparison found: rows in the order of computation, a verdict, a table for the terminal, and JSON.

The JSON form (`Report.to_json`, read again by `Report.from_json`) is one object:

    schema            1: raised when a field changes its meaning or goes; fields may be added under the same number
    title, summary    text
    ok                whether something was compared and nothing left its budget
    first_divergence  index into rows, or null
    environment       {name: text}: versions, precision settings, devices
    rows              the fields of `Row` by name, with `ok`, `reason` and, inside `worst`, {"index", "value", "expected"}

Numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity".
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.table import Table

from flax_gpt.errors import InputError, require
from parity_tests.metrics import Worst

SCHEMA = 1
"""Version of the JSON form."""

DTYPES = ("exact", "float64", "float32", "bfloat16", "float16")
"""From what must be the same to the coarsest rounding."""

KINDS = ("weights", "tap", "output", "loss", "cotangent", "gradient", "step", "tokens")
"""What a row compares, in the order of computation: weights and buffers; a value inside the model; a result; the loss; the gradient with respect to a
value inside the model; that with respect to a parameter or an input; parameters and moments after optimizer steps; generated tokens."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One compared tensor in one dtype. Errors are distances from the float64 value over its largest element.

    A tensor that is zero in theory has nothing but rounding in it: its errors stand over the size of the terms that cancelled.
    """

    name: str
    dtype: str
    """One of DTYPES; "exact" where bits or tokens are compared."""
    errors: Mapping[str, float]
    """Largest relative error of each program, by its name."""
    grades: Mapping[str, float]
    """Errors in units of the worst that the simulated rounding shows; see tolerances.py."""
    limits: Mapping[str, float]
    """What each program's grade may reach."""
    budget: float
    """The error of grade 1 at its largest element, on the scale of `errors`."""
    note: str = ""
    """Why the row fails when no numbers could be compared."""
    kind: str = "output"
    """One of KINDS."""
    component: str = ""
    """The part of the model that the tensor belongs to, as a dotted path of ours; empty for the whole."""
    shape: tuple[int, ...] = ()
    worst: Mapping[str, Worst] = dataclasses.field(default_factory=dict)
    """The element with each program's largest error."""
    ulps: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The error of that element in units in the last place of `dtype` at its float64 value."""
    cosines: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Of the angle to the float64 value; left out for a tensor that is zero in theory."""
    divergences: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """For logits: the mean Kullback–Leibler divergence from the float64 distribution, in nats."""
    top_k: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """For logits: the share of the five most likely tokens that agree with the float64 value's."""
    nonfinite: int = 0
    """Elements that are NaN or infinite in all programs alike, where the case says that they may be."""
    diagnosis: str = ""
    """The known fault that explains the difference, when there is one."""
    device: str = ""
    """Where JAX computed it: "cpu", "gpu" or "tpu"; empty where that was not said."""

    @property
    def ok(self) -> bool:
        return not self.note and all(grade <= self.limits[program] for program, grade in self.grades.items())

    @property
    def reason(self) -> str:
        """Why the row failed; empty when it did not."""
        if self.ok:
            return ""
        if self.note:
            return self.note
        over = [
            f"{program} {self.grades[program]:.3g} of {self.limits[program]:.3g}"
            for program in self.grades
            if not self.grades[program] <= self.limits[program]
        ]
        why = "over budget: " + ", ".join(over)
        return f"{why}; the programs differ, not the rounding" if self.dtype == "float64" else why

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON, with `ok` and `reason`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["worst"] = {program: worst._asdict() for program, worst in self.worst.items()}
        return _plain(fields | {"ok": self.ok, "reason": self.reason})

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of to_dict; fields that a later version added are passed over."""
        known = {field.name: fields[field.name] for field in dataclasses.fields(cls) if field.name in fields}
        known["shape"] = tuple(known.get("shape", ()))
        known["worst"] = {
            program: Worst(tuple(worst["index"]), float(worst["value"]), float(worst["expected"]))
            for program, worst in known.get("worst", {}).items()
        }
        for name in ("errors", "grades", "limits", "ulps", "cosines", "divergences", "top_k"):
            known[name] = {program: float(number) for program, number in known.get(name, {}).items()}
        return cls(**known | {"budget": float(known["budget"])})


class Report:
    """Rows in the order of computation."""

    def __init__(self, title: str = "", environment: Mapping[str, str] | None = None):
        self.title = title
        self.environment = dict(environment or {})
        """Versions, precision settings and devices, by name."""
        self.rows: list[Row] = []
        self.maps: dict[str, dict[str, np.ndarray]] = {}
        """{name of a row: {program: attention map (B, H, T, S)}} in the narrowest dtype compared, for pictures; not part of the JSON form."""
        self.axes: dict[str, tuple[list[list[str]], list[list[str]]]] = {}
        """{name of a map: (the tokens that ask, those that are asked)}, a list for each of B; not part of the JSON form."""

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing left its budget."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def first_divergence(self) -> Row | None:
        """The first row that left its budget, in the order of computation; the narrower dtypes last: before them the programs are compared."""
        failed = [row for row in self.rows if not row.ok]
        return min(failed, key=lambda row: (max(DTYPES.index(row.dtype), 1), KINDS.index(row.kind)), default=None)

    def summary(self) -> str:
        """One line: how many tensors were compared, the first that diverged, and the fault that explains it."""
        first = self.first_divergence
        if first is None:
            return f"{len(self.rows)} comparisons, all within their budget" if self.rows else "nothing was compared"
        failed = sum(not row.ok for row in self.rows)
        text = f"{failed} of {len(self.rows)} comparisons left their budget, first {first.name} ({first.dtype}): {first.reason}"
        return f"{text}; {first.diagnosis}" if first.diagnosis else text

    def failures(self) -> str:
        """A line for each row that left its budget."""
        return "\n".join([self.summary(), *(f"{row.name} ({row.dtype}): {row.reason}" for row in self.rows if not row.ok)])

    def explanation(self) -> str:
        """What to look at first: the first difference, what it looks like, and the values before it that agree, the nearest last."""
        first = self.first_divergence
        if first is None:
            return self.summary()
        rows = [row for row in self.rows if row.dtype == first.dtype and row.kind == first.kind]
        clean = [row.name.partition("/")[2] for row in rows[: rows.index(first)]]
        worst = [f"{p} {w.value:.9g} for {w.expected:.9g} at {list(w.index)}" for p, w in first.worst.items()]
        lines = [
            f"first difference: {first.name} ({first.dtype}), {first.reason}",
            f"looks like: {first.diagnosis}" if first.diagnosis else "",
            f"worst element: {'; '.join(worst)}" if worst else "",
            f"agree before it: {_last(clean)}" if first.kind == "tap" and clean else "",
            f"{sum(not row.ok for row in self.rows)} of {len(self.rows)} comparisons differ",
        ]
        return "\n".join(filter(None, lines))

    def table(self) -> Table:
        """Name, worst relative error of each program, budget and verdict, one row a tensor and dtype."""
        programs = list(dict.fromkeys(program for row in self.rows for program in row.errors))
        table = Table(title=self.title or None, caption=self.summary())
        table.add_column("tensor", overflow="fold")
        table.add_column("dtype")
        for program in programs:
            table.add_column(program, justify="right")
        table.add_column("budget", justify="right")
        table.add_column("verdict")
        for row in self.rows:
            errors = [f"{row.errors[program]:.1e}" if program in row.errors else "" for program in programs]
            verdict = "[green]equal[/green]" if row.ok else f"[red]{row.reason}[/red]"
            table.add_row(row.name, row.dtype, *errors, f"{row.budget:.1e}", verdict)
        return table

    def print(self, console: Console | None = None) -> None:
        (console or Console()).print(self.table())

    def to_json(self) -> str:
        """The report in the form that the head of this file describes."""
        first = self.first_divergence
        fields = {
            "schema": SCHEMA,
            "title": self.title,
            "ok": self.ok,
            "summary": self.summary(),
            "first_divergence": None if first is None else next(i for i, row in enumerate(self.rows) if row is first),
            "environment": self.environment,
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(fields, ensure_ascii=False, allow_nan=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what to_json wrote. Raises InputError for another schema."""
        fields = json.loads(text)
        require(isinstance(fields, dict) and "rows" in fields, "report", text[:40], "must be the JSON form of a Report")
        require(fields.get("schema") == SCHEMA, "schema", fields.get("schema"), f"must be {SCHEMA}")
        report = cls(fields["title"], fields["environment"])
        report.rows = [Row.from_dict(row) for row in fields["rows"]]
        return report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes to_json() to a file, under a temporary name first. Raises InputError when its folder does not exist."""
        write_whole(pathlib.Path(path), self.to_json() + "\n")


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file under a temporary name and renames it. Raises InputError when its folder does not exist."""
    if not path.parent.is_dir():
        raise InputError("path", str(path), "must be a file in a folder that exists")
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _last(names: list[str]) -> str:
    """The nearest few of many, the nearest last."""
    return ", ".join(names) if len(names) <= 6 else f"{len(names) - 4} others, {', '.join(names[-4:])}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
