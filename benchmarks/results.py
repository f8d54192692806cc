"""From the files of a run to one JSON document: a row a case, with both sides' figures and the interval of their ratio.

    format      1
    machine     date, commit, cpu, cpus, memory_bytes, system, load, environment (machine.py)
    settings    level, processes, seconds, limit (runner.Settings)
    setup       {"jax" | "torch": versions, device, platform, threads, precision, … as the first process of the side printed them}
    ceilings    {"flops": {dtype: FLOP/s}, "bytes": bytes/s}: the better side of the matmul and copy cases
    rows        [{name, case, flops, bytes, unit, amount, agreement: {ok, summary}, error, jax, torch: {variant: Figures},
                 best: {"jax" | "torch": variant}, ratio, low, high, share: {"jax" | "torch": part of the ceiling}}]

Figures: ms (median over processes of each one's median), q1, q3, min (over all samples), processes (each one's median), samples, rejected, cpu_ms,
first_s (each process's first run, compilation included), peak_bytes (the most that runs took beyond what was held), watts, facts; or error. Times
are of one run, in milliseconds. A ratio above 1 means that JAX is faster; low and high bound it in 95 of 100 bootstrap draws, and are null where
one process of a side alone has samples that count. `unit` and `amount` say what a run does, such as 480 tokens.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cases, timing
from benchmarks.cases import Case
from flax_gpt.errors import InputError, require

SIDES = ("jax", "torch")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def collect(folder: Path) -> dict[str, Any]:
    """The document of a run, whole or not."""
    plan = read_json(folder / "plan.json")
    rows = [_row(folder, cases.read(values)) for values in plan["cases"]]
    ceilings = _ceilings(rows)
    for row in rows:
        row["share"] = _share(row, ceilings)
    setup = {side: found for side in SIDES if (found := _setup(folder, side)) is not None}
    return {name: plan[name] for name in ("format", "machine", "settings")} | {"setup": setup, "ceilings": ceilings, "rows": rows}


def _setup(folder: Path, side: str) -> dict[str, Any] | None:
    path = folder / "passes" / f"0-{side}" / "setup.json"
    return read_json(path) if path.exists() else None


def _row(folder: Path, case: Case) -> dict[str, Any]:
    path = folder / "agreement" / f"{case.name}.json"
    agreement = read_json(path) if path.exists() else None
    unit, amount = case.unit
    row: dict[str, Any] = {
        "name": case.name,
        "case": case.to_dict(),
        "flops": case.flops,
        "bytes": case.bytes,
        "unit": unit,
        "amount": amount,
        "agreement": agreement,
    }
    for side in SIDES:
        found = [read_json(file) for file in sorted((folder / "passes").glob(f"*-{side}/{case.name}.json"))]
        row[side] = {variant: figures([one[variant] for one in found if variant in one]) for variant in (found[0] if found else {})}
    return row | judge(row)


def figures(processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the processes of one variant say together; {"error"} when one failed, since a figure from the others alone would flatter it."""
    for one in processes:
        if "error" in one:
            return {"error": one["error"]}
    samples = [x for one in processes for x in one["samples_ms"]]
    medians = [statistics.median(one["samples_ms"]) for one in processes if one["samples_ms"]]
    quartiles = timing.quartiles(samples) or (None, None)
    return {
        "ms": timing.median(medians),
        "q1": quartiles[0],
        "q3": quartiles[1],
        "min": min(samples, default=None),
        "processes": medians,
        "samples": len(samples),
        "rejected": sum(one["rejected"] for one in processes),
        "cpu_ms": timing.median([one["cpu_ms"] for one in processes]),
        "first_s": [one["first_s"] for one in processes],
        "peak_bytes": max((one["peak_bytes"] for one in processes if one["peak_bytes"] is not None), default=None),
        "watts": timing.median([one["watts"] for one in processes if one["watts"] is not None]),
        "facts": processes[0]["facts"],
    }


