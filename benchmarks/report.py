"""What a run is shown as: a Markdown table, and a table on the terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import results, worker


def write(folder: Path) -> dict[str, Any]:
    """results.json and results.md of what the folder holds."""
    document = results.collect(folder)
    worker.write_json(folder / "results.json", document)
    (folder / "results.md").write_text(markdown(document), encoding="utf-8")
    return document


HEADER = ("case", "JAX ms", "torch ms", "torch ran", "ratio", "95% interval", "of the roof", "rejected")


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table: figures, or the error."""
    if row["error"]:
        return [row["name"], *("–",) * 3, row["error"], *("",) * 3]
    jax, torch = (row[side][row["best"][side]] for side in results.SIDES)
    share = " / ".join(f"{100 * row['share'][side]:.0f}%" for side in results.SIDES) if row["share"] else ""
    return [
        row["name"],
        milliseconds(jax["ms"]),
        milliseconds(torch["ms"]),
        row["best"]["torch"],
        f"{row['ratio']:.2f}",
        f"{row['low']:.2f} – {row['high']:.2f}",
        share,
        f"{jax['rejected']} + {torch['rejected']}",
    ]


def milliseconds(ms: float) -> str:
    """Three digits."""
    return f"{ms:.3g}" if ms < 1000 else f"{ms:,.0f}"


def headline(document: Mapping[str, Any]) -> list[str]:
    """What the figures hold for, a line each."""
    machine, setup, settings = document["machine"], document["setup"], document["settings"]
    lines = [
        f"{machine['cpu']}, {machine['cpus']} processors, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}",
        f"commit {machine['commit']}, {machine['date']}, load before {machine['load'][0]:.1f}",
        f"{settings['level']}: {settings['processes']} processes a side, {settings['seconds']} s a case in each",
    ]
    for side, found in setup.items():
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        lines.append(f"{side}: {versions}, Python {found['python']}, {found['device']}, {found['threads']} threads, precision {found['precision']}")
    flags = ", ".join(f"{name}={value}" for name, value in machine["environment"].items())
    lines.append(f"environment: {flags or 'nothing set'}")
    ceilings = document["ceilings"]
    roofs = [f"{value / 1e9:.0f} GFLOP/s {dtype}" for dtype, value in ceilings["flops"].items()]
    roofs += [f"{ceilings['bytes'] / 1e9:.1f} GB/s copied"] if ceilings["bytes"] else []
    return [*lines, *([f"measured ceilings: {', '.join(roofs)}"] if roofs else [])]


def markdown(document: Mapping[str, Any]) -> str:
    lines = ["# JAX against torch", "", *(f"- {line}" for line in headline(document)), ""]
    lines += ["A ratio above 1 means that JAX is faster than the faster of torch's variants.", ""]
    lines += [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in cells(row))} |" for row in document["rows"]]
    return "\n".join(lines) + "\n"


def table(document: Mapping[str, Any]) -> Table:
    made = Table(caption="ratio above 1: JAX is faster than the faster of torch's variants", caption_justify="left")
    for name in HEADER:
        made.add_column(name, justify="left" if name in ("case", "torch ran") else "right", overflow="fold", no_wrap=name == "case")
    for row in document["rows"]:
        made.add_row(*cells(row))
    return made


def changes_table(found: list[dict[str, Any]]) -> Table:
    made = Table()
    for name in ("case", "before", "now", ""):
        made.add_column(name, overflow="fold")
    shown = lambda numbers: "–" if numbers is None else f"{numbers[0]:.2f} ({numbers[1]:.2f} – {numbers[2]:.2f})"
    for change in found:
        made.add_row(
            change["name"], shown(change["old"]), shown(change["new"]), change["verdict"] + (f": {change['error']}" if change["error"] else "")
        )
    return made
