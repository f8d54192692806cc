"""What a run is shown as: a Markdown table, pictures, one HTML page that holds both, and a table on the terminal."""

import base64
import html
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import charts, results, worker

TITLE = "JAX against torch"
MEANING = "A ratio above 1 means that JAX is faster than the faster of torch's variants."


def write(folder: Path) -> dict[str, Any]:
    """results.json, results.md, the pictures and results.html of what the folder holds."""
    document = results.collect(folder)
    worker.write_json(folder / "results.json", document)
    (folder / "results.md").write_text(markdown(document), encoding="utf-8")
    (folder / "results.html").write_text(page(document, charts.draw(document, folder)), encoding="utf-8")
    return document


HEADER = ("case", "JAX ms", "torch ms", "torch ran", "ratio", "95% interval", "of the roof", "first run s", "memory MiB", "rejected")


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table: figures, JAX / torch where there are two, or the error."""
    if row["error"]:
        return [row["name"], *("–",) * 3, row["error"], *("",) * 5]
    jax, torch = (row[side][row["best"][side]] for side in results.SIDES)
    share = " / ".join(f"{100 * row['share'][side]:.0f}%" for side in results.SIDES) if row["share"] else ""
    return [
        row["name"],
        milliseconds(jax["ms"]),
        milliseconds(torch["ms"]),
        "; ".join([row["best"]["torch"], *(f"{variant} failed" for variant, found in row["torch"].items() if "error" in found)]),
        f"{row['ratio']:.2f}",
        results.interval(row["low"], row["high"]),
        share,
        " / ".join(f"{found['first_s'][0]:.1f}" for found in (jax, torch)),
        " / ".join("" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**20:.0f}" for found in (jax, torch)),
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
    if settings.get("keep_memory"):
        lines.append("memory: both sides keep what they freed")
    return [*lines, *([f"measured ceilings: {', '.join(roofs)}"] if roofs else [])]


def markdown(document: Mapping[str, Any]) -> str:
    lines = [f"# {TITLE}", "", *(f"- {line}" for line in headline(document)), ""]
    lines += [MEANING, ""]
    lines += [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in cells(row))} |" for row in document["rows"]]
    return "\n".join(lines) + "\n"


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child, td.error { text-align: left }
td.error { color: #a00 } img { max-width: 100%; margin: 1rem 0 }
"""


def page(document: Mapping[str, Any], pictures: list[Path]) -> str:
    """One file without references to others."""
    rows = []
    for row in document["rows"]:
        shown = [html.escape(cell) for cell in cells(row)]
        if row["error"]:
            rows.append(f'<tr><td>{shown[0]}</td><td class="error" colspan="{len(HEADER) - 1}">{html.escape(row["error"])}</td></tr>')
        else:
            rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in shown)}</tr>")
    images = [f'<img alt="{path.stem}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">' for path in pictures]
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{TITLE}</title><style>{STYLE}</style>',
            f"<h1>{TITLE}</h1><ul>{''.join(f'<li>{html.escape(line)}</li>' for line in headline(document))}</ul><p>{MEANING}</p>",
            *images,
            f"<table><tr>{''.join(f'<th>{name}</th>' for name in HEADER)}</tr>",
            *rows,
            "</table></html>\n",
        ]
    )


def table(document: Mapping[str, Any]) -> Table:
    made = Table(caption="ratio above 1: JAX is faster than the faster of torch's variants", caption_justify="left")
    for name in HEADER:
        made.add_column(name, justify="left" if name in ("case", "torch ran") else "right", overflow="fold", no_wrap=name == "case")
    for row in document["rows"]:
        made.add_row(*cells(row))
    return made


def compared(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What the two documents of a comparison are, and what besides the commit sets them apart."""
    memory = lambda document: "memory kept" if document["settings"].get("keep_memory") else "malloc's defaults"
    lines = [
        f"{name}: commit {document['machine']['commit']}, {document['machine']['date']}, {memory(document)}, {document['machine']['cpu']}"
        for name, document in (("before", old), ("now", new))
    ]
    facts: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "processor": lambda document: (document["machine"]["cpu"], document["machine"]["cpus"]),
        "use of memory": memory,
        "versions": lambda document: [found["versions"] for _, found in sorted(document["setup"].items())],
    }
    apart = [name for name, fact in facts.items() if fact(old) != fact(new)]
    return lines + [f"Not of one kind: they differ in {', '.join(apart)}, and ratios with that."] * bool(apart)


def changes_table(found: list[dict[str, Any]]) -> Table:
    made = Table()
    for name in ("case", "before", "now", "verdict"):
        made.add_column(name, overflow="fold")
    shown = lambda numbers: "–" if numbers is None else f"{numbers[0]:.2f} ({results.interval(*numbers[1:])})"
    for change in found:
        made.add_row(
            change["name"], shown(change["old"]), shown(change["new"]), change["verdict"] + (f": {change['error']}" if change["error"] else "")
        )
    return made
