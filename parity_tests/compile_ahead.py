"""Compiles the attention kernels, forward and backward, for accelerators that this host need not have, and prints what their compilers say.

    python -m parity_tests.compile_ahead v5e v6e h100

A TPU needs libtpu (`pip install -e '.[tpu]'`), the H100 the packages that docs/kernels.md names; no device is touched.
"""

import argparse
import functools
import json
import os
import time
from typing import Any

ENVIRONMENT = dict(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)
"""libtpu takes its settings from the environment, once a process."""

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84978434048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""A GpuTargetConfigProto of XLA: what its compiler asks of a GPU."""

CASES: dict[str, dict[str, Any]] = {
    # (B, T, S, H, K, Dh), dtype, arguments of attend
    "plain": dict(sizes=(2, 512, 512, 4, 2, 64), dtype="bfloat16", arguments=dict(causal=True)),
    "tails": dict(sizes=(1, 100, 200, 2, 1, 80), dtype="float32", arguments=dict(causal=True, query_offset=100, window=(70, None))),
    "everything": dict(
        sizes=(2, 1, 129, 4, 2, 128), dtype="bfloat16", arguments=dict(causal=True, query_offset=128, dropout_rate=0.1), everything=True
    ),
    "widest": dict(sizes=(1, 128, 128, 1, 1, 256), dtype="float32", arguments=dict()),
    "long": dict(sizes=(8, 4096, 4096, 16, 16, 128), dtype="bfloat16", arguments=dict(causal=True)),
    "half tails": dict(sizes=(1, 100, 200, 2, 1, 80), dtype="float16", arguments=dict(causal=True, query_offset=100, window=(70, None))),
}

SERVED = {
    "pallas_tpu": ("plain", "tails", "everything", "widest", "long"),
    "splash": ("plain", "long"),
    "pallas_gpu": ("plain", "half tails", "long"),
}

KERNELS = {"v5e": ("pallas_tpu", "splash"), "v6e": ("pallas_tpu", "splash"), "h100": ("pallas_gpu",)}

CALLS = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}


def compiled(chip: str, implementation: str, name: str) -> dict[str, Any]:
    """What the compiler of `chip` says of one case, forward and backward: flops, bytes, seconds (None where it does not), kernels in the program."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from flax_gpt.kernels import api

    platform = "gpu" if chip == "h100" else "tpu"
    case = CASES[name]
    B, T, S, H, K, D = case["sizes"]
    where = SingleDeviceSharding(topology(chip).devices[0])
    spec = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    arrays = [spec((B, T, H, D), case["dtype"]), spec((B, S, K, D), case["dtype"]), spec((B, S, K, D), case["dtype"])]
    bias = spec((1, H, T, S), jnp.float32) if case.get("everything") else None
    fixed = dict(mask=spec((B, 1, 1, S), bool), kv_lengths=spec((B,), jnp.int32), dropout_key=spec((2,), jnp.uint32)) if bias is not None else {}

    def loss(arrays: Any, bias: Any, fixed: Any) -> Any:
        lse = implementation != "splash"
        results = api.attend(*arrays, bias=bias, implementation=implementation, return_lse=lse, **case["arguments"], **fixed)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in (results if lse else [results]))

    began = time.monotonic()
    with api.target(platform):
        traced = jax.jit(jax.value_and_grad(loss, argnums=0 if bias is None else (0, 1))).trace(arrays, bias, fixed)
        program = traced.lower(lowering_platforms=("cuda" if platform == "gpu" else "tpu",)).compile()
    cost = program.cost_analysis() or {}
    return dict(
        chip=chip,
        implementation=implementation,
        case=name,
        flops=cost.get("flops"),
        bytes=cost.get("bytes accessed"),
        seconds=cost.get("optimal_seconds"),
        temporary=program.memory_analysis().temp_size_in_bytes,
        calls=program.as_text().count(CALLS[platform]),
        compile_seconds=time.monotonic() - began,
    )


@functools.cache
def topology(chip: str) -> Any:
    from jax.experimental import topologies

    if chip == "h100":
        return topologies.get_topology_desc(topology_name=chip, platform="cuda", topology="1x1x1", target_config=H100)
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])


def row(found: dict[str, Any]) -> str:
    """One line of the table in docs/kernels.md."""
    figure = lambda value, unit: "–" if value is None or value < 0 else f"{value / unit:,.1f}"
    B, T, S, H, K, D = CASES[found["case"]]["sizes"]
    cells = [
        found["chip"],
        f"`{found['implementation']}`",
        f"{found['case']}: B{B} T{T} S{S} H{H}/{K} Dh{D} {CASES[found['case']]['dtype']}",
        figure(found["flops"], 1e6),
        figure(found["bytes"], 1e6),
        figure(found["seconds"], 1e-6),
        figure(found["temporary"], 1e6),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parity_tests.compile_ahead", description=__doc__)
    parser.add_argument("chips", nargs="+", choices=list(KERNELS), metavar=f"{{{','.join(KERNELS)}}}")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), help="all that each kernel serves when left out")
    parser.add_argument("--json", action="store_true", help="one JSON object a line in place of the table")
    options = parser.parse_args()
    os.environ |= ENVIRONMENT
    if not options.json:
        print("| chip | implementation | case | Mflop | MB moved | estimated µs | MB temporary |\n|---|---|---|---|---|---|---|")
    for chip in options.chips:
        for implementation in KERNELS[chip]:
            for name in SERVED[implementation]:
                if options.cases is None or name in options.cases:
                    found = compiled(chip, implementation, name)
                    print(json.dumps(found) if options.json else row(found), flush=True)


if __name__ == "__main__":
    main()
