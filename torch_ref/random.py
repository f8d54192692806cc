"""The counter-based generator behind every dropout, bit for bit that of `flax_gpt/random.py`; initial weights come from `torch_ref/jax_random.py`.

torch has no arithmetic on unsigned 32-bit words: a word is an int64 in [0, 2**32), and products are cut back to 32 bits.
"""

import zlib
from typing import Any

import torch
from torch import Tensor

_ODD = 0x9E3779B1
_MIX1 = 0x7FEB352D
_MIX2 = 0x846CA68B
_OTHER = 0x85EBCA6B
_WORD = 0xFFFFFFFF


def _hash(k0: Tensor, k1: Tensor, word: Tensor) -> Tensor:
    x = (word * _ODD + k0) & _WORD
    x = ((x ^ (x >> 16)) * _MIX1) & _WORD
    x = (x ^ (x >> 15)) ^ k1
    x = (x * _MIX2) & _WORD
    x = ((x ^ (x >> 16)) * _ODD) & _WORD
    return x ^ (x >> 15)


def key_from_seed(seed: int) -> Tensor:
    """The key (2,) of a seed in [0, 2**64)."""
    return torch.tensor([seed & _WORD, (seed >> 32) & _WORD])


def as_key(key: Any) -> Tensor:
    """A key (..., 2) of 32-bit words held in int64. Raises TypeError for anything else."""
    key = torch.as_tensor(key)
    if key.dtype not in (torch.int64, torch.uint32) or key.ndim < 1 or key.shape[-1] != 2:
        raise TypeError(f"a dropout key is a (..., 2) tensor of 32-bit words, not {key.dtype}{list(key.shape)}")
    return key.to(torch.int64)


def fold(key: Tensor, word: Any) -> Tensor:
    """A new key from `key` (..., 2) and a 32-bit `word`; the leading axes of both broadcast."""
    word = torch.as_tensor(word, device=key.device) & _WORD
    k0, k1 = key[..., 0], key[..., 1]
    return torch.stack(torch.broadcast_tensors(_hash(k0, k1, word), _hash(k1 ^ _OTHER, k0, word)), dim=-1)


def fold_name(key: Tensor, name: str) -> Tensor:
    """A new key for a named place."""
    return fold(key, zlib.crc32(name.encode()))


def bits(key: Tensor, index: Any) -> Tensor:
    """32 random bits a counter: key (..., 2) and index broadcast to the result's shape, int64."""
    return _hash(key[..., 0], key[..., 1], torch.as_tensor(index, device=key.device) & _WORD)


def fold_coordinates(key: Tensor, shape: tuple[int, ...], first: tuple[Any, ...] = ()) -> Tensor:
    """Keys (*shape, 2): `key` (2,) folded with each coordinate in turn; axis i starts counting at first[i]."""
    for axis, size in enumerate(shape):
        start = first[axis] if axis < len(first) else 0
        key = fold(key[..., None, :], torch.arange(size, device=key.device) + start)
    return key


def threshold(rate: float) -> int:
    """Bits below this are dropped: round(rate * 2**32), at most the largest word."""
    return min(round(rate * 2**32), 2**32 - 1)


def keep_mask(key: Tensor, rate: float, shape: tuple[int, ...], first: tuple[Any, ...] = ()) -> Tensor:
    """Booleans of `shape`, False with probability `rate` in [0, 1); the first axes start counting at `first`."""
    keys = fold_coordinates(key, shape[:-1], first)
    return bits(keys[..., None, :], torch.arange(shape[-1], device=key.device)) >= threshold(rate)
