"""Train and held-out loss against the step, from a run's metrics.jsonl."""

import json
import math
import os
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from flax_gpt.errors import InputError, require
from flax_gpt.figures import style

LOG_RATIO = 20
"""Largest over smallest loss from which a logarithmic axis shows more than a linear one."""

SERIES = {"train_loss": ("train", "#4477aa"), "held_out_loss": ("held out", "#cc3311")}


def read_metrics(path: str | os.PathLike[str]) -> dict[str, list[tuple[int, float]]]:
    """{"train_loss" | "held_out_loss": [(step, loss), …]}. A last line without its end, as a killed run leaves it, is passed over.

    Raises InputError when the file is missing, is not UTF-8, or a line is no JSON object with a step.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("metrics", str(path), f"cannot be read: {error}") from None
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in SERIES}
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            row: Any = json.loads(line)
            for name in SERIES.keys() & row.keys():
                found[name].append((int(row["step"]), float(row[name])))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InputError("metrics", str(path), f"line {number} must be a JSON object with step and a loss") from None
    return found


def plot(series: dict[str, list[tuple[int, float]]]) -> Figure:
    """The figure of what `read_metrics` returns, with at least one finite loss in it."""
    losses = [loss for points in series.values() for _, loss in points if math.isfinite(loss)]
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in series.items():
        finite = [point for point in points if math.isfinite(point[1])]
        if not finite:
            continue
        label, colour = SERIES[name]
        step, lowest = min(finite, key=lambda point: point[1])
        note = f"lowest {lowest:.3f} at step {step:,}" if name == "held_out_loss" else f"last {finite[-1][1]:.3f}"
        marker = "o" if name == "held_out_loss" or len(points) == 1 else None
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.4, marker=marker, markersize=4, label=f"{label} ({note})")
    if min(losses) > 0 and max(losses) / min(losses) > LOG_RATIO:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set(xlabel="step (optimizer updates)", ylabel="cross-entropy (nats a token)", title="Loss")
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def draw(metrics_path: str | os.PathLike[str], out_path: str | os.PathLike[str]) -> Path:
    """Draws both curves and returns the picture's path. The loss is in nats a token; the axis is logarithmic when the losses span a factor of 20.

    Raises InputError as `read_metrics`, and when the file holds no finite loss.
    """
    series = read_metrics(metrics_path)
    found = any(math.isfinite(loss) for points in series.values() for _, loss in points)
    require(found, "metrics", str(metrics_path), "holds no loss yet")
    with style.labels(""):
        return style.save(plot(series), out_path)
