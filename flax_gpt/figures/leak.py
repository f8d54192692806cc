"""Why a decoder needs its mask."""

import math
import os
from pathlib import Path

from matplotlib.figure import Figure

from flax_gpt.experiments.leak import Leak
from flax_gpt.figures import parts, style


def draw(numbers: Leak, out_path: str | os.PathLike[str]) -> Path:
    """Both training curves, the held-out losses as trained and honest, and what each model writes."""
    decoders = {"with the causal mask": numbers.causal, "without it": numbers.bidirectional}
    guess = math.log(numbers.characters)
    with style.labels("".join([numbers.prompt, *(d.continuation for d in decoders.values())])) as label:
        figure = Figure(figsize=(12.5, 6.8), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=[3, 1])
        left, right, below = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, :])
        for colour, (name, decoder) in zip(parts.COLOURS, decoders.items(), strict=False):
            losses = decoder.train["loss"]
            left.plot(decoder.train["step"], losses, color=colour, linewidth=1.5, label=f"{name} (last {losses[-1]:.3f})")
        left.set(xlabel="step (optimizer updates)", ylabel="cross-entropy (nats a character)", title="Training loss", ylim=(0, 1.1 * guess))
        bars = {name: (d.held_out_loss, d.honest_loss) for name, d in decoders.items()}
        parts.bars(right, ["as in training:\nthe whole window is seen", "honest:\nonly what stands before is seen"], bars)
        right.set(ylabel="cross-entropy (nats a character)", title="Loss on held-out text", ylim=(0, 1.4 * max(guess, *map(max, bars.values()))))
        for axes in (left, right):
            axes.axhline(guess, color="#555555", linewidth=1, linestyle="--", label=f"guessing: ln {numbers.characters} = {guess:.2f}")
            parts.tidy(axes)
            axes.legend(frameon=False, loc="center right" if axes is left else "upper left")
        header = [
            "",
            f"after “{label(numbers.prompt)}”, the likeliest character at a time",
            "characters right,\nas in training",
            "characters right,\nhonest",
        ]
        rows = [[name, label(d.continuation), f"{d.held_out_accuracy:.0%}", f"{d.honest_accuracy:.0%}"] for name, d in decoders.items()]
        parts.table(below, header, rows, [0.18, 0.46, 0.18, 0.18])
        size = f"D = {numbers.d_model}, {numbers.num_layers} blocks, window {numbers.window}"
        figure.suptitle(f"The same decoder, the same weights at the start, the same batches ({size})")
        return style.save(figure, out_path)
