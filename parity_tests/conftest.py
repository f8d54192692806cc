"""Settings of the suite: full-precision products on both sides, reproducible examples, one torch thread a worker, a compilation cache of its own."""

import os
import tempfile

import jax
import torch
from hypothesis import HealthCheck, settings

# A worker's own and gone with it, for the processes that tests start too: an entry that another process has half written would warn.
_CACHE = tempfile.TemporaryDirectory(prefix="flax-gpt-cache-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
jax.config.update("jax_compilation_cache_dir", _CACHE.name)

jax.config.update("jax_default_matmul_precision", "highest")
torch.set_float32_matmul_precision("highest")
torch.set_num_threads(1)

settings.register_profile("suite", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
