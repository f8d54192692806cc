"""Settings of the suite: full-precision products on both sides, reproducible examples, one torch thread a worker."""

import jax
import torch
from hypothesis import HealthCheck, settings

jax.config.update("jax_default_matmul_precision", "highest")
torch.set_float32_matmul_precision("highest")
torch.set_num_threads(1)

settings.register_profile("suite", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
