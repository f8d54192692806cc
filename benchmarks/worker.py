"""What the worker processes of both frameworks share: one process is one pass over the cases, each written to disk as it ends.

A folder of a run holds plan.json (cases and settings), passes/N-SIDE/{setup.json,CASE.json} and outputs/SIDE/CASE/VARIANT.npz of the first pass.
"""

import dataclasses
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cases, timing
from benchmarks.cases import Case

Values = Mapping[str, np.ndarray]


@dataclasses.dataclass
class Program:
    """One side's way to run a case, built and not yet called."""

    run: Callable[[], Any]
    """One execution; the first compiles."""
    outputs: Callable[[], Values]
    """What is compared with the other side, from the very program that is timed."""
    wait: Callable[[Any], None] = lambda result: None
    """Blocks until the result is there."""
    chained: bool = False
    """Whether each run needs the one before it, so that a sample waits for its last alone."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Which kernel ran, and the like."""


Builder = Callable[[Any, str], Program]


@dataclasses.dataclass(frozen=True)
class Side:
    """One framework's worker."""

    name: str
    builders: Mapping[str, Builder]
    """Kind of case → (case, variant) → program."""
    setup: Callable[[int], dict[str, Any]]
    """Sets threads and precision, and says what holds for the whole process."""
    device_peak: Callable[[], int | None]
    """Most bytes in use on an accelerator so far; None on the processor."""


def write_json(path: Path, values: Any) -> None:
    """Under a temporary name first: a reader sees the old file or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def measure(side: Side, case: Case, variant: str, seconds: float, outputs: Path | None) -> dict[str, Any]:
    """Builds, runs once, writes what is compared when a file for it is given, and times."""
    program = side.builders[case.kind](case, variant)
    start = time.perf_counter()
    program.wait(program.run())
    first = time.perf_counter() - start
    if outputs is not None:
        outputs.parent.mkdir(parents=True, exist_ok=True)
        temporary = outputs.with_name(outputs.name + ".tmp")
        with open(temporary, "wb") as file:
            np.savez(file, **dict[str, Any](program.outputs()))
        os.replace(temporary, outputs)
    timing.forget_peak()
    resident, energy, began = timing.resident(), timing.joules(), time.perf_counter()
    found = timing.sample(program.run, program.wait, seconds=seconds, chained=program.chained)
    spent, after, peak, device = time.perf_counter() - began, timing.joules(), timing.resident("VmHWM"), side.device_peak()
    host = None if resident is None or peak is None else max(0, peak - resident)
    watts = None if energy is None or after is None else (after - energy) / spent
    return found | {"first_s": first, "peak_bytes": host if device is None else device, "watts": watts, "facts": program.facts}


def main(side: Side, arguments: list[str]) -> None:
    """SIDE_worker FOLDER PASS: goes through the cases of the plan that this pass has not done yet, saying which on standard output."""
    folder, number = Path(arguments[0]), int(arguments[1])
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    place = folder / "passes" / f"{number}-{side.name}"
    place.mkdir(parents=True, exist_ok=True)
    setup = {"python": platform.python_version(), "load": list(os.getloadavg())} | side.setup(len(os.sched_getaffinity(0)))
    write_json(place / "setup.json", setup)
    parent = os.getppid()
    for values in plan["cases"]:
        if os.getppid() != parent:  # whoever started this is gone: nobody reads what follows
            return
        case = cases.read(values)
        path = place / f"{case.name}.json"
        if path.exists() or dropped(folder, case):
            continue
        print(f"start {case.name}", flush=True)
        found = {}
        for variant in variants(case, side.name, plan["settings"]["level"]):
            outputs = folder / "outputs" / side.name / case.name / f"{variant}.npz" if number == 0 else None
            try:
                found[variant] = measure(side, case, variant, plan["settings"]["seconds"], outputs)
            except Exception as error:  # a case that fails is a row of the report
                traceback.print_exc(file=sys.stderr)
                found[variant] = {"error": reason(error)}
        write_json(path, found)
        print(f"done {case.name}", flush=True)


def variants(case: Case, side: str, level: str) -> tuple[str, ...]:
    """How a side runs a case at this level."""
    chosen = case.variants[side]
    return (*chosen, "max-autotune") if level == "full" and "compile" in chosen else chosen


def dropped(folder: Path, case: Case) -> bool:
    """Whether the outputs were compared and differ: such a case is timed no further."""
    path = folder / "agreement" / f"{case.name}.json"
    return path.exists() and not json.loads(path.read_text(encoding="utf-8"))["ok"]


def reason(error: BaseException) -> str:
    """One line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
