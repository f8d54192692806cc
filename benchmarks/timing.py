"""How a program is timed within one process, and what several processes say together. Standard library and numpy alone.

A process may be slow for its whole life, so that figures come from several of each framework in the order A B B A …; within one, from the median of
samples after two runs. A sample during which other processes held more than a tenth of the machine is rejected and counted.
"""

import ctypes
import gc
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

OTHERS = 0.1
"""Share of the machine that other processes may hold during a sample."""

SAMPLE_SECONDS = 0.1
"""Shortest sample: shorter runs are repeated within one."""

MIN_SAMPLES = 3
LONG_SECONDS = 1.0
"""Runs of this length are sampled once less, runs of four times this length twice less."""

PATIENCE = 4.0
"""How many times the asked time is spent on waiting for samples that count."""


def machine_seconds() -> float | None:
    """Processor time that the whole machine has spent since it started; None where the system does not say."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(x) for x in file.readline().split()[1:9]]
    except OSError:
        return None
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def disturbed(machine: float | None, own: float, wall: float, cpus: int) -> bool:
    """Whether others held too much of the machine, from the processor seconds of the machine and of this process, and the wall time.

    The machine's time is counted in ticks, of which one is not held against anyone.
    """
    return machine is not None and machine - own > OTHERS * wall * cpus + 0.01


CHILDREN: set[int] = set()
"""Living processes that work for this one: their time is its own."""


def own_seconds() -> float:
    """Processor time of this process, of `CHILDREN`, and of the children that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + sum(map(process_seconds, CHILDREN))


def process_seconds(pid: int) -> float:
    """Processor time of a living process and all its threads; /proc has it in ticks alone, which are too coarse for a short sample."""
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
        return 0.0
    try:
        return time.clock_gettime(clock.value)
    except OSError:  # it has ended
        return 0.0


def sample(run: Callable[[], Any], wait: Callable[[Any], None], *, seconds: float, chained: bool = False, once: bool = False) -> dict[str, Any]:
    """Times `run`, which has run before, once more and then for about `seconds`: {samples_ms, cpu_ms, rejected, repeats}; times are a run's.

    `wait` blocks on what `run` returned: after each run, or, when each run needs the one before it (`chained`), after the last of a sample.
    `once`: a single run, which has not run before, again only when it is rejected.
    """

    def take(repeats: int) -> tuple[float, float, bool]:
        """Wall and processor seconds of a run, and whether others disturbed it."""
        machine, own, wall = machine_seconds(), own_seconds(), time.perf_counter()
        for _ in range(repeats):
            result = run()
            if not chained:
                wait(result)
        wait(result)
        wall, own = time.perf_counter() - wall, own_seconds() - own
        total = None if machine is None else (machine_seconds() or 0.0) - machine
        return wall / repeats, own / repeats, disturbed(total, own, wall, os.cpu_count() or 1)

    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        began = time.perf_counter()
        taken = [take(1)]
        repeats = 1 if once else max(1, int(SAMPLE_SECONDS / max(taken[0][0], 1e-9)))
        least = 1 if once else MIN_SAMPLES - (taken[0][0] >= LONG_SECONDS) - (taken[0][0] >= 4 * LONG_SECONDS)
        if not once:
            taken = []  # the second run of all still meets memory for the first time: a tenth more in both frameworks
        while True:
            spent, kept = time.perf_counter() - began, [wall for wall, _, bad in taken if not bad]
            if len(taken) >= least and (spent >= seconds or once) and (len(kept) >= least or spent >= PATIENCE * seconds):
                break
            taken.append(take(repeats))
    finally:
        if collecting:
            gc.enable()
    return {
        "samples_ms": [wall * 1e3 for wall in kept],
        "cpu_ms": statistics.median(own * 1e3 for _, own, _ in taken),
        "rejected": len(taken) - len(kept),
        "repeats": repeats,
    }


# Memory and energy


def resident_bytes(field: str = "VmRSS") -> int | None:
    """Bytes of this process that lie in memory; VmHWM: the most since `forget_peak`. None where the system does not say."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith(f"{field}:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def forget_peak() -> None:
    """Gives freed memory back to the system and starts the count of the highest resident size anew."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass  # another C library
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pass


def joules() -> float | None:
    """Energy that the processor packages have taken since some time, from RAPL; None where the device does not report it."""
    total = 0.0
    try:
        for path in Path("/sys/class/powercap").glob("intel-rapl:[0-9]"):
            total += int((path / "energy_uj").read_text(encoding="ascii")) / 1e6
    except (OSError, ValueError):
        return None
    return total or None


def gpu_joules() -> float | None:
    """Energy that the NVIDIA GPUs have taken since their driver was loaded, from NVML; None where there is no NVML or no GPU that counts."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count, total = ctypes.c_uint(), 0.0
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    for index in range(count.value):
        device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
            if nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)) == 0:
                total += millijoules.value / 1e3
    return total or None


# Several processes


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    """The first and the third."""
    if not values:
        return None
    low, high = np.percentile(values, [25, 75])
    return float(low), float(high)


def ratio_interval(ours: Sequence[float], theirs: Sequence[float], *, draws: int = 4000, seed: int = 0) -> tuple[float, float | None, float | None]:
    """(ratio, low, high): the median of `theirs` over that of `ours`, a number a process, and its 95% interval.

    The interval is the percentile bootstrap (Efron & Tibshirani 1993, chapter 13) over processes, each side drawn anew; None with one process of a
    side, which says nothing of how processes differ. Above 1, ours is faster.
    """
    rng = np.random.default_rng(seed)
    sides = [np.asarray(side, np.float64) for side in (ours, theirs)]
    ratio = float(np.median(sides[1]) / np.median(sides[0]))
    if min(map(len, sides)) < 2:
        return ratio, None, None
    a, b = (np.median(side[rng.integers(0, len(side), (draws, len(side)))], axis=1) for side in sides)
    low, high = np.percentile(b / a, [2.5, 97.5])
    return ratio, float(low), float(high)
