"""Attention alone: `python -m benchmarks.attention OUT`, the attention cases of `flax-gpt bench`."""

import sys
from pathlib import Path

from benchmarks.command import bench

if __name__ == "__main__":
    bench("standard", "attention-*", Path(sys.argv[1]), resume=(Path(sys.argv[1]) / "plan.json").exists())
