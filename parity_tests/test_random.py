"""The generator behind every dropout: the same bits in both packages, and bits that pass for random.

Statistics are computed from fixed keys and judged by `DOUBT`: the chance that true randomness fails, shared among all that a test looks at.
"""

import itertools
import math
import os
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flax_gpt import random
from torch_ref import random as torch_random

DOUBT = 1e-9
KEYS = [random.key_from_seed(seed) for seed in (0, 1, 2, 2**32, 2**64 - 1, 0xDEADBEEF12345678)]
words = st.integers(0, 2**32 - 1)


def to_torch(key):
    return torch.from_numpy(np.asarray(key).astype(np.int64))


def same(ours, theirs):
    np.testing.assert_array_equal(np.asarray(ours), theirs.numpy())


def draw(key, shape, first=()):
    """32 bits for every element of an array, as keep_mask takes them."""
    keys = random.fold_coordinates(key, shape[:-1], first)
    return np.asarray(random.bits(keys[..., None, :], jnp.arange(shape[-1], dtype=jnp.uint32)))


def sigmas(looks):
    """How many standard deviations `looks` normal values may stray together."""
    return statistics.NormalDist().inv_cdf(1 - DOUBT / (2 * looks))


def unit(bits):
    """Bits → numbers with mean 0 and variance 1."""
    return (bits / 2**32 - 0.5) * math.sqrt(12)


# Bit for bit


@given(st.integers(0, 2**64 - 1), words, words, st.text(max_size=20))
def test_both_packages_give_the_same_bits(seed, word, index, name):
    ours, theirs = random.key_from_seed(seed), torch_random.key_from_seed(seed)
    same(ours, theirs)
    same(random.fold(ours, np.uint32(word)), torch_random.fold(theirs, word))
    same(random.fold_name(ours, name), torch_random.fold_name(theirs, name))
    same(random.bits(ours, np.uint32(index)), torch_random.bits(theirs, index))


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("rate", [0.0, 0.1, 1 / 3, 0.9999999999])
@pytest.mark.parametrize("first", [(), (2**31 + 3,)])
def test_both_packages_keep_the_same_elements(shape, rate, first):
    key = random.key_from_seed(11)
    first = first[: len(shape) - 1]
    same(
        random.keep_mask(key, rate, shape, tuple(map(np.uint32, first))),
        torch_random.keep_mask(to_torch(key), rate, shape, first),
    )
    same(random.fold_coordinates(key, shape, ()), torch_random.fold_coordinates(to_torch(key), shape, ()))
    assert random.threshold(rate) == torch_random.threshold(rate)


def test_jit_and_vmap_change_nothing():
    key = random.key_from_seed(5)
    plain = random.keep_mask(key, 0.3, (4, 6))
    np.testing.assert_array_equal(plain, jax.jit(random.keep_mask, static_argnums=(1, 2))(key, 0.3, (4, 6)))
    rows = jax.vmap(lambda row: random.keep_mask(random.fold(key, row), 0.3, (6,)))(jnp.arange(4, dtype=jnp.uint32))
    np.testing.assert_array_equal(plain, rows)


def test_known_answers():
    """A change of the generator would break resumed runs: these bits are for ever."""
    key = random.fold_name(random.fold(random.key_from_seed(42), np.uint32(7)), "blocks.0.residual1")
    assert np.asarray(random.bits(key, np.arange(4, dtype=np.uint32))).tolist() == KNOWN
    assert torch_random.bits(to_torch(key), torch.arange(4)).tolist() == KNOWN


KNOWN = [4166548690, 1872392757, 1031213098, 3752633009]


# Independence of everything but the coordinates


def test_sizes_of_axes_do_not_matter():
    """The bits of a smaller array are those of the larger one at the same coordinates."""
    key = random.key_from_seed(3)
    whole = draw(key, (5, 6, 70))
    np.testing.assert_array_equal(draw(key, (2, 3, 9)), whole[:2, :3, :9])


