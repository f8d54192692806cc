"""A report as one HTML page that asks the network for nothing: verdicts, values inside, attention maps, every row, and the environment."""

import base64
import hashlib
import html
import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from parity_tests.report import DTYPES, KINDS, Report, Row, write_whole

BUDGET = 16 * 2**20
"""Bytes of maps in a page, before they are written in base64; of further items of the batch nothing is kept, and the page says so."""

SIDE = 128
"""Tokens of a map along either axis: of longer ones the part around the largest difference is kept."""

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem;color:#1b1f24;background:#fff}
table{border-collapse:collapse;margin:.5rem 0}th,td{padding:.15rem .6rem;border-bottom:1px solid #e3e6ea;text-align:left;vertical-align:top}
th{background:#f5f6f8}td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}td.name{overflow-wrap:anywhere}
.ok{color:#116329}.bad{color:#b3261e;font-weight:600}.banner{padding:.8rem 1rem;border-left:6px solid;background:#f5f6f8}
.banner.ok{border-color:#2da44e}.banner.bad{border-color:#b3261e}tr.first td{background:#fff0ee}pre{white-space:pre-wrap;margin:.4rem 0}
.bar{display:inline-block;height:.7em;background:#2166ac}.bar.over{background:#b3261e}
.track{display:inline-block;width:160px;border-right:2px solid #1b1f24}
.maps{display:flex;gap:1.2rem;flex-wrap:wrap}.maps figure{margin:0}.maps canvas{cursor:zoom-in;border:1px solid #e3e6ea;display:block}
dialog{max-width:96vw;max-height:94vh;overflow:auto;border:1px solid #888}summary{cursor:pointer;font-weight:600;margin:.6rem 0}
select,input{font:inherit}#at{min-height:1.5em;font-variant-numeric:tabular-nums}
"""

SCRIPT = r"""
"use strict";
const maps = JSON.parse(document.getElementById("maps").textContent);
const get = id => document.getElementById(id);
function floats(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}
const SEQUENTIAL = [[247, 251, 255], [158, 202, 225], [49, 130, 189], [8, 48, 107]];
const DIVERGING = [[33, 102, 172], [146, 197, 222], [247, 247, 247], [244, 165, 130], [178, 24, 43]];
function colour(stops, share) {
  const x = Math.min(Math.max(share, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(x), stops.length - 2), f = x - i;
  return "rgb(" + stops[i].map((a, k) => Math.round(a + f * (stops[i + 1][k] - a))).join(",") + ")";
}
const shown = t => t === " " ? "\u2423" : t === "\n" ? "\u21b5" : t === "\t" ? "\u21e5" : t;
function panels() {
  const map = maps[get("map").value], item = +get("item").value, head = +get("head").value;
  const [, H, T, S] = map.shape, start = (item * H + head) * T * S;
  const [ours, theirs] = map.values.map(v => v.slice(start, start + T * S));
  const difference = Float64Array.from(ours, (x, i) => x - theirs[i]);
  const top = Math.max(...[ours, theirs].map(v => v.reduce((a, b) => b > a ? b : a, 0)), 1e-300);
  const far = difference.reduce((a, b) => Math.max(a, Math.abs(b)), 0);
  const rows = map.rows[item], columns = map.columns[item];
  const panel = (title, values, stops, low, high) => ({title, values, stops, low, high, T, S, rows, columns});
  return [panel(map.programs[0], ours, SEQUENTIAL, 0, top), panel(map.programs[1], theirs, SEQUENTIAL, 0, top),
    panel(far ? "difference" : "difference: none", difference, DIVERGING, -far, far)];
}
function draw(canvas, p, cell) {
  const margin = 46, bar = 34, c = canvas.getContext("2d"), high = p.T * cell, wide = p.S * cell;
  canvas.width = margin + wide + 8; canvas.height = margin + high + bar;
  c.fillStyle = "#fff"; c.fillRect(0, 0, canvas.width, canvas.height);
  const share = v => p.high > p.low ? (v - p.low) / (p.high - p.low) : p.stops === DIVERGING ? 0.5 : 0;
  for (let i = 0; i < p.T; i++) for (let j = 0; j < p.S; j++) {
    c.fillStyle = colour(p.stops, share(p.values[i * p.S + j]));
    c.fillRect(margin + j * cell, margin + i * cell, cell, cell);
  }
  const font = Math.max(9, Math.min(13, cell)), every = Math.ceil((font + 1) / cell);
  c.fillStyle = "#1b1f24"; c.font = font + "px sans-serif"; c.textBaseline = "middle"; c.textAlign = "right";
  for (let i = 0; i < p.T; i += every) c.fillText(shown(p.rows[i]).slice(0, 6), margin - 4, margin + (i + 0.5) * cell);
  for (let j = 0; j < p.S; j += every) {
    c.save(); c.translate(margin + (j + 0.5) * cell, margin - 4); c.textAlign = "left";
    if (p.columns[j].length > 1) c.rotate(-Math.PI / 2); else c.textAlign = "center";
    c.fillText(shown(p.columns[j]).slice(0, 6), 0, p.columns[j].length > 1 ? 0 : -font / 2); c.restore();
  }
  const length = Math.min(wide, 160);
  for (let x = 0; x < length; x++) { c.fillStyle = colour(p.stops, x / length); c.fillRect(margin + x, margin + high + 6, 1, 8); }
  c.fillStyle = "#1b1f24"; c.font = "11px sans-serif"; c.textAlign = "left";
  c.fillText(p.low.toPrecision(2) + " … " + p.high.toPrecision(2), margin, margin + high + 24);
  canvas.onmousemove = e => {
    const box = canvas.getBoundingClientRect();
    const j = Math.floor((e.clientX - box.left - margin) / cell), i = Math.floor((e.clientY - box.top - margin) / cell);
    const inside = i >= 0 && i < p.T && j >= 0 && j < p.S;
    const text = inside ? `${p.title}: ${shown(p.rows[i])} (${i}) → ${shown(p.columns[j])} (${j}): ${p.values[i * p.S + j].toPrecision(9)}` : "";
    get("at").textContent = text; get("zoomat").textContent = text;
  };
}
function refresh() {
  const box = get("panels"); box.replaceChildren();
  for (const p of panels()) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), canvas = document.createElement("canvas");
    caption.textContent = p.title; figure.append(caption, canvas); box.append(figure);
    draw(canvas, p, Math.max(2, Math.floor(320 / Math.max(p.T, p.S))));
    canvas.onclick = () => {
      get("zoomtitle").textContent = p.title;
      draw(get("zoomed"), p, Math.max(16, Math.floor(640 / Math.max(p.T, p.S)))); get("zoom").showModal();
    };
  }
}
function options(select, names) {
  select.replaceChildren(...names.map((name, i) => { const o = document.createElement("option"); o.value = i; o.textContent = name; return o; }));
}
function choose() {
  const map = maps[get("map").value];
  options(get("item"), Array.from({length: map.shape[0]}, (_, i) => i)); options(get("head"), Array.from({length: map.shape[1]}, (_, i) => i + 1));
  get("kept").textContent = map.kept; refresh();
}
if (maps.length) {
  for (const map of maps) map.values = map.values.map(floats);
  options(get("map"), maps.map(map => map.name));
  get("map").onchange = choose; get("item").onchange = refresh; get("head").onchange = refresh;
  get("close").onclick = () => get("zoom").close();
  get("zoom").onclick = e => { if (e.target === get("zoom")) get("zoom").close(); };
  choose();
}
function filter() {
  const text = get("find").value.toLowerCase(), failed = get("failed").checked;
  for (const row of document.querySelectorAll("#rows tbody tr"))
    row.hidden = (failed && row.dataset.ok === "1") || !row.textContent.toLowerCase().includes(text);
}
get("find").oninput = filter; get("failed").onchange = filter;
"""


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Writes `render(report)` to a file, under a temporary name first. Raises InputError when its folder does not exist."""
    write_whole(pathlib.Path(path), render(report))


def render(report: Report) -> str:
    """The page as text. What the report names is escaped, and no other script than the page's own may run in it."""
    allowed = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    title = _text(report.title or "Parity report")
    verdict = "ok" if report.ok else "bad"
    return "".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>",
            f'<div class="banner {verdict}"><b>{"✓ equal" if report.ok else "✗ different"}</b> {_text(report.summary())}',
            "" if report.ok else f"<pre>{_text(report.explanation())}</pre>",
            "</div><h2>Verdicts</h2>",
            _verdicts(report.rows),
            "<h2>The chain of values inside, in the order of computation</h2>",
            _chains(report),
            "<h2>Attention maps</h2>",
            _maps_section(report),
            "<h2>Every comparison</h2>",
            _rows(report.rows, report.first_divergence),
            "<h2>Versions, precision, hardware</h2><table>",
            *(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in report.environment.items()),
            f'</table><script type="application/json" id="maps">{_json(_maps(report))}</script><script>{SCRIPT}</script></body></html>\n',
        ]
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _json(value: Any) -> str:
    """JSON that cannot end the script element which holds it."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")


def _column(row: Row) -> str:
    return f"{row.dtype} on {row.device}" if row.device else row.dtype


def _verdicts(rows: Iterable[Row]) -> str:
    """A row for each component, a column for each dtype and device."""
    cells: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        cells.setdefault(row.component or "the whole model", {}).setdefault(_column(row), []).append(row)
    columns = list(dict.fromkeys(column for found in cells.values() for column in found))

    def cell(found: list[Row]) -> str:
        bad = sum(not row.ok for row in found)
        if not found:
            return "<td></td>"
        return f'<td class="bad">✗ {bad} of {len(found)}</td>' if bad else f'<td class="ok">✓ {len(found)}</td>'

    body = [f'<tr><td class="name">{_text(name)}</td>{"".join(cell(found.get(c, [])) for c in columns)}</tr>' for name, found in cells.items()]
    return f"<table id='verdicts'><tr><th>component</th>{''.join(f'<th>{_text(c)}</th>' for c in columns)}</tr>{''.join(body)}</table>"


def _share(row: Row) -> float:
    """The largest grade over what it may reach: beyond 1 the row fails."""
    return max((grade / row.limits[program] for program, grade in row.grades.items()), default=0.0)


def _chains(report: Report) -> str:
    first, parts = report.first_divergence, []
    for column in dict.fromkeys(map(_column, report.rows)):
        chain = [row for row in report.rows if _column(row) == column and row.kind in ("tap", "output", "loss", "cotangent")]
        chain.sort(key=lambda row: KINDS.index(row.kind))
        if not any(row.kind == "tap" for row in chain):
            continue
        opened = " open" if first is None or _column(first) == column else ""
        broken, body = next((i for i, row in enumerate(chain) if not row.ok), len(chain)), []
        for number, row in enumerate(chain):
            share, errors = _share(row), ", ".join(f"{p} {e:.1e}" for p, e in row.errors.items())
            # from a millionth of what is allowed, to all of it
            length = 100 * min(max(1 + math.log10(share) / 6, 0.01), 1) if 0 < share < math.inf else 100 if share else 0
            clean = "✓ clean" if number < broken else "✓ within its budget"
            told = ("▶ first divergence: " if row is first else "✗ ") + row.reason if not row.ok else clean
            body.append(
                f'<tr class="{"first" if row is first else ""}"><td class="n">{number + 1}</td><td class="name">{_text(row.name)}</td>'
                f'<td class="n">{_text(errors)}</td><td><span class="track"><span class="bar{"" if row.ok else " over"}" style="width:{length:.0f}%">'
                f'</span></span></td><td class="n">{share:.2g}</td><td class="{"ok" if row.ok else "bad"}">{_text(told)}'
                f"{'<br>' + _text(row.diagnosis) if row.diagnosis else ''}</td></tr>"
            )
        head = "<tr><th></th><th>value</th><th>relative error</th><th>share of what is allowed, logarithmic</th><th></th><th>verdict</th></tr>"
        parts.append(f'<details class="chain"{opened}><summary>{_text(column)}</summary><table>{head}{"".join(body)}</table></details>')
    return "".join(parts) or "<p>The values inside were not looked at.</p>"


def _rows(rows: Iterable[Row], first: Row | None) -> str:
    body = []
    for row in rows:
        per = lambda numbers, form: _text("  ".join(f"{program} {number:{form}}" for program, number in numbers.items()))
        worst = "; ".join(f"{program} {list(worst.index)}" for program, worst in row.worst.items())
        verdict = "✓" if row.ok else f"✗ {row.reason}"
        cells = [per(row.errors, ".1e"), per(row.grades, ".3g"), per(row.ulps, ".3g"), per(row.cosines, ".9f"), per(row.divergences, ".1e")]
        body.append(
            f'<tr data-ok="{int(row.ok)}" class="{"first" if row is first else ""}"><td class="name">{_text(row.name)}</td><td>{_text(row.kind)}</td>'
            f"<td>{_text(_column(row))}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}<td>{_text(worst)}</td>"
            f'<td class="{"ok" if row.ok else "bad"}">{_text(verdict)}{"<br>" + _text(row.diagnosis) if row.diagnosis else ""}</td></tr>'
        )
    names = ("tensor", "kind", "dtype", "relative error", "grade", "ULP", "cosine", "KL", "worst at", "verdict")
    return (
        '<details><summary>All rows</summary><p><input id="find" placeholder="part of a name"> <label><input type="checkbox" id="failed"> '
        f'failures only</label></p><table id="rows"><thead><tr>{"".join(f"<th>{name}</th>" for name in names)}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></details>"
    )


def _maps_section(report: Report) -> str:
    if not report.maps:
        return "<p>The report holds no maps.</p>"
    narrowest = max((row.dtype for row in report.rows), key=DTYPES.index, default="exact")
    return (
        f"<p>As computed in {_text(narrowest)}, the narrowest of the dtypes compared.</p>"
        '<p><label>map <select id="map"></select></label> <label>item of the batch <select id="item"></select></label> <label>head '
        '<select id="head"></select></label> <span id="kept"></span></p><div class="maps" id="panels"></div><p id="at"></p>'
        "<p>Rows ask, columns are asked. Click a map to enlarge it.</p><noscript>The maps are drawn by a script.</noscript>"
        '<dialog id="zoom"><button id="close">close</button> <b id="zoomtitle"></b> <span id="zoomat"></span><canvas id="zoomed"></canvas></dialog>'
    )


def _maps(report: Report) -> list[dict[str, Any]]:
    """What the script draws: the maps of two programs as base64 of little-endian float32, with the tokens of both axes."""
    found, share = [], BUDGET // max(len(report.maps), 1)
    for name, programs in report.maps.items():
        values = [np.asarray(value, np.float32) for value in programs.values()][:2]
        if len(values) < 2 or values[0].ndim != 4 or values[0].shape != values[1].shape or not values[0].size:
            continue
        rows, columns = report.axes.get(name) or _places(values[0].shape)
        with np.errstate(invalid="ignore"):
            worst = np.unravel_index(int(np.argmax(np.nan_to_num(np.abs(values[0] - values[1])))), values[0].shape)
        (top, height), (left, width) = (_part(size, place) for size, place in zip(values[0].shape[2:], worst[2:], strict=True))
        B, H, T, S = values[0].shape
        kept = max(1, min(B, share // (8 * H * height * width)))
        values = [np.ascontiguousarray(v[:kept, :, top : top + height, left : left + width], "<f4") for v in values]
        told = [f"items 0 to {kept - 1} of {B}"] if kept < B else []
        told += [f"queries {top} to {top + height - 1} of {T}"] if height < T else []
        told += [f"keys {left} to {left + width - 1} of {S}"] if width < S else []
        found.append(
            {
                "name": name,
                "programs": list(programs)[:2],
                "shape": list(values[0].shape),
                "values": [base64.b64encode(v.tobytes()).decode() for v in values],
                "rows": [labels[top : top + height] for labels in rows[:kept]],
                "columns": [labels[left : left + width] for labels in columns[:kept]],
                "kept": ", ".join(told),
            }
        )
    return found


def _part(size: int, place: int) -> tuple[int, int]:
    """(start, length) of what is kept around a place."""
    length = min(size, SIDE)
    return min(max(int(place) - length // 2, 0), size - length), length


def _places(shape: tuple[int, ...]) -> tuple[list[list[str]], list[list[str]]]:
    """Numbers where the tokens are not known."""
    return tuple([[str(i) for i in range(size)]] * shape[0] for size in shape[2:4])  # type: ignore[return-value]
