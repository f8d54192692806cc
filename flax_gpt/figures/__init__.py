"""Pictures, one file a family. Those of EXPERIMENTS are drawn from numbers that need no run; `draw` leaves both, NAME.png and NAME.json."""

import importlib
import os
from pathlib import Path

from flax_gpt.errors import require

EXPERIMENTS: dict[str, str] = {
    "scaling": "Draws what dividing the scores by √d_k does to the softmax.",
    "rank": "Draws the spectra of attention maps, for one head and for eight.",
    "visible": "Draws how much of a sequence each position sees under the causal mask.",
    "masks": "Draws every kind of mask.",
    "mask-gradients": "Draws what masks do to gradients.",
    "positions": "Draws the sinusoidal positions: table, rows and columns.",
    "scores": "Draws scores beside the weights that a causal mask and the softmax make of them.",
    "leak": "Trains a decoder with and without the causal mask, and draws why the lower loss is worth nothing.",
    "sharing": "Trains decoders whose queries, keys and values share projections, and draws what each reaches.",
}
"""Name → what it does. Each has a module in flax_gpt.experiments with `run(seed)` and one here with `draw(numbers, out_path)`."""


def draw(name: str, out_folder: str | os.PathLike[str], seed: int = 0) -> list[Path]:
    """Runs an experiment and writes NAME.png and NAME.json, whose paths it returns.

    Raises InputError for an unknown name or a seed outside [0, 2**32).
    """
    require(name in EXPERIMENTS, "NAME", name, f"must be one of {', '.join(EXPERIMENTS)}")
    module = name.replace("-", "_")
    numbers = importlib.import_module(f"flax_gpt.experiments.{module}").run(seed)
    folder = Path(out_folder)
    picture = importlib.import_module(f"flax_gpt.figures.{module}").draw(numbers, folder / f"{name}.png")
    return [picture, numbers.save(folder / f"{name}.json")]
