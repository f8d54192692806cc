"""The same weights and the same batches for both workers, in numpy."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from benchmarks.cases import Attention, Beam, Generate, ModelCase
from flax_gpt.config import INIT_STD, GPTConfig
from flax_gpt.weights.torch_names import MINIGPT


def normal(shape: tuple[int, ...], number: int) -> np.ndarray:
    """Unit normal float32 values; the `number` tells arrays apart."""
    return np.random.default_rng(number).standard_normal(shape, np.float32)


def attention(case: Attention) -> list[np.ndarray]:
    """q (B, T, H, Dh), k and v (B, T, K, Dh), and the gradient of the output, rounded to the case's dtype and back."""
    shapes = [(case.batch, case.length, heads, case.width) for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
    return [rounded(normal(shape, number), case.dtype) for number, shape in enumerate(shapes)]


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values that `dtype` holds."""
    import ml_dtypes

    return values if dtype == "float32" else values.astype(getattr(ml_dtypes, dtype)).astype(np.float32)


def weights(config: GPTConfig) -> dict[str, np.ndarray]:
    """{file name: array} of a MiniGPT, drawn as the scaled initialisation draws them, norms and biases away from 1 and 0 so that each counts."""
    rng = np.random.default_rng(1)
    D, F, kv = config.d_model, config.ff_width, config.kv_heads * config.head_dim
    draw = lambda *shape, std=INIT_STD, mean=0.0: mean + std * rng.standard_normal(shape, np.float32)
    named = {"token_embed.weight": draw(config.vocab_size, D)}
    if config.positions == "learned":
        named["positions.embedding.weight"] = draw(config.max_len, D)

    def linear(name: str, outputs: int, inputs: int, bias: bool, std: float = INIT_STD) -> None:
        named[f"{name}.weight"] = draw(outputs, inputs, std=std)
        if bias:
            named[f"{name}.bias"] = draw(outputs)

    def norm(name: str) -> None:
        named[f"{name}.weight"], named[f"{name}.bias"] = draw(D, mean=1.0), draw(D)

    for i in range(config.num_layers):
        norm(f"blocks.{i}.norm1")
        for part, width in (("query", D), ("key", kv), ("value", kv)):
            linear(f"blocks.{i}.attention.{part}", width, D, config.attention_bias)
        linear(f"blocks.{i}.attention.output", D, D, config.attention_bias, config.residual_std)
        norm(f"blocks.{i}.norm2")
        linear(f"blocks.{i}.feed_forward.linear1", F, D, config.feed_forward_bias)
        linear(f"blocks.{i}.feed_forward.linear2", D, F, config.feed_forward_bias, config.residual_std)
    norm("final_norm")
    return {MINIGPT.to_file(name): array.astype(np.float32) for name, array in named.items()}


def model_weights(case: ModelCase) -> dict[str, np.ndarray]:
    """Those of the case's model: `weights`, or the trained ones."""
    return load_file(Path(case.trained) / "weights.safetensors") if case.trained else weights(case.model.config)


def tokens(case: ModelCase, number: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """tokens and targets (B, T) int32 of a training batch: the target is the token that follows."""
    size, rng = case.model, np.random.default_rng(100 + number)
    if case.trained:
        corpus = np.load(Path(case.trained) / "tokens.npy")
        starts = rng.integers(0, len(corpus) - size.length, (size.batch, 1))
        rows = corpus[starts + np.arange(size.length + 1)].astype(np.int32)
    else:
        rows = rng.integers(0, size.config.vocab_size, (size.batch, size.length + 1), dtype=np.int32)
    return rows[:, :-1].copy(), rows[:, 1:].copy()


def classes(rows: int, width: int) -> np.ndarray:
    """(rows,) int32 in [0, width)."""
    return np.random.default_rng(90).integers(0, width, rows, dtype=np.int32)


def prompts(case: Generate | Beam) -> np.ndarray:
    """(B, T) int32."""
    rng, shape = np.random.default_rng(80), (case.batch, case.prompt)
    if case.trained:
        corpus = np.load(Path(case.trained) / "tokens.npy")
        return corpus[rng.integers(0, len(corpus) - case.prompt, (case.batch, 1)) + np.arange(case.prompt)].astype(np.int32)
    return rng.integers(0, case.config.vocab_size, shape, dtype=np.int32)


COUNTED_TOKENS = 128
"""Tokens whose loss counts in the batch that is compared: the float64 truth is computed for their rows alone."""


def counted_rows(batch: int, length: int) -> int:
    """Rows of the compared batch that count; all rows go through the program that is timed, the others with a weight of 0."""
    return max(1, min(batch, COUNTED_TOKENS // length))


PRODUCT_ROWS = 64
"""Rows of a large product that are compared."""

SAMPLED = 2048


def thin(array: np.ndarray) -> np.ndarray:
    """At most SAMPLED elements: what is kept of a large result, the same random places on each side."""
    flat = np.asarray(array).reshape(-1)
    return flat if flat.size <= SAMPLED else flat[np.random.default_rng(flat.size).integers(0, flat.size, SAMPLED)]


DROPOUT_KEY = np.array([7, 11], np.uint32)
"""Seed key of dropout in JAX's training cases, and in the float64 run that they are compared with."""