def judge(row: Mapping[str, Any]) -> dict[str, Any]:
    """best, ratio, low, high, and the error that stands in their place."""
    nothing: dict[str, Any] = {"best": {}, "ratio": None, "low": None, "high": None}
    for side in SIDES:
        failed = [f"{side} {variant}: {found['error']}" for variant, found in row[side].items() if "error" in found]
        if failed and len(failed) == len(row[side]):
            return nothing | {"error": "; ".join(failed)}
    if row["agreement"] is None:
        return nothing | {"error": "not finished"}
    if not row["agreement"]["ok"]:
        return nothing | {"error": f"outputs differ: {row['agreement']['summary']}"}
    best = {}
    for side in SIDES:
        timed = {variant: found["ms"] for variant, found in row[side].items() if found.get("ms") is not None}
        if not timed:
            return nothing | {"error": f"{side}: other processes held the machine during every sample" if row[side] else "not finished"}
        best[side] = min(timed, key=lambda variant: timed[variant])
    ratio, low, high = timing.ratio_interval(*(row[side][best[side]]["processes"] for side in SIDES))
    return {"best": best, "ratio": ratio, "low": low, "high": high, "error": None}


def _ceilings(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    flops: dict[str, float] = {}
    memory: float | None = None
    for row in rows:
        fastest = min((row[side][row["best"][side]]["ms"] for side in row["best"]), default=None)
        if fastest and row["case"]["kind"] == "matmul":
            flops[row["case"]["dtype"]] = row["flops"] / fastest * 1e3
        elif fastest and row["case"]["kind"] == "copy":
            memory = row["bytes"] / fastest * 1e3
    return {"flops": flops, "bytes": memory}


def _share(row: Mapping[str, Any], ceilings: Mapping[str, Any]) -> dict[str, float]:
    """Of the roof over the case's FLOPs and bytes (Williams et al. 2009): the time that the ceilings allow over the time taken."""
    flops, memory = ceilings["flops"].get(row["case"]["dtype"]), ceilings["bytes"]
    least = [amount / limit for amount, limit in ((row["flops"], flops), (row["bytes"], memory)) if amount and limit]
    if not least:
        return {}
    return {side: max(least) * 1e3 / row[side][variant]["ms"] for side, variant in row["best"].items()}


def interval(low: float | None, high: float | None) -> str:
    """As it is shown."""
    return "one process" if low is None or high is None else f"{low:.2f} – {high:.2f}"


# Two documents


def load(path: Path) -> dict[str, Any]:
    """A document. Raises InputError for a file that is none."""
    try:
        found = read_json(path)
    except ValueError as error:
        raise InputError("FILE", str(path), f"is no JSON: {error}") from error
    require(isinstance(found, dict) and found.get("format") == 1 and "rows" in found, "FILE", str(path), "is no result of flax-gpt bench")
    return found


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """{name, old, new, verdict} of every case that both have: the ratios with their intervals, and whether they moved.

    torch is the yardstick, so that two machines may be compared: 'slower' when the whole new interval lies below the old one, 'faster' when above,
    'failed' when only the new one has no ratio, 'mended' when only the old one has none, 'open' when one of them has no interval.
    """
    before = {row["name"]: row for row in old["rows"]}
    found = []
    for row in new["rows"]:
        if row["name"] not in before:
            continue
        a, b = before[row["name"]], row
        verdict = "same"
        if a["ratio"] is None or b["ratio"] is None:
            verdict = "same" if a["ratio"] is b["ratio"] else "mended" if a["ratio"] is None else "failed"
        elif a["low"] is None or b["low"] is None:
            verdict = "open"
        elif b["high"] < a["low"]:
            verdict = "slower"
        elif b["low"] > a["high"]:
            verdict = "faster"
        numbers = lambda one: None if one["ratio"] is None else [one["ratio"], one["low"], one["high"]]
        found.append({"name": row["name"], "old": numbers(a), "new": numbers(b), "verdict": verdict, "error": b["error"]})
    return found
