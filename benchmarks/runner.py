"""Runs a selection of cases: a process for each framework and pass, alternating A B B A, each case on disk as it ends, so that nothing is done twice.

The first pass of each side also leaves its outputs; they are compared before the second pass, and a case that differs is timed no further.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine, worker
from benchmarks.cases import Case
from flax_gpt.errors import RunError, require

MODULES = {"jax": "benchmarks.jax_worker", "torch": "benchmarks.torch_worker"}
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a level is measured."""

    level: str
    processes: int
    """Of each framework."""
    seconds: float
    """Of sampling for each case in each process."""
    limit: float
    """Seconds after which a case that says nothing is given up."""
    keep_memory: bool = False
    """Whether both sides keep freed memory, as `flax-gpt train` does; else malloc does what it does by default."""


SETTINGS = {
    "demo": Settings("demo", 2, 0.3, 120),
    "quick": Settings("quick", 3, 0.3, 300),
    "standard": Settings("standard", 5, 0.4, 300),
    "full": Settings("full", 5, 1.0, 1800),
}


def prepare(selected: list[Case], settings: Settings, out: Path, *, resume: bool = False) -> None:
    """Makes the folder of a run. Raises InputError for one that holds a run, without `resume`, and with it for one of another selection or commit."""
    plan = {"format": FORMAT, "settings": dataclasses.asdict(settings), "cases": [case.to_dict() for case in selected]}
    path = out / "plan.json"
    if path.exists():
        require(resume, "out", str(out), "holds a run of the benchmark: --resume goes on with it, another --out starts a new one")
        old = json.loads(path.read_text(encoding="utf-8"))
        same = all(old.get(name) == plan[name] for name in plan)
        require(same, "resume", str(out), "needs the level and the cases that the folder was begun with")
        now = machine.describe()
        changed = [name for name in ("commit", "cpu") if old["machine"][name] != now[name]]
        require(not changed, "resume", str(out), f"needs the same {' and '.join(changed)}: {', '.join(str(old['machine'][n]) for n in changed)}")
        return
    require(not out.exists() or not any(out.iterdir()), "out", str(out), "must be a new or an empty folder")
    (out / "passes").mkdir(parents=True)
    worker.write_json(path, plan | {"machine": machine.describe()})


def run(selected: list[Case], settings: Settings, out: Path) -> None:
    """Measures what the prepared folder does not hold yet. KeyboardInterrupt passes through; what was measured stays."""
    with _lock(out), Display(2 * settings.processes * len(selected)) as display:
        environment = child_environment(out) | ({worker.KEEP_MEMORY: "1"} if settings.keep_memory else {})
        for number in range(settings.processes):
            for side in ("jax", "torch") if number % 2 == 0 else ("torch", "jax"):
                _work(out, selected, settings, number, side, environment, display)
            if number == 0:
                _compare(out, selected, settings, environment, display)


@contextlib.contextmanager
def _lock(out: Path) -> Iterator[None]:
    with open(out / "lock", "a", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            require(False, "out", str(out), "is being written by another process")
        yield


def child_environment(out: Path) -> dict[str, str]:
    """That of the workers: no memory taken ahead; each side's first pass fills a compilation cache of this run, which the others find."""
    cache = (out / "cache").absolute()
    return os.environ | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "torch"),
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def _work(out: Path, selected: list[Case], settings: Settings, number: int, side: str, environment: dict[str, str], display: "Display") -> None:
    """One pass of one side, in as many processes as it takes when cases end them."""
    place = out / "passes" / f"{number}-{side}"
    place.mkdir(parents=True, exist_ok=True)

    def left() -> list[Case]:
        return [case for case in selected if not (place / f"{case.name}.json").exists() and not worker.dropped(out, case)]

    def failed(name: str, why: str) -> None:
        case = next(case for case in selected if case.name == name)
        path = place / f"{name}.json"
        measured = json.loads(worker.unfinished(path).read_text(encoding="utf-8")) if worker.unfinished(path).exists() else {}
        worker.write_json(path, {key: {"error": why} for key in worker.variants(case, side, settings.level)} | measured)
        worker.unfinished(path).unlink(missing_ok=True)

    text = f"pass {number + 1} of {settings.processes}, {side}"
    arguments = [MODULES[side], str(out), str(number)]
    _drive(arguments, left, failed, settings.limit, environment, place / "log.txt", lambda name: display.show(f"{text}: {name}"), display.advance)
    display.settle((2 * number + 1 + (side == ("torch", "jax")[number % 2])) * len(selected))


