"""Attention on the CPU against torch's scaled_dot_product_attention: `python -m benchmarks.attention [--sizes 128 512] [--processes 5]`.

Each figure comes from processes of their own in the order A B B A …, since a process may be slow for its whole life; within one, the median of its
samples after a warm-up. A sample during which other processes held more than a tenth of the machine is rejected and counted. Both sides get the
same threads, full float32 precision, causal attention without dropout, and inputs that need gradients in the backward case. Compile time is apart.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BATCH, HEADS, WIDTH = 2, 8, 64


def busy() -> float | None:
    """Seconds of processor time that the whole machine has spent since it started; None where the system does not say."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(x) for x in file.readline().split()[1:9]]
    except OSError:
        return None
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def sample(run: Callable[[], None], seconds: float) -> dict[str, Any]:
    """Median wall time and processor time of `run`, in milliseconds, over as many samples of 50 ms or more as fit, and how many were rejected."""
    run()
    start = time.perf_counter()
    run()
    repeats = max(1, int(0.05 / (time.perf_counter() - start)))
    kept, cpu, rejected = [], [], 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(cpu) < 5:
        machine, own, wall = busy(), time.process_time(), time.perf_counter()
        for _ in range(repeats):
            run()
        wall, own = time.perf_counter() - wall, time.process_time() - own
        cpu.append(own / repeats * 1e3)
        others = 0.0 if machine is None else (busy() or 0.0) - machine - own
        if others > 0.1 * wall * (os.cpu_count() or 1):
            rejected += 1
        else:
            kept.append(wall / repeats * 1e3)
    return dict(ms=statistics.median(kept) if kept else None, cpu_ms=statistics.median(cpu), samples=len(kept), rejected=rejected)


def inputs(length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(BATCH, length, HEADS, WIDTH)).astype(np.float32) for _ in range(4)]


def jax_worker(length: int, dtype: str, backward: bool, seconds: float) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from flax_gpt.kernels import attend, explain

    jax.config.update("jax_default_matmul_precision", "highest")
    q, k, v, d_out = (jnp.asarray(x, dtype) for x in inputs(length))
    forward = lambda q, k, v: attend(q, k, v, causal=True)

    def both(q: Any, k: Any, v: Any) -> Any:
        out, pull = jax.vjp(forward, q, k, v)
        return out, pull(d_out)

    start = time.perf_counter()
    program = jax.jit(both if backward else forward).lower(q, k, v).compile()
    compiling = time.perf_counter() - start
    found = sample(lambda: jax.block_until_ready(program(q, k, v)), seconds)
    return found | dict(kernel=explain(q, k, v, causal=True).chosen, compile_s=compiling, version=jax.__version__)


def torch_worker(length: int, dtype: str, backward: bool, seconds: float) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    q, k, v, d_out = (torch.from_numpy(x).to(getattr(torch, dtype)).transpose(1, 2).contiguous() for x in inputs(length))
    for x in (q, k, v):
        x.requires_grad_(backward)

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if backward:
            torch.autograd.grad(out, (q, k, v), d_out)

    return sample(run, seconds) | dict(kernel="scaled_dot_product_attention", compile_s=0.0, version=torch.__version__)


WORKERS = {"jax": jax_worker, "torch": torch_worker}


def measure(length: int, dtype: str, backward: bool, processes: int, seconds: float) -> dict[str, Any]:
    """Both sides in alternating processes; ratio > 1 means that JAX is faster."""
    found: dict[str, list[dict[str, Any]]] = {"jax": [], "torch": []}
    for n in range(processes):
        for side in ("jax", "torch") if n % 2 == 0 else ("torch", "jax"):
            command = [sys.executable, "-m", "benchmarks.attention", "--worker", side, str(length), dtype, str(int(backward)), str(seconds)]
            result = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=True)
            found[side].append(json.loads(result.stdout.splitlines()[-1]))
    row: dict[str, Any] = dict(length=length, dtype=dtype, backward=backward, kernel=found["jax"][0]["kernel"])
    for side, runs in found.items():
        wall = [run["ms"] for run in runs if run["ms"] is not None]
        row[side] = statistics.median(wall) if wall else None
        row[f"{side}_cpu"] = statistics.median(run["cpu_ms"] for run in runs)
        row[f"{side}_rejected"] = sum(run["rejected"] for run in runs)
    row["ratio"] = row["torch"] / row["jax"] if row["torch"] and row["jax"] else None
    row["cpu_ratio"] = row["torch_cpu"] / row["jax_cpu"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Causal attention on the CPU, JAX against torch.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 512, 1024, 2048])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of sampling in each process")
    parser.add_argument("--worker", nargs=5, metavar=("SIDE", "LENGTH", "DTYPE", "BACKWARD", "SECONDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        side, length, dtype, backward, seconds = arguments.worker
        print(json.dumps(WORKERS[side](int(length), dtype, backward == "1", float(seconds))))
        return
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}; B {BATCH}, H {HEADS}, Dh {WIDTH}, causal; load {os.getloadavg()[0]:.1f}")
    print("T      dtype     pass              kernel   JAX ms  torch ms   ratio   processor-time ratio   rejected samples")
    shown = lambda x: "     –" if x is None else f"{x:6.2f}"
    for dtype in arguments.dtypes:
        for backward in (False, True):
            for length in arguments.sizes:
                row = measure(length, dtype, backward, arguments.processes, arguments.seconds)
                label = "forward+backward" if backward else "forward"
                print(f"{length:<6} {dtype:<9} {label:<17} {row['kernel']:<8} {shown(row['jax'])}  {shown(row['torch'])}  {shown(row['ratio'])}  "
                      f"{row['cpu_ratio']:.2f}  {row['jax_rejected'] + row['torch_rejected']}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
