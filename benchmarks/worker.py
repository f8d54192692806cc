"""What the worker processes of both frameworks share: one process is one pass over the cases, each written to disk as it ends.

A folder of a run holds plan.json (cases and settings), passes/N-SIDE/{setup.json,CASE.json} and outputs/SIDE/CASE/VARIANT.npz of the first pass.
"""

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cases, timing
from benchmarks.cases import Case
from benchmarks.children import Children, Place, serve
from flax_gpt.errors import require

Values = Mapping[str, np.ndarray]

KEEP_MEMORY = "FLAX_GPT_BENCH_KEEP_MEMORY"
"""Set where a worker, and every process that it starts, keeps freed memory."""


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
    once: bool = False
    """Whether a run is too long to be repeated within a process."""
    keep: Any = None
    """What must live as long as the program does."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Which kernel ran, and the like."""
    children: Children | None = None
    """The processes that do the work in this one's place."""


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
    """Most bytes in use on an accelerator, since the last call where that can be asked; None on the processor."""
    first_step: Callable[[Any, str], float]
    """The loss of one training step, for a process that does nothing else."""
    keep_memory: Callable[[], None] = lambda: None
    """Lets the process keep freed memory."""
    devices: Callable[[], int] = lambda: 1
    """How many there are: accelerators, or processors."""
    environments: Callable[[int], list[dict[str, str]]] = lambda devices: []
    """What is set in each of the processes that share a case among so many devices."""
    share: Callable[[Any, str, Place], Program] | None = None
    """(case, variant, place) → a child's program."""


def write_json(path: Path, values: Any) -> None:
    """Under a temporary name first: a reader sees the old file or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def measure(side: Side, case: Case, variant: str, seconds: float, outputs: Path | None) -> dict[str, Any]:
    """Builds, runs once, writes what is compared when a file for it is given, and times; a program that runs once is timed as it does."""
    program = side.builders[case.kind](case, variant) if case.devices == 1 else shared(side, case, variant)
    start = time.perf_counter()
    if not program.once:
        program.wait(program.run())
    first = time.perf_counter() - start
    if outputs is not None and not program.once:
        save(program, outputs)
    timing.forget_peak()
    if program.children is not None:
        program.children.ask("forget")
    before, resident = side.device_peak(), timing.resident_bytes()
    joules = timing.joules if before is None else timing.gpu_joules
    energy, began = joules(), time.perf_counter()
    # On an accelerator runs queue up behind each other, and waiting for each would time the queue.
    chained = program.chained or before is not None
    found = timing.sample(program.run, program.wait, seconds=seconds, chained=chained, once=program.once)
    spent, after, peak, device = time.perf_counter() - began, joules(), timing.resident_bytes("VmHWM"), side.device_peak()
    if outputs is not None and program.once:
        save(program, outputs)
    if program.children is not None:
        used = program.children.peak()
    elif before is None:
        used = None if resident is None or peak is None else max(0, peak - resident)
    else:
        used = device if device != before else None
    watts = None if energy is None or after is None else (after - energy) / spent
    return found | {"first_s": first, "peak_bytes": used, "watts": watts, "facts": program.facts}


def shared(side: Side, case: Case, variant: str) -> Program:
    """A case on several devices, which children of this process compute. Raises InputError where there are fewer."""
    there = side.devices()
    require(case.devices <= there, "devices", case.devices, f"must be at most {there}, the processors or accelerators that there are")
    children = Children(f"benchmarks.{side.name}_worker", case.to_dict(), variant, side.environments(case.devices))
    facts = children.ask("build")[0] | {"processes": len(children.processes)}

    def outputs() -> Values:
        return {name: np.array(values, np.float32) for name, values in children.ask("outputs")[0].items()}

    return Program(lambda: children.ask("run"), outputs, facts=facts, children=children)


def child(side: Side, arguments: list[str]) -> None:
    """A process of `shared`: CASE VARIANT FOLDER NUMBER COUNT."""
    case, place = cases.read(json.loads(arguments[0])), Place(int(arguments[3]), int(arguments[4]), Path(arguments[2]))
    held: dict[str, Any] = {}

    def build() -> dict[str, Any]:
        side.setup(max(1, len(os.sched_getaffinity(0)) // place.count))
        assert side.share is not None
        held["program"] = side.share(case, arguments[1], place)
        return held["program"].facts

    def run() -> None:
        held["program"].wait(held["program"].run())

    def outputs() -> dict[str, Any] | None:
        found = held["program"].outputs()
        return {name: np.asarray(array).tolist() for name, array in found.items()} if place.number == 0 else None

    def forget() -> None:
        timing.forget_peak()
        held["resident"] = timing.resident_bytes()

    def peak() -> int | None:
        """None on an accelerator too: what its allocator says is one device's."""
        found = timing.resident_bytes("VmHWM")
        known = side.device_peak() is None and held["resident"] is not None and found is not None
        return max(0, found - held["resident"]) if known else None

    requests = {function.__name__: function for function in (build, run, outputs, forget, peak)}
    serve(lambda request: requests[request](), reason)