def _compare(out: Path, selected: list[Case], settings: Settings, environment: dict[str, str], display: "Display") -> None:
    place = out / "agreement"
    place.mkdir(exist_ok=True)
    left = lambda: [case for case in selected if not (place / f"{case.name}.json").exists()]
    failed = lambda name, why: worker.write_json(place / f"{name}.json", {"ok": False, "summary": f"the comparison failed: {why}"})
    shown = lambda name: display.show(f"comparing the outputs: {name}")
    _drive(["benchmarks.agreement", str(out)], left, failed, settings.limit, environment, place / "log.txt", shown, lambda: None)


def _drive(
    arguments: list[str],
    left: Callable[[], list[Case]],
    failed: Callable[[str, str], None],
    limit: float,
    environment: dict[str, str],
    log: Path,
    shown: Callable[[str], None],
    advance: Callable[[], None],
) -> None:
    """Starts `python -m arguments` until nothing is `left`; a case during which it dies or says nothing for `limit` seconds has `failed`."""
    while left():
        current = None
        with open(log, "ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                start_new_session=True,  # Ctrl-C is ours: we end it
            )
        why = ""
        try:
            for line in _lines(process, limit):
                if line is None:
                    why = f"gave no result within {limit:.0f} s"
                    break
                word, _, name = line.strip().partition(" ")
                if word == "start":
                    current = name
                    shown(name)
                elif word == "done":
                    current = None
                    advance()
        finally:
            if process.poll() is None and (why or sys.exc_info()[0] is not None):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        if current is not None:
            failed(current, why or _death(status))
            advance()
        elif status != 0 or why:
            raise RunError(f"{' '.join(arguments[:1])} could not run: {_last_line(log)}")
        elif left():
            raise RunError(f"{' '.join(arguments[:1])} left {left()[0].name} out")


STARTING = 120.0
"""Seconds that a process may take to its first line, imports included, when `limit` is less."""


def _lines(process: subprocess.Popen[str], limit: float) -> Iterator[str | None]:
    """Lines of the process's output; None when it has said nothing for `limit` seconds."""
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                found.put(line)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    patience = max(limit, STARTING)
    while True:
        try:
            line = found.get(timeout=patience)
            patience = limit
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        yield line


def _death(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        return f"the process was ended by {name}" + (": out of memory?" if name == "SIGKILL" else "")
    return f"the process ended with status {status}"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


class Display:
    """A bar on a terminal, lines elsewhere, on standard error."""

    def __init__(self, total: int):
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.total, self.count, self.printed = total, 0, time.monotonic()
        self.bar = Progress(TextColumn("{task.percentage:3.0f}%"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
                            console=self.console)  # fmt: skip
        self.task = self.bar.add_task("starting", total=total)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def show(self, text: str) -> None:
        self.bar.update(self.task, description=text)
        now = time.monotonic()
        if not self.console.is_terminal and now - self.printed >= 10:
            self.printed = now
            self.console.print(f"{100 * self.count // max(self.total, 1)}%  {text}")

    def advance(self) -> None:
        self.settle(self.count + 1)

    def settle(self, count: int) -> None:
        """Sets how many cases are behind us: those that were done before, or are dropped, count too."""
        self.count = min(count, self.total)
        self.bar.update(self.task, completed=self.count)