def test_order_and_split_of_a_batch_do_not_matter():
    key = random.key_from_seed(4)
    whole = draw(key, (8, 5, 16))
    for part in (1, 2, 4):
        pieces = [draw(key, (part, 5, 16), (np.uint32(start),)) for start in reversed(range(0, 8, part))]
        np.testing.assert_array_equal(np.concatenate(pieces[::-1]), whole)


def test_number_of_devices_does_not_matter(run_on_devices):
    """Sharded over four devices, on any axis, as on one."""
    expected = np.asarray(random.keep_mask(random.key_from_seed(6), 0.25, (8, 4, 12)))
    assert run_on_devices(SHARDED, 4).split() == ["".join("01"[int(kept)] for kept in expected.ravel())] * 2


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from flax_gpt import random
assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()), ("data",))
for spec in (PartitionSpec("data"), PartitionSpec(None, "data")):
    draw = jax.jit(lambda: random.keep_mask(random.key_from_seed(6), 0.25, (8, 4, 12)), out_shardings=NamedSharding(mesh, spec))
    found = draw()
    assert len(found.addressable_shards) == 4
    print("".join("01"[int(kept)] for kept in np.asarray(found).ravel()))
"""


@pytest.fixture
def run_on_devices():
    def run(code, count):
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


# Quality


@pytest.mark.parametrize("key", KEYS, ids=lambda key: f"{int(key[1]):x}.{int(key[0]):x}")
def test_each_bit_is_balanced_and_independent_of_the_others(key):
    bits = draw(key, (64, 1024)).ravel()
    planes = ((bits[:, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(np.float64) * 2 - 1
    correlation = planes.T @ planes / math.sqrt(len(bits))
    assert np.abs(planes.sum(axis=0) / math.sqrt(len(bits))).max() < sigmas(32)
    assert np.abs(correlation[np.triu_indices(32, 1)]).max() < sigmas(32 * 31 / 2)


def test_neighbours_on_each_axis_are_uncorrelated():
    """Lags 1 to 16 on all four axes and along the diagonals; whole words and the top bit alone."""
    x = draw(random.key_from_seed(8), (24, 24, 24, 24))
    lags = list(itertools.product([axes for n in (1, 2) for axes in itertools.combinations(range(4), n)], range(1, 17)))
    for values in (unit(x), np.where(x >> 31, 1.0, -1.0)):
        for axes, lag in lags:
            behind = tuple(slice(lag, None) if axis in axes else slice(None) for axis in range(4))
            ahead = tuple(slice(None, -lag) if axis in axes else slice(None) for axis in range(4))
            products = values[behind] * values[ahead]
            assert abs(products.sum()) / math.sqrt(products.size) < sigmas(2 * len(lags)), (axes, lag)


def test_axes_are_not_interchangeable():
    """Element (i, j) and element (j, i) have nothing to do with each other, nor have (i, j) and (j - 1, i + 1)."""
    x = unit(draw(random.key_from_seed(9), (512, 512)))
    upper = np.triu_indices(512, 1)
    for other in (x.T, np.roll(x.T, (1, -1), (0, 1))):
        assert abs((x * other)[upper].sum()) / math.sqrt(len(upper[0])) < sigmas(2)


@pytest.mark.parametrize("place", ["counter", "coordinate", "step", "seed"])
def test_avalanche(place):
    """One bit of the input changes each bit of the output half the time."""
    count = 4096
    base = np.arange(count, dtype=np.uint32) * np.uint32(2654435761)
    key, zero = random.key_from_seed(10), np.uint32(0)
    hashes = {
        "counter": lambda words: random.bits(key, words),
        "coordinate": lambda words: random.bits(random.fold(key, words), zero),
        "step": lambda words: random.bits(random.fold(random.fold(random.fold(key, words), np.uint32(3)), np.uint32(1)), zero),
        "seed": lambda words: random.bits(jnp.stack([jnp.asarray(words), jnp.full(count, 3, jnp.uint32)], -1), zero),
    }
    run = jax.jit(hashes[place])
    plain = np.asarray(run(base))
    for bit in range(32):
        changed = np.asarray(run(base ^ np.uint32(1 << bit))) ^ plain
        flips = ((changed[:, None] >> np.arange(32, dtype=np.uint32)) & 1).sum(axis=0)
        assert np.abs(flips - count / 2).max() / math.sqrt(count / 4) < sigmas(32 * 32), bit


def test_words_fill_their_range_evenly():
    """Chi-square over 4,096 cells of the high and of the low bits, and over 64 × 64 cells of successive pairs."""
    bits = draw(random.key_from_seed(12), (256, 4096))
    pairs = (bits[:, 0::2] >> 26) * 64 + (bits[:, 1::2] >> 26)
    for cells in (bits >> 20, bits & 4095, pairs):
        counts = np.bincount(cells.ravel(), minlength=4096)
        expected = cells.size / 4096
        chi_square = ((counts - expected) ** 2 / expected).sum()
        normal = (chi_square - 4095) / math.sqrt(2 * 4095)  # 4,095 degrees of freedom: close to normal
        assert abs(normal) < sigmas(3) * 1.1


def test_no_word_comes_too_often():
    """2^20 words of 2^32: about 128 collisions; far fewer or more are a sign of structure."""
    bits = draw(random.key_from_seed(13), (1024, 1024)).ravel()
    expected = len(bits) ** 2 / 2**33
    collisions = len(bits) - len(np.unique(bits))
    assert abs(collisions - expected) / math.sqrt(expected) < sigmas(1)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_kept_counts_have_the_binomial_mean_and_variance(rate):
    """Over rows, over columns and over places: neither too far from the mean nor too close to it."""
    kept = np.asarray(random.keep_mask(random.key_from_seed(14), rate, (2048, 2048)))
    places = np.stack([np.asarray(random.keep_mask(random.fold_name(KEYS[0], f"place.{i}"), rate, (1, 2048)))[0] for i in range(256)])
    for drawn, axis in ((kept, 0), (kept, 1), (places, 0), (places, 1)):
        counts = drawn.sum(axis=axis)
        trials, variance = drawn.shape[axis], drawn.shape[axis] * rate * (1 - rate)
        assert abs(drawn.sum() - drawn.size * (1 - rate)) / math.sqrt(drawn.size * rate * (1 - rate)) < sigmas(4)
        kurtosis = (1 - 6 * rate * (1 - rate)) / variance  # excess, of the binomial
        spread = math.sqrt((2 + kurtosis) / len(counts))
        assert abs(np.mean((counts - trials * (1 - rate)) ** 2) / variance - 1) / spread < sigmas(4) * 1.2


def test_places_and_steps_are_independent():
    """Masks of other names, steps and seeds agree no more often than chance."""
    shape, rate = (64, 256), 0.3
    keys = [random.fold_name(random.fold(random.key_from_seed(seed), np.uint32(step)), name) for seed in (0, 1) for step in (0, 1) for name in "ab"]
    masks = [np.asarray(random.keep_mask(key, rate, shape)) - (1 - rate) for key in keys]
    pairs = list(itertools.combinations(masks, 2))
    for one, other in pairs:
        assert abs((one * other).sum()) / (math.sqrt(one.size) * rate * (1 - rate)) < sigmas(len(pairs))


def test_thresholds_are_rounded_and_fit_a_word():
    for module in (random, torch_random):
        assert [module.threshold(rate) for rate in (0.0, 0.1, 0.5, 1 - 2.0**-40)] == [0, 429_496_730, 2**31, 2**32 - 1]  # 0.1 · 2³² = 429,496,729.6


def test_a_rate_of_zero_keeps_everything():
    assert np.asarray(random.keep_mask(KEYS[0], 0.0, (64, 64))).all()


def test_keys_are_checked():
    for module, make in (
        (random, lambda x, dtype: np.asarray(x, dtype)),
        (torch_random, lambda x, dtype: torch.tensor(x, dtype=getattr(torch, dtype))),
    ):
        for bad in (make([1, 2], "int32"), make([1, 2, 3], "int64"), make([1.0, 2.0], "float32")):
            with pytest.raises(TypeError, match="a dropout key is"):
                module.as_key(bad)
    same(random.as_key(jax.random.key(3)), torch_random.as_key(torch.tensor([0, 3])))