def save(program: Program, path: Path) -> None:
    """Writes what is compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        np.savez(file, **dict[str, Any](program.outputs()))
    os.replace(temporary, path)


def main(side: Side, arguments: list[str]) -> None:
    """SIDE_worker FOLDER PASS: goes through the cases of the plan that this pass has not done yet, saying which on standard output.

    SIDE_worker first-step SIZE VARIANT: see `first_step`. SIDE_worker child …: see `child`.
    """
    if KEEP_MEMORY in os.environ:
        side.keep_memory()
    if arguments[0] == "child":
        child(side, arguments[1:])
        return
    if arguments[0] == "first-step":
        side.setup(len(os.sched_getaffinity(0)))
        print(side.first_step(cases.Start(size=arguments[1]), arguments[2]))
        return
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
            if number > 0 and beaten(folder / "passes" / f"0-{side.name}" / path.name, variant):
                continue
            outputs = folder / "outputs" / side.name / case.name / f"{variant}.npz" if number == 0 else None
            try:
                found[variant] = measure(side, case, variant, plan["settings"]["seconds"], outputs)
            except Exception as error:  # a case that fails is a row of the report
                traceback.print_exc(file=sys.stderr)
                found[variant] = {"error": reason(error)}
            write_json(unfinished(path), found)
        os.replace(unfinished(path), path)
        print(f"done {case.name}", flush=True)


def unfinished(path: Path) -> Path:
    """Where the variants of a case that have been measured lie while others are."""
    return path.with_suffix(".part")


def first_step(module: str, case: Any, variant: str, environment: Mapping[str, str]) -> np.ndarray:
    """The loss (1,) of the first training step of a new interpreter."""
    command = [sys.executable, "-m", module, "first-step", case.size, variant]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"ended with status {done.returncode}")
    return np.array([float(done.stdout.split()[-1])])


def epoch(batches: Iterable[tuple[Any, Any]]) -> dict[str, np.ndarray]:
    """Where the windows of an epoch over the corpus 0, 1, 2, … start, sorted, and whether each holds what follows its start."""
    starts, whole = [], True
    for tokens, targets in batches:
        tokens, targets = np.asarray(tokens), np.asarray(targets)
        real = targets[:, -1] > 0  # the last batch may be filled up with rows of zeros
        tokens, targets = tokens[real], targets[real]
        whole &= bool((tokens == tokens[:, :1] + np.arange(tokens.shape[1])).all() and (targets == tokens + 1).all())
        starts.append(tokens[:, 0])
    return {"starts": np.sort(np.concatenate(starts)), "whole": np.array([whole])}


def variants(case: Case, side: str, level: str) -> tuple[str, ...]:
    """How a side runs a case at this level; the demo has no half minute for torch's compiler."""
    chosen = case.variants[side]
    if level == "demo":
        return tuple(variant for variant in chosen if variant != "compile")
    return (*chosen, "max-autotune") if level == "full" and "compile" in chosen else chosen


BEATEN = 1.25
"""How many times as long as another variant one must take in the first pass to be timed no further."""


def beaten(first: Path, variant: str) -> bool:
    """Whether the file of the first pass says that another variant of the same side is far faster."""
    found = json.loads(first.read_text(encoding="utf-8")) if first.exists() else {}
    times = {name: timing.median(one["samples_ms"]) for name, one in found.items() if one.get("samples_ms")}
    return variant in times and (times[variant] or 0) > BEATEN * min(filter(None, times.values()))


def dropped(folder: Path, case: Case) -> bool:
    """Whether the outputs were compared and differ: such a case is timed no further."""
    path = folder / "agreement" / f"{case.name}.json"
    return path.exists() and not json.loads(path.read_text(encoding="utf-8"))["ok"]


def reason(error: BaseException) -> str:
    """One line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
