"""The arrays that the original programs computed, in float32 on a CPU."""

import functools
import pathlib

import numpy as np
from safetensors.numpy import load_file

from flax_gpt.config import EncoderConfig, GPTConfig, OptimizerConfig

CONFIGS: dict[str, GPTConfig | EncoderConfig] = {
    "minigpt": GPTConfig(vocab_size=37, d_model=32, num_heads=4, num_layers=2, d_ff=64, max_len=16),
    "minigpt_seed_size": GPTConfig(vocab_size=233, d_model=64, num_heads=4, num_layers=3, d_ff=256),
    "tiny_transformer": EncoderConfig(),
}

OPTIMIZERS = {
    "adamw": OptimizerConfig(optimizer="adamw", lr=3e-3, schedule="constant", weight_decay=0.01, decay="all", clip=1.0),
    "adam": OptimizerConfig(optimizer="adam", lr=1e-3, schedule="constant", clip=None),
}


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """Everything in golden/NAME.safetensors."""
    return load_file(pathlib.Path(__file__).parent / "golden" / f"{name}.safetensors")


def group(name: str, prefix: str) -> dict[str, np.ndarray]:
    """The arrays under `prefix`/, without it."""
    return {key.removeprefix(f"{prefix}/"): value for key, value in arrays(name).items() if key.startswith(f"{prefix}/")}


def batch(name: str) -> dict[str, np.ndarray]:
    """tokens and targets of a model's file."""
    found = arrays(name)
    return {"tokens": found["tokens"], "targets": found["targets" if "targets" in found else "labels"]}


def outputs(name: str) -> dict[str, np.ndarray]:
    """What one forward and backward pass gave, under the names of `oracle.torch_values`."""
    found = arrays(name)
    values = {key: value for key, value in found.items() if key == "logits" or key.startswith(("attention/", "grads/"))}
    return values | {key: found[key].reshape(()) for key in ("loss", "grad_norm") if key in found}


def steps(name: str, optimizer: str) -> tuple[int, dict[str, np.ndarray]]:
    """How many optimizer steps were taken, and what they gave, under the names of `oracle.torch_steps`."""
    losses = arrays(name)[f"{optimizer}/losses"]
    values = {f"step{len(losses)}/{key}": value for key, value in group(name, optimizer).items() if key != "losses"}
    return len(losses), {"losses": losses} | values
