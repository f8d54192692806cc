"""What a comparison found: rows in the order of computation, a verdict, and a table for the terminal."""

import dataclasses
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Row:
    """One compared tensor in one dtype. Errors are distances from the float64 value over its largest element.

    A tensor that is zero in theory has nothing but rounding in it: its errors stand over the size of the terms that cancelled.
    """

    name: str
    dtype: str
    errors: Mapping[str, float]
    """Largest error of each program, by its name."""
    grades: Mapping[str, float]
    """Errors in units of the worst that the simulated rounding shows; see tolerances.py."""
    limits: Mapping[str, float]
    """What each program's grade may reach."""
    budget: float
    """The error of grade 1 at its largest element, on the scale of `errors`."""
    note: str = ""
    """Why the row fails when no numbers could be compared."""

    @property
    def ok(self) -> bool:
        return not self.note and all(grade <= self.limits[program] for program, grade in self.grades.items())


class Report:
    """Rows in the order of computation."""

    def __init__(self, title: str = ""):
        self.title = title
        self.rows: list[Row] = []

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing left its budget."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def first_divergence(self) -> Row | None:
        """The first row that left its budget, in the order of computation; the float32 ones last: before them the programs are compared."""
        failed = [row for row in self.rows if not row.ok]
        return min(failed, key=lambda row: row.dtype == "float32", default=None)

    def summary(self) -> str:
        """One line: how many tensors were compared, and the first that diverged."""
        first = self.first_divergence
        if first is None:
            return f"{len(self.rows)} comparisons, all within their budget" if self.rows else "nothing was compared"
        failed = sum(not row.ok for row in self.rows)
        return f"{failed} of {len(self.rows)} comparisons left their budget, first {first.name} ({first.dtype}): {_reason(first)}"

    def failures(self) -> str:
        """A line for each row that left its budget."""
        return "\n".join([self.summary(), *(f"{row.name} ({row.dtype}): {_reason(row)}" for row in self.rows if not row.ok)])

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
            verdict = "[green]equal[/green]" if row.ok else f"[red]{_reason(row)}[/red]"
            table.add_row(row.name, row.dtype, *errors, f"{row.budget:.1e}", verdict)
        return table

    def print(self, console: Console | None = None) -> None:
        (console or Console()).print(self.table())


def _reason(row: Row) -> str:
    if row.note:
        return row.note
    over = [
        f"{program} {row.grades[program]:.3g} of {row.limits[program]:.3g}" for program in row.grades if row.grades[program] > row.limits[program]
    ]
    return "over budget: " + ", ".join(over)
