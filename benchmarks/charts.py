"""The pictures of a run: ratios with their intervals, a roofline, and how time grows with length, size and batch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks import results
from benchmarks.cases import SIZES, parameters
from flax_gpt.figures import parts, style

SIDES = {"jax": "JAX", "torch": "torch"}
COLOURS = dict(zip(SIDES, parts.COLOURS, strict=False))
MARKERS = ("o", "s", "^", "D", "v")
Row = Mapping[str, Any]


def draw(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """ratios.png, roofline.png and scaling.png, each where there is something to show."""
    rows = [row for row in document["rows"] if row["ratio"] is not None]
    drawn = []
    with style.labels(""):
        for name, picture in (("ratios", ratios), ("roofline", roofline), ("scaling", scaling)):
            figure = picture(rows, document)
            if figure is not None:
                drawn.append(style.save(figure, folder / f"{name}.png"))
    return drawn


def trained(document: Mapping[str, Any], path: Path) -> Path:
    """A bar a framework for each case of a trained model, with the spread of its samples."""
    rows = document["rows"]
    with style.labels(""):
        figure = Figure(figsize=(8.5, 3.6), layout="constrained")
        for axes, row, title in zip(figure.subplots(1, len(rows)), rows, ("a training step", "writing"), strict=True):
            axes.set_title(f"{title}, {row['amount']:.0f} tokens")
            if row["error"]:
                axes.set_axis_off()
                axes.text(0.5, 0.5, row["error"], ha="center", va="center", wrap=True, transform=axes.transAxes)
                continue
            for place, (side, label) in enumerate(SIDES.items()):
                found = row[side][row["best"][side]]
                spread = [[found["ms"] - min(found["ms"], found["q1"])], [max(found["ms"], found["q3"]) - found["ms"]]]
                bar = axes.bar(place, found["ms"], 0.6, yerr=spread, capsize=4, color=COLOURS[side], label=label)
                axes.bar_label(bar, [f"{found['ms']:.3g} ms"], padding=3)
            axes.set_xticks(range(len(SIDES)), [f"{label}, {row['best'][side]}" for side, label in SIDES.items()])
            axes.set(ylabel="ms", xlabel=f"ratio {row['ratio']:.2f}, 95%: {results.interval(row['low'], row['high'])}")
            axes.margins(y=0.18)
            parts.tidy(axes)
        figure.suptitle("The trained model in both frameworks, outputs compared first")
        return style.save(figure, path)


def ratios(rows: Sequence[Row], document: Mapping[str, Any]) -> Figure | None:
    """A bar a case from 1 to its ratio, with the interval."""
    if not rows:
        return None
    figure = Figure(figsize=(9.5, 1.6 + 0.26 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(len(rows))[::-1]
    ratio, low, high = (np.array([row[name] for row in rows], float) for name in ("ratio", "low", "high"))
    colours = [parts.COLOURS[2] if a > 1 else parts.COLOURS[1] if b < 1 else "#999999" for a, b in zip(low, high, strict=True)]
    low, high = (np.where(np.isnan(end), ratio, end) for end in (low, high))  # grey, without a line
    axes.barh(places, ratio - 1, left=1, height=0.66, color=colours, alpha=0.75)
    axes.errorbar(ratio, places, xerr=[ratio - low, high - ratio], fmt="none", ecolor="black", elinewidth=1, capsize=2.5)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    left, right = min(0.5, low.min() * 0.9), max(2.0, high.max() * 1.1)
    axes.set_xlim(left, right * (right / left) ** 0.13)
    plain(axes.xaxis, [x for x in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if left <= x <= right])
    for place, value, end in zip(places, ratio, high, strict=True):
        axes.text(max(end, 1) * 1.03, place, f"{value:.2f}", va="center", fontsize=8)
    axes.set_yticks(places, [row["name"] for row in rows], fontsize=8)
    axes.set_ylim(-0.8, len(rows) - 0.2)
    axes.grid(axis="x", alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("time of torch's faster variant / time of JAX: above 1 JAX is faster\nlines: 95% bootstrap interval over processes")
    figure.suptitle("JAX against torch, one machine, one run", fontsize=12)
    return figure


def roofline(rows: Sequence[Row], document: Mapping[str, Any]) -> Figure | None:
    """FLOP/s against FLOPs a byte under the measured ceilings (Williams et al. 2009)."""
    flops, memory = document["ceilings"]["flops"], document["ceilings"]["bytes"]
    shown = [row for row in rows if row["flops"] and row["bytes"] and row["case"]["dtype"] in flops]
    if not shown or not memory:
        return None
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    intensity = np.geomspace(min(row["flops"] / row["bytes"] for row in shown) / 4, max(row["flops"] / row["bytes"] for row in shown) * 2, 200)
    lines: dict[str, Any] = {}
    for (dtype, peak), dash in zip(flops.items(), ("-", "--"), strict=False):
        axes.plot(intensity, np.minimum(intensity * memory, peak) / 1e9, dash, color="#555555", linewidth=1.3)
        above = peak == max(flops.values())  # two roofs may all but coincide
        place = dict(y=peak / 1e9 * 1.04, va="bottom") if above else dict(y=peak / 1e9 / 1.04, va="top")
        axes.text(intensity[-1], s=f"{dtype}: {peak / 1e9:.0f} GFLOP/s in a matrix product", ha="right", fontsize=8.5, **place)
    kinds = list(dict.fromkeys((row["case"]["kind"], row["case"]["dtype"]) for row in shown))
    for row in shown:
        kind = (row["case"]["kind"], row["case"]["dtype"])
        for side, label in SIDES.items():
            speed = row["flops"] / row[side][row["best"][side]]["ms"] / 1e6
            face = COLOURS[side] if kind[1] == "float32" else "white"
            (point,) = axes.plot(row["flops"] / row["bytes"], speed, MARKERS[kinds.index(kind) % len(MARKERS)], color=COLOURS[side],
                                 markerfacecolor=face, markersize=6, alpha=0.85)  # fmt: skip
            lines.setdefault(f"{label}, {' '.join(kind)}", point)
    axes.set(xscale="log", yscale="log", xlabel="model FLOPs a byte of inputs and results", ylabel="GFLOP/s")
    plain(axes.xaxis)
    plain(axes.yaxis)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(list(lines.values()), list(lines), fontsize=8.5, loc="best", framealpha=0.9)
    figure.suptitle(f"Under the roof: measured products, and copies at {memory / 1e9:.1f} GB/s", fontsize=12)
    return figure


def scaling(rows: Sequence[Row], document: Mapping[str, Any]) -> Figure | None:
    """Attention against T, the training step against parameters and devices, decoding against the batch: the panels with two points or more."""
    panels: list[tuple[str, str, str, list[tuple[str, list[Row]]], Callable[[Row], float], Callable[[Row, float], float]]] = []
    attention = [row for row in rows if row["case"]["kind"] == "attention"]
    plain_heads = [
        row for row in attention if row["case"]["causal"] and row["case"]["kv_heads"] == row["case"]["heads"] and row["case"]["width"] == 64
    ]
    for dtype in ("float32", "bfloat16"):
        series = [
            ("forward and backward" if backward else "forward", pick(plain_heads, dtype=dtype, backward=backward)) for backward in (False, True)
        ]
        panels.append((f"causal attention, {dtype}", "T", "ms", series, lambda row: row["case"]["length"], lambda row, ms: ms))
    steps = [row for row in rows if row["case"]["kind"] == "train"]
    train = pick(steps, devices=1)
    series = [(f"dropout {rate:g}", pick(train, dropout=rate)) for rate in (0.1, 0.0)]
    size = lambda row: parameters(SIZES[row["case"]["size"]].config)
    panels.append(("training step", "parameters", "tokens/s", series, size, lambda row, ms: row["amount"] / ms * 1e3))
    measured = dict.fromkeys((row["case"]["size"], row["case"]["dropout"]) for row in steps if row["case"]["devices"] > 1)
    series = [(f"size {size}, dropout {rate:g}", pick(steps, size=size, dropout=rate)) for size, rate in measured]
    panels.append(("training step on several devices", "devices", "ms", series, lambda row: row["case"]["devices"], lambda row, ms: ms))
    decode = [row for row in rows if row["case"]["kind"] == "generate" and row["case"]["new"] > 1 and not row["case"]["recompute"]]
    series = [(f"size {size}", pick(decode, size=size, prompt=16)) for size in SIZES]
    panels.append(("decoding", "batch", "tokens/s", series, lambda row: row["case"]["batch"], lambda row, ms: row["amount"] / ms * 1e3))
    panels = [panel for panel in panels if any(len(found) > 1 for _, found in panel[3])]
    if not panels:
        return None
    figure = Figure(figsize=(10, 4.2 * ((len(panels) + 1) // 2)), layout="constrained")
    grid = figure.subplots((len(panels) + 1) // 2, min(2, len(panels)), squeeze=False).flat
    for axes, (title, xlabel, ylabel, series, x, y) in zip(grid, panels, strict=False):
        curves(axes, [(name, found) for name, found in series if len(found) > 1], x, y)
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    for axes in list(grid)[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle("How cost grows; torch: the faster of its variants", fontsize=12)
    return figure


def pick(rows: Sequence[Row], **fields: Any) -> list[Row]:
    return [row for row in rows if all(row["case"][name] == value for name, value in fields.items())]


def curves(axes: Axes, series: list[tuple[str, list[Row]]], x: Callable[[Row], float], y: Callable[[Row, float], float]) -> None:
    """A line a side and series over both scales logarithmic, with the spread of the processes."""
    ticks: set[float] = set()
    for (name, rows), style_, marker in zip(series, ("-", "--", ":", "-."), MARKERS, strict=False):
        rows = sorted(rows, key=x)
        ticks |= {x(row) for row in rows}
        for side, label in SIDES.items():
            best = [row[side][row["best"][side]] for row in rows]
            middle = [y(row, found["ms"]) for row, found in zip(rows, best, strict=True)]
            low, high = ([y(row, end(found["processes"])) for row, found in zip(rows, best, strict=True)] for end in (min, max))
            places = [x(row) for row in rows]
            axes.plot(places, middle, style_, marker=marker, markersize=4.5, color=COLOURS[side], label=f"{label}, {name}", linewidth=1.4)
            axes.fill_between(places, low, high, color=COLOURS[side], alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log")
    plain(axes.xaxis, sorted(ticks))
    plain(axes.yaxis)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5)


def plain(axis: Any, ticks: Sequence[float] | None = None) -> None:
    """Numbers written out on a logarithmic axis."""
    if ticks is not None:
        axis.set_ticks(ticks)
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
