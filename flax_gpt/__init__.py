"""A GPT in JAX and Flax NNX with its own attention kernels, held equal to a PyTorch reference.

Names load on first use (PEP 562), so that help and errors do not wait for jax.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "GPTConfig": "flax_gpt.config",
    "EncoderConfig": "flax_gpt.config",
    "EncoderDecoderConfig": "flax_gpt.config",
    "OptimizerConfig": "flax_gpt.config",
    "RopeConfig": "flax_gpt.config",
    "SampleConfig": "flax_gpt.config",
    "TrainConfig": "flax_gpt.config",
    "InputError": "flax_gpt.errors",
    "RunError": "flax_gpt.errors",
    "MiniGPT": "flax_gpt.models.gpt",
    "TinyTransformer": "flax_gpt.models.encoder",
    "EncoderDecoder": "flax_gpt.models.encoder_decoder",
    "attend": "flax_gpt.kernels.api",
    "load_weights": "flax_gpt.weights.tree",
    "save_weights": "flax_gpt.weights.tree",
    "torch_weights": "flax_gpt.weights.tree",
    "generate": "flax_gpt.generation.sampling",
    "train": "flax_gpt.training.loop",
    "load_run": "flax_gpt.training.loop",
}

__all__ = ["__version__", "masks", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "masks":
        return importlib.import_module("flax_gpt.masks")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flax_gpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
