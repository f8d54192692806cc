"""Angles of rotary positions, in float64 on the host. NumPy alone, for both frameworks."""

import math

import numpy as np

from flax_gpt.config import RopeConfig, TransformerConfig
from flax_gpt.errors import require

DYNAMIC = ("dynamic_linear", "dynamic_ntk")
"""Scalings whose frequencies depend on the length of the sequence."""


def inverse_frequencies(config: TransformerConfig, length: int) -> np.ndarray:
    """Radians a position, (Dh/2,), for a sequence of `length` tokens: base^(-2i/Dh) (Su et al. 2021, equation 15) under `config.rope.scaling`."""
    rope, width = config.rope, config.head_dim
    plain = _powers(rope.base, width)
    trained = trained_len(config)
    match rope.scaling:
        case "linear":  # Chen et al. 2023, equation 4
            return plain / rope.factor
        case "dynamic_linear":
            return plain * min(1.0, trained / length)
        case "ntk":
            return _powers(ntk_base(rope.base, rope.factor, width), width)
        case "dynamic_ntk":
            longer = rope.factor * length / trained - (rope.factor - 1)
            return _powers(ntk_base(rope.base, longer, width), width) if length > trained else plain
        case "yarn":
            return _yarn(rope, plain, trained)
        case "llama3":
            return _llama3(rope, plain, trained)
    return plain


def ntk_base(base: float, factor: float, width: int) -> float:
    """base · factor^(Dh / (Dh - 2)): the slowest pair then turns `factor` times slower, the fastest as before.

    Published as "NTK-aware scaled RoPE" (bloc97 2023; Peng et al. 2023, section 3.1).
    """
    require(factor > 0, "factor", factor, "must be above 0")
    require(width > 2, "head width", width, "must be above 2: the exponent Dh / (Dh - 2) needs a second pair")
    return base * factor ** (width / (width - 2))


def interpolated(positions: np.ndarray, trained: int, length: int) -> np.ndarray:
    """positions × min(1, trained / length), as real numbers: neighbours stay apart (Chen et al. 2023)."""
    require(trained >= 1, "trained", trained, "must be at least 1")
    require(length >= 1, "length", length, "must be at least 1")
    return np.asarray(positions, np.float64) * min(1.0, trained / length)


def trained_len(config: TransformerConfig) -> int:
    """The length in training that the scaling refers to."""
    rope = config.rope
    if rope.trained_len is not None:
        return rope.trained_len
    return config.max_len if rope.scaling in DYNAMIC else max(1, round(config.max_len / rope.factor))


def attention_factor(config: TransformerConfig) -> float:
    """What yarn multiplies cos and sin with (Peng et al. 2023, equation 22); 1 elsewhere."""
    rope = config.rope
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def tables(config: TransformerConfig, length: int, span: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin (length, Dh/2) float64 at positions 0 … length - 1 of a sequence of `span` tokens."""
    angles = np.arange(length)[:, None] * inverse_frequencies(config, span)
    factor = attention_factor(config)
    return np.cos(angles) * factor, np.sin(angles) * factor


def turns(config: TransformerConfig, pieces: int = 4) -> np.ndarray:
    """Turns a position for every span, (max_len + 1, pieces, Dh/2) float32, each the sum of its pieces.

    A product position × piece is exact in float32 for all pieces but the last, so that whole turns can be dropped before anything is rounded: the
    product with one float32 frequency is off by 1.5e-4 radians at position 8191.
    """
    spans = [inverse_frequencies(config, max(span, 1)) / (2 * math.pi) for span in range(config.max_len + 1)]
    rest = np.array(spans, np.float64)
    bits = 24 - max(1, math.ceil(math.log2(config.max_len + 1)))
    parts = []
    for piece in range(1, pieces):
        part = np.floor(rest * 2.0 ** (bits * piece)) / 2.0 ** (bits * piece)
        parts.append(part)
        rest = rest - part
    return np.stack([*parts, rest], axis=1).astype(np.float32)


def _powers(base: float, width: int) -> np.ndarray:
    return base ** (-np.arange(0, width, 2) / width)


def _yarn(rope: RopeConfig, plain: np.ndarray, trained: int) -> np.ndarray:
    """Fast pairs as they are, slow ones interpolated, a ramp between (Peng et al. 2023, section 3.2)."""
    width = 2 * len(plain)

    def pair(rotations: float) -> float:
        return width * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = max(math.floor(pair(rope.beta_fast)), 0), min(math.ceil(pair(rope.beta_slow)), width - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low if high != low else 0.001), 0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _llama3(rope: RopeConfig, plain: np.ndarray, trained: int) -> np.ndarray:
    """Long wavelengths interpolated, short ones left alone, a blend between (Dubey et al. 2024 and the published Llama 3.1 code)."""
    turns_in_training = trained * plain / (2 * math.pi)
    blend = np.clip((turns_in_training - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain
