"""What `jax.random` draws, number by number, in plain torch: threefry2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

This is the generator of initial weights; every dropout has its own, `torch_ref/random.py`. A key is a (2,) tensor of 32-bit words held in int64, the
words of `jax.random.key_data`. Draws are those of JAX's defaults since 0.5, `jax_threefry_partitionable=True`: element i of an array depends on
(key, i) alone. Functions, arguments and defaults are `jax.random`'s; a dtype is torch's. Keys, bits, integers, Booleans and uniform numbers in [0, 1)
are equal on every device. Other floats in float32 are equal bit for bit to a compiled function of `jax.random` on a processor with fused
multiply-add, and within a few units in the last place elsewhere and in other dtypes: see `torch_ref/xla_math.py`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from flax_gpt.errors import require
from torch_ref.random import as_key
from torch_ref.xla_math import erf_inv, fused, log

_WORD = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_UNSIGNED = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)
_BITS = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 8}  # bits drawn for a float, of which the mantissa is the top
_MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


# Keys


def key(seed: int) -> Tensor:
    """The key (2,) of a seed in [-2**63, 2**63): its high and its low 32 bits. JAX drops the high ones unless `jax_enable_x64` is set."""
    require(isinstance(seed, int) and -(2**63) <= seed < 2**63, "seed", seed, "must be an integer in [-2**63, 2**63)")
    return torch.tensor([(seed >> 32) & _WORD, seed & _WORD])


def split(key: Any, num: int | tuple[int, ...] = 2) -> Tensor:
    """`num` new keys, (num, 2), or (*num, 2)."""
    return torch.stack(_counted(key, (num,) if isinstance(num, int) else tuple(num)), dim=-1)


def fold_in(key: Any, data: int) -> Tensor:
    """A new key (2,) from a key and a 32-bit integer."""
    k0, k1 = _words(key)
    return torch.stack(threefry2x32(k0, k1, torch.tensor(0), torch.tensor(int(data) & _WORD)))


def threefry2x32(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """The block cipher behind all of it, 20 rounds: two words of key and two of counter, all of one shape, to two words."""
    keys = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0, x1 = (x0 + k0) & _WORD, (x1 + k1) & _WORD
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = (x0 + x1) & _WORD
            x1 = x0 ^ (((x1 << rotation) & _WORD) | (x1 >> (32 - rotation)))
        x0 = (x0 + keys[(block + 1) % 3]) & _WORD
        x1 = (x1 + keys[(block + 2) % 3] + (block + 1)) & _WORD
    return x0, x1


def _words(key: Any) -> tuple[Tensor, Tensor]:
    key = as_key(key)
    require(tuple(key.shape) == (2,), "key", list(key.shape), "must be one key: a (2,) tensor of 32-bit words")
    return key[0], key[1]


def _counted(key: Any, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Two words for each element of an array of `shape`, from its number in row-major order."""
    k0, k1 = _words(key)
    count = torch.arange(math.prod(shape), device=k0.device).reshape(shape)
    return threefry2x32(k0, k1, count >> 32, count & _WORD)


# Integers


def bits(key: Any, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.uint32) -> Tensor:
    """Random bits, an array of torch.uint8, uint16, uint32 or uint64."""
    require(dtype in _UNSIGNED, "dtype", dtype, "must be torch.uint8, uint16, uint32 or uint64")
    found = _bits(key, shape, _UNSIGNED[dtype])
    return found.view(dtype) if dtype == torch.uint64 else found.to(dtype)


def _bits(key: Any, shape: tuple[int, ...], width: int) -> Tensor:
    """The same in int64, where 64 bits fill the sign too."""
    high, low = _counted(key, shape)
    return (high << 32) | low if width == 64 else (high ^ low) & ((1 << width) - 1)


def randint(key: Any, shape: tuple[int, ...], minval: int, maxval: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Integers in [minval, maxval) of 32 bits or fewer; minval where maxval is not above it. Bounds beyond the dtype are clipped to it."""
    require(dtype in _INTEGERS, "dtype", dtype, "must be torch.int8, uint8, int16 or int32")
    limits = torch.iinfo(dtype)
    low, high = (min(max(int(value), limits.min), limits.max + 1) for value in (minval, maxval))
    low = min(low, limits.max)
    span = max(high - low, 1)
    upper, lower = (_bits(k, shape, 32) for k in split(key))
    multiplier = (2**16 % span) ** 2 % 2**32 % span
    offset = (((upper % span) * multiplier) & _WORD) + lower % span
    return (low + (offset & _WORD) % span).to(dtype)


def permutation(key: Any, x: int | Tensor, axis: int = 0, independent: bool = False) -> Tensor:
    """0 … x - 1, or x along `axis`, in random order; `independent` shuffles each vector along the axis by itself."""
    if isinstance(x, int):
        return _shuffle(key, torch.arange(x), 0)
    require(x.ndim > 0, "x", x.ndim, "must be an integer or have an axis")
    if independent or x.ndim == 1:
        return _shuffle(key, x, axis)
    return x.index_select(axis, _shuffle(key, torch.arange(x.shape[axis]), 0).to(x.device))


def _shuffle(key: Any, x: Tensor, axis: int) -> Tensor:
    """Sorts by random words, as often as makes equal words harmless."""
    for _ in range(math.ceil(3 * math.log(max(1, x.numel())) / math.log(_WORD))):
        key, subkey = split(key)
        x = x.gather(axis, torch.argsort(_bits(subkey, tuple(x.shape), 32), dim=axis, stable=True))
    return x


# Floats


def uniform(key: Any, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32, minval: Any = 0.0, maxval: Any = 1.0) -> Tensor:
    """Numbers in [minval, maxval), which broadcast to `shape`, on a grid of 2^mantissa steps."""
    require(dtype in _BITS, "dtype", dtype, "must be a float dtype")
    mantissa = _MANTISSA[dtype]
    number = (_bits(key, shape, _BITS[dtype]) >> (_BITS[dtype] - mantissa)) & ((1 << mantissa) - 1)
    unit = (number.to(torch.float64) * 2.0**-mantissa).to(dtype)
    low, high = (torch.as_tensor(value, dtype=dtype) for value in (minval, maxval))
    return torch.maximum(low, unit * (high - low) + low if dtype == torch.bfloat16 else fused(unit, high - low, low))


def bernoulli(key: Any, p: Any = 0.5, shape: tuple[int, ...] | None = None) -> Tensor:
    """Booleans, True with probability p, which broadcasts to `shape`; a Python number counts as float32."""
    p = p if isinstance(p, Tensor) else torch.tensor(p, dtype=torch.float32)
    return uniform(key, tuple(p.shape) if shape is None else shape, p.dtype) < p


def normal(key: Any, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers: √2 erf⁻¹(u), u uniform in (-1, 1)."""
    end = torch.tensor(-1 + torch.finfo(dtype).eps / 2, dtype=dtype)
    return _root2(dtype) * erf_inv(uniform(key, shape, dtype, end, 1.0))


def truncated_normal(key: Any, lower: Any, upper: Any, shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, given that they lie between lower and upper, which broadcast to `shape`.

    JAX rounds the error function of the two bounds its own way: where it differs in the last place all numbers may.
    """
    lower, upper = (torch.as_tensor(value, dtype=dtype) for value in (lower, upper))
    shape = torch.broadcast_shapes(lower.shape, upper.shape) if shape is None else shape
    a, b = (torch.erf((value / _root2(dtype)).to(torch.float64)).to(dtype) for value in (lower, upper))
    drawn = _root2(dtype) * erf_inv(uniform(key, shape, dtype, a, b))
    up, down = (torch.tensor(end, dtype=dtype) for end in (math.inf, -math.inf))
    return torch.clamp(drawn, torch.nextafter(lower, up), torch.nextafter(upper, down))


def gumbel(key: Any, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard Gumbel numbers: -ln(-ln u), u uniform in (0, 1)."""
    return -log(-log(uniform(key, shape, dtype, torch.finfo(dtype).tiny, 1.0)))


def categorical(key: Any, logits: Tensor, axis: int = -1, shape: tuple[int, ...] | None = None) -> Tensor:
    """Indices int64 along `axis`, drawn from the softmax of `logits`; `shape` (default: logits' without the axis) may have further axes in front.

    The largest of logits + Gumbel noise (Gumbel 1954), the lowest index among equals.
    """
    axis = axis % logits.ndim - logits.ndim
    batch = tuple(size for place, size in enumerate(logits.shape) if place != axis % logits.ndim)
    shape = batch if shape is None else tuple(shape)
    full = list(shape)
    full.insert(len(full) + 1 + axis, logits.shape[axis])
    return torch.argmax(gumbel(key, tuple(full), logits.dtype) + logits, dim=axis)


def _root2(dtype: torch.dtype) -> Tensor:
    return torch.tensor(math.sqrt(2), dtype=dtype)
