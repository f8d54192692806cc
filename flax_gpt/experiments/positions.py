"""The sinusoidal table: all of it, some rows (positions) and some columns over positions."""

import dataclasses
import math

from flax_gpt.errors import require
from flax_gpt.experiments.result import Result
from flax_gpt.nn.positions import sinusoidal_table


@dataclasses.dataclass(frozen=True)
class Positions(Result):
    """pe[p, 2i] = sin(p / 10000^(2i/D)), pe[p, 2i+1] = cos(same angle)."""

    length: int
    d_model: int
    table: list[list[float]]
    """(length, D)."""
    rows: list[int]
    """Positions whose curves over the columns are drawn."""
    columns: list[int]
    """Columns whose curves over the positions are drawn, even: each a sine."""
    wavelengths: list[float]
    """Of those columns: 2π · 10000^(column / D) positions."""


def run(seed: int = 0, *, length: int = 100, d_model: int = 64) -> Positions:
    """Nothing is drawn: every seed gives the same. Raises InputError for a length below 2 and for an odd d_model, or one below 2."""
    require(length >= 2, "length", length, "must be at least 2")
    require(d_model >= 2, "d_model", d_model, "must be at least 2")
    table = sinusoidal_table(length, d_model)
    rows = sorted({length // 20, length // 4, length // 2})
    columns = sorted({0, d_model // 16 * 2, d_model // 8 * 2, d_model // 4 * 2} - {d_model})
    wavelengths = [2 * math.pi * 10000.0 ** (column / d_model) for column in columns]
    return Positions(seed, length, d_model, table.tolist(), rows, columns, wavelengths)
