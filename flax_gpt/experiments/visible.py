"""How much of a sequence each position sees under the causal mask."""

import dataclasses

import numpy as np

from flax_gpt import masks
from flax_gpt.errors import require
from flax_gpt.experiments.result import Result


@dataclasses.dataclass(frozen=True)
class Visible(Result):
    """Counts of keys, each position's own among them."""

    length: int
    """T."""
    counts: list[int]
    """A number a position."""
    mean: float
    """(T + 1) / 2."""
    smallest: int
    largest: int


def run(seed: int = 0, *, length: int = 10) -> Visible:
    """Nothing is drawn: every seed gives the same. Raises InputError for a length below 1."""
    require(length >= 1, "length", length, "must be at least 1")
    counts = np.asarray(masks.visible_counts(masks.causal_mask(length)))
    return Visible(seed, length, counts.tolist(), float(counts.mean()), int(counts.min()), int(counts.max()))
