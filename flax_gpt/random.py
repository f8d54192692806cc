"""The counter-based generator behind every dropout; `torch_ref/random.py` repeats it bit for bit.

A key is a pair of 32-bit words. Mixing is two rounds of multiply and xor-shift with the constants of lowbias32 (Wellons 2018, "Prospecting for
hash functions") with the key entering before both rounds: a keyed hash of a counter, as in Salmon et al. 2011 ("Parallel random numbers: as easy
as 1, 2, 3"), light enough to fuse with the multiplication that uses it. Not for cryptography.
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ODD = np.uint32(0x9E3779B1)
_MIX1 = np.uint32(0x7FEB352D)
_MIX2 = np.uint32(0x846CA68B)
_OTHER = np.uint32(0x85EBCA6B)


def _hash(k0: Any, k1: Any, word: Any) -> jax.Array:
    x = word * _ODD + k0
    x = (x ^ (x >> 16)) * _MIX1
    x = (x ^ (x >> 15)) ^ k1
    x = x * _MIX2
    x = (x ^ (x >> 16)) * _ODD
    return x ^ (x >> 15)


def key_from_seed(seed: int) -> np.ndarray:
    """The key (2,) uint32 of a seed in [0, 2**64)."""
    return np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)


def as_key(key: Any) -> jax.Array:
    """A key (..., 2) uint32 from one, or from a typed key of `jax.random`. Raises TypeError for anything else."""
    if hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    key = jnp.asarray(key)
    if key.dtype != jnp.uint32 or key.ndim < 1 or key.shape[-1] != 2:
        raise TypeError(f"a dropout key is a (..., 2) uint32 array or a threefry key, not {key.dtype}{list(key.shape)}")
    return key


def _aligned(key: Any, word: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The two words of the key and the counter, with equally many axes."""
    word = jnp.asarray(word).astype(jnp.uint32)
    k0, k1 = key[..., 0], key[..., 1]
    rank = max(word.ndim, k0.ndim)
    return tuple(x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (k0, k1, word))


def fold(key: Any, word: Any) -> jax.Array:
    """A new key from `key` (..., 2) and a 32-bit `word`; the leading axes of both broadcast."""
    k0, k1, word = _aligned(key, word)
    return jnp.stack(jnp.broadcast_arrays(_hash(k0, k1, word), _hash(k1 ^ _OTHER, k0, word)), axis=-1)


def fold_name(key: Any, name: str) -> jax.Array:
    """A new key for a named place."""
    return fold(key, np.uint32(zlib.crc32(name.encode())))


def bits(key: Any, index: Any) -> jax.Array:
    """32 random bits a counter: key (..., 2) and index broadcast to the result's shape, uint32."""
    return _hash(*_aligned(key, index))


def fold_coordinates(key: Any, shape: tuple[int, ...], first: tuple[Any, ...] = ()) -> jax.Array:
    """Keys (*shape, 2): `key` (2,) folded with each coordinate in turn; axis i starts counting at first[i]."""
    for axis, size in enumerate(shape):
        start = first[axis] if axis < len(first) else 0
        key = fold(key[..., None, :], jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(start).astype(jnp.uint32))
    return key


def threshold(rate: float) -> int:
    """Bits below this are dropped: round(rate * 2**32), at most the largest word."""
    return min(round(rate * 2**32), 2**32 - 1)


def keep_mask(key: Any, rate: float, shape: tuple[int, ...], first: tuple[Any, ...] = ()) -> jax.Array:
    """Booleans of `shape`, False with probability `rate` in [0, 1); the first axes start counting at `first`."""
    keys = fold_coordinates(key, shape[:-1], first)
    return bits(keys[..., None, :], jnp.arange(shape[-1], dtype=jnp.uint32)) >= np.uint32(threshold(rate))
