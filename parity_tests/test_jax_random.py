"""`jax.random` in torch: the same bits, integers, floats, weights and sampled text from the same key."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flax_gpt.generation.draws
import flax_gpt.training.state
import torch_ref.generation.draws
import torch_ref.generation.sampling
import torch_ref.training.state
import torch_ref.weights.tree
from flax_gpt.config import EncoderConfig, EncoderDecoderConfig, GPTConfig
from flax_gpt.errors import InputError
from flax_gpt.generation.sampling import generate
from flax_gpt.weights import tree
from parity_tests import compare, tolerances
from parity_tests.report import Report
from torch_ref import jax_random, xla_math

MANY, JUDGED = 1 << 20, 1 << 15
FLOATS = ("float32", "float16", "bfloat16", "float64")
seeds = st.integers(-(2**63), 2**63 - 1)


def as_numpy(x):
    if isinstance(x, torch.Tensor):
        return x.to(torch.float32).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x


def same(theirs, ours):
    np.testing.assert_array_equal(as_numpy(theirs), as_numpy(ours), strict=as_numpy(theirs).dtype.kind in "fb")


@jax.jit
def _multiply_and_add(a, b, c):
    return a * b + c


def rounds_alike():
    """Whether XLA is the one that `xla_math` repeats and this processor has fused multiply-add: then float32 must agree to the last bit."""
    a = np.linspace(1, 2, 1001, dtype=np.float32)
    fused = xla_math.fused(torch.from_numpy(a), torch.from_numpy(a), -1.0).numpy()
    return jax.__version__.startswith("0.10.") and np.array_equal(_multiply_and_add(a, a, np.float32(-1)), fused)


def hold(name, ours, theirs, truth):
    """Bit for bit where the arithmetic is the same; everywhere within what rounding explains of the float64 program `truth`."""
    if rounds_alike():
        same(theirs, ours)
    report, run = Report(), lambda: {name: truth().numpy()}
    compare.judge(report, "float32", {"flax": {name: as_numpy(ours)}, "torch": {name: as_numpy(theirs)}}, run(), tolerances.scatter(run))
    assert report.ok, report.failures()


# Bit for bit on every device


@given(seeds, st.integers(0, 2**32 - 1))
def test_keys(seed, word):
    with jax.enable_x64(True):
        ours = jax.random.key(seed)
    theirs = jax_random.key(seed)
    same(theirs, jax.random.key_data(ours))
    same(jax_random.fold_in(theirs, word), jax.random.key_data(jax.random.fold_in(ours, np.uint32(word))))
    same(jax_random.split(theirs, 3), jax.random.key_data(jax.random.split(ours, 3)))
    same(jax_random.split(theirs, (2, 5)), jax.random.key_data(jax.random.split(ours, (2, 5))))


@pytest.mark.parametrize("width", [8, 16, 32, 64])
@pytest.mark.parametrize("shape", [(), (5, 0), (20_011,)])
def test_bits(width, shape):
    with jax.enable_x64(width == 64):
        same(jax_random.bits(jax_random.key(11), shape, getattr(torch, f"uint{width}")), jax.random.bits(jax.random.key(11), shape, f"uint{width}"))


def test_known_answer():
    """A vector of the authors' own: threefry2x32 of 20 rounds for the key and counter of π's digits (Random123, kat_vectors)."""
    words = (torch.tensor(word) for word in (0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3))
    assert [int(word) for word in jax_random.threefry2x32(*words)] == [0xC4923A9C, 0x483DF7A0]


@pytest.mark.parametrize("bounds", [(0, 10), (-(2**31), 2**31 - 1), (7, 2), (-1000, 40_000)])
@pytest.mark.parametrize("dtype", ["int32", "int16", "int8", "uint8"])
def test_integers(bounds, dtype):
    same(
        jax_random.randint(jax_random.key(3), (2, 501), *bounds, getattr(torch, dtype)),
        jax.random.randint(jax.random.key(3), (2, 501), *bounds, dtype),
    )


@pytest.mark.parametrize("size", [0, 1, 10, 5000])
def test_permutations(size):
    same(jax_random.permutation(jax_random.key(4), size), jax.random.permutation(jax.random.key(4), size))


@pytest.mark.parametrize(("axis", "independent"), [(0, True), (1, False), (-1, True)])
def test_permutations_along_an_axis(axis, independent):
    x = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    theirs = jax_random.permutation(jax_random.key(5), torch.from_numpy(x), axis, independent)
    same(theirs, jax.random.permutation(jax.random.key(5), jnp.asarray(x), axis, independent))


@pytest.mark.parametrize("p", [0.0, 0.1, 1 / 3, 0.9999, 1.0])
def test_booleans(p):
    same(jax_random.bernoulli(jax_random.key(6), p, (MANY,)), jax.random.bernoulli(jax.random.key(6), p, (MANY,)))


def test_booleans_of_an_array():
    p = np.linspace(0, 1, 1001, dtype=np.float32)
    same(jax_random.bernoulli(jax_random.key(6), torch.from_numpy(p)), jax.random.bernoulli(jax.random.key(6), jnp.asarray(p)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_numbers_from_zero_to_one(dtype):
    with jax.enable_x64(dtype == "float64"):
        same(jax_random.uniform(jax_random.key(7), (MANY,), getattr(torch, dtype)), jax.random.uniform(jax.random.key(7), (MANY,), dtype))


# To the last rounding


def uniform64(seed, low, high):
    """The float32 numbers that a draw starts from, in float64."""
    return jax_random.uniform(jax_random.key(seed), (JUDGED,), torch.float32, low, high).to(torch.float64)


def test_uniform_numbers_in_a_range():
    unit = uniform64(8, 0.0, 1.0)
    low, high = (float(np.float32(x)) for x in (-0.3, 0.71))
    theirs = jax_random.uniform(jax_random.key(8), (JUDGED,), torch.float32, low, high)
    hold("uniform", jax.random.uniform(jax.random.key(8), (JUDGED,), minval=low, maxval=high), theirs, lambda: unit * (high - low) + low)


def test_normal_numbers():
    end = np.nextafter(np.float32(-1), np.float32(0))
    u = uniform64(9, end, 1.0)
    theirs = jax_random.normal(jax_random.key(9), (JUDGED,))
    hold("normal", jax.random.normal(jax.random.key(9), (JUDGED,)), theirs, lambda: 2**0.5 * xla_math.erf_inv(u))


def test_gumbel_numbers():
    u = uniform64(10, np.finfo(np.float32).tiny, 1.0)
    theirs = jax_random.gumbel(jax_random.key(10), (JUDGED,))
    hold("gumbel", jax.random.gumbel(jax.random.key(10), (JUDGED,)), theirs, lambda: -torch.log(-torch.log(u)))


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (-1.0, 3.0), (0.5, 1.5)])
def test_truncated_normal_numbers(bounds):
    """The bounds' error functions are rounded apart, so this is held to rounding alone."""
    unit, (low, high) = uniform64(12, 0.0, 1.0), (torch.tensor(bound, dtype=torch.float64) for bound in bounds)

    def truth():
        a, b = (torch.erf(bound / 2**0.5) for bound in (low, high))
        return {"truncated": (2**0.5 * xla_math.erf_inv(unit * (b - a) + a)).numpy()}

    theirs = jax_random.truncated_normal(jax_random.key(12), *bounds, (JUDGED,)).numpy()
    ours = np.asarray(jax.random.truncated_normal(jax.random.key(12), *bounds, (JUDGED,)))
    report = Report()
    compare.judge(report, "float32", {"flax": {"truncated": ours}, "torch": {"truncated": theirs}}, truth(), tolerances.scatter(truth))
    assert report.ok, report.failures()
    for drawn in (theirs, ours):
        assert (drawn > bounds[0]).all()
        assert (drawn < bounds[1]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_normal_numbers_in_half_precision(dtype):
    ours = jax.random.normal(jax.random.key(13), (MANY,), dtype)
    theirs = jax_random.normal(jax_random.key(13), (MANY,), getattr(torch, dtype))
    if rounds_alike():
        same(theirs, ours)
    truth = 2**0.5 * torch.erfinv(jax_random.uniform(jax_random.key(13), (MANY,), theirs.dtype, -1 + torch.finfo(theirs.dtype).eps / 2).double())
    for drawn in (as_numpy(theirs), as_numpy(ours)):
        error = np.abs(drawn - truth.numpy()) / np.abs(truth.numpy()).clip(1e-3)
        assert error.max() <= tolerances.ELEMENTARY * tolerances.UNIT[dtype]


def test_normal_numbers_in_float64():
    with jax.enable_x64(True):
        ours = np.asarray(jax.random.normal(jax.random.key(14), (MANY // 4,), "float64"))
    theirs = jax_random.normal(jax_random.key(14), (MANY // 4,), torch.float64).numpy()
    np.testing.assert_allclose(theirs, ours, **tolerances.drawn_limits("float64", same_x=True))


def test_the_functions_themselves():
    """XLA's logarithms and inverse error function over their whole range, ends included."""
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore"):
        positive = np.exp(rng.uniform(-87, 88, MANY)).astype(np.float32)
    inside = rng.uniform(-1, 1, MANY).astype(np.float32)
    near = (1 - np.exp(rng.uniform(-17, 0, MANY))).astype(np.float32)
    ends = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 2, -2], np.float32)
    for ours, theirs, x in (
        (jnp.log, xla_math.log, positive),
        (jnp.log1p, xla_math.log1p, inside),
        (jnp.log1p, xla_math.log1p, positive),
        (jax.lax.erf_inv, xla_math.erf_inv, inside),
        (jax.lax.erf_inv, xla_math.erf_inv, near),
    ):
        found, wanted = theirs(torch.from_numpy(x)).numpy(), np.asarray(ours(jnp.asarray(x)))
        if rounds_alike():
            same(found, wanted)
        np.testing.assert_array_max_ulp(found, wanted, maxulp=tolerances.library_ulps())
        np.testing.assert_array_equal(np.isfinite(theirs(torch.from_numpy(ends)).numpy()), np.isfinite(np.asarray(ours(jnp.asarray(ends)))))


# What is drawn with them


@pytest.mark.parametrize(("axis", "more"), [(0, ()), (1, (200,)), (-2, (3, 50))])
def test_categories(axis, more):
    """Equal indices, or two logits with noise that rounding cannot tell apart: none among these, on any processor."""
    logits = np.random.default_rng(0).normal(size=(100, 50)).astype(np.float32)
    shape = (*more, logits.shape[1 - axis % 2])
    theirs = jax_random.categorical(jax_random.key(15), torch.from_numpy(logits), axis, shape)
    same(theirs, jax.random.categorical(jax.random.key(15), jnp.asarray(logits), axis, shape))


CONFIGS = {
    "minigpt": GPTConfig(vocab_size=29, d_model=16, num_layers=2, max_len=8),
    "everything": GPTConfig(
        29, d_model=16, num_layers=2, max_len=8, init="torch", positions="learned", attention_bias=True, gated=True, num_kv_heads=2
    ),
    "llama": GPTConfig.preset("llama", vocab_size=31, d_model=16, num_layers=1, max_len=8),
    "classifier": EncoderConfig(init="torch"),
    "translator": EncoderDecoderConfig(vocab_size=17, source_vocab_size=19, d_model=16, num_layers=1, max_len=8),
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in CONFIGS), ("everything", "float64"), ("everything", "bfloat16")])
def test_initial_weights(name, dtype):
    """Every weight and dropout's key of the same seed, one beyond 32 bits, in both packages."""
    config = dataclasses.replace(CONFIGS[name], dtype=dtype, param_dtype=dtype)
    with jax.enable_x64(dtype == "float64"):
        model = flax_gpt.training.state.new_model(config, 2**40 + 5)
        ours = tree.torch_weights(model)
    other = torch_ref.training.state.new_model(config, 2**40 + 5)
    theirs = torch_ref.weights.tree.torch_weights(other)
    assert set(ours) == set(theirs)
    np.testing.assert_array_equal(other.dropout.seed_key, model.dropout.seed_key[...])
    for weight in ours:
        if dtype != "float64" and rounds_alike():
            np.testing.assert_array_equal(theirs[weight], ours[weight], err_msg=weight)
        ours64, theirs64 = ours[weight].astype(np.float64), theirs[weight].astype(np.float64)
        np.testing.assert_allclose(theirs64, ours64, **tolerances.drawn_limits(dtype), err_msg=weight)


def test_a_new_model_leaves_torchs_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    torch_ref.training.state.new_model(CONFIGS["minigpt"], 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_of_generation():
    """Gumbel noise for a million tokens, against the formula in float64 from the same float32 numbers."""
    keys = np.random.default_rng(0).integers(0, 2**32, (MANY // 1024, 2), dtype=np.uint32)
    ours = np.asarray(jax.jit(flax_gpt.generation.draws.gumbel, static_argnums=1)(keys, 1024))
    theirs = torch_ref.generation.draws.gumbel(torch.from_numpy(keys.astype(np.int64)), 1024).numpy()
    if rounds_alike():
        same(theirs, ours)
    bits = torch_ref.random.bits(torch.from_numpy(keys.astype(np.int64))[:, None, :], torch.arange(1024)).numpy()
    u = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24)).astype(np.float64)
    for found in (ours, theirs):
        np.testing.assert_allclose(found, -np.log(-np.log1p(-u)), **tolerances.noise_limits())


def test_sampled_text_from_nothing_but_a_key():
    """Weights of one seed, tokens of a key: 3 × 60 tokens for each way to draw, sliding beyond the window."""
    config = dataclasses.replace(CONFIGS["minigpt"], vocab_size=64)
    model, other = (package.training.state.new_model(config, 21) for package in (flax_gpt, torch_ref))
    prompts = np.array([[1, 2], [3, 4], [5, 6]])
    cold = 0.05  # fresh logits are small: at this temperature they count as much as the noise
    for options in (dict(), dict(temperature=cold), dict(top_k=5), dict(temperature=cold, top_p=0.8), dict(temperature=cold, top_k=20, top_p=0.9)):
        ours = generate(model, prompts, 60, key=jax.random.key(22), **options)
        theirs = torch_ref.generation.sampling.generate(other, torch.from_numpy(prompts), 60, key=jax_random.key(22), **options)
        same(theirs, ours)
        assert len(np.unique(ours[:, 2:])) >= 8


def test_bad_arguments():
    key = jax_random.key(0)
    for call, argument in (
        (lambda: jax_random.key(2**63), "seed"),
        (lambda: jax_random.bits(key, (2,), torch.int32), "dtype"),
        (lambda: jax_random.uniform(key, (2,), torch.int32), "dtype"),
        (lambda: jax_random.randint(key, (2,), 0, 5, torch.int64), "dtype"),
        (lambda: jax_random.permutation(key, torch.tensor(3)), "x"),
        (lambda: jax_random.fold_in(jax_random.split(key), 3), "key"),
    ):
        with pytest.raises(InputError, match=argument):
            call()
    with pytest.raises(TypeError, match="key"):
        jax_random.split(torch.tensor([1.0, 2.0]))
