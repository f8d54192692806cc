"""Every choice of a configuration, in both packages: outputs, maps and gradients by name; the cache; layouts and scalings of rotary positions."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_gpt.nn.attention
import torch_ref.nn.attention
import torch_ref.nn.rotary
from flax_gpt import GPTConfig, MiniGPT, RopeConfig, load_weights, torch_weights
from flax_gpt.config import EncoderConfig
from flax_gpt.errors import InputError
from flax_gpt.generation.cache import init_cache
from flax_gpt.nn import rope_tables, rotary
from flax_gpt.weights.rotary import permute_rotary
from parity_tests import compare, oracle, tolerances

SMALL = dict(vocab_size=11, d_model=24, num_heads=4, num_layers=2, max_len=16, attention_dropout=0.2)
STRETCHED = {
    "linear": RopeConfig(scaling="linear", factor=2.0),
    "dynamic_linear": RopeConfig(scaling="dynamic_linear", trained_len=6),
    "ntk": RopeConfig(scaling="ntk", factor=2.0),
    "dynamic_ntk": RopeConfig(scaling="dynamic_ntk", factor=2.0, trained_len=6),
    "yarn": RopeConfig(scaling="yarn", factor=4.0, trained_len=6),
    "llama3": RopeConfig(scaling="llama3", factor=4.0, trained_len=6),
}
CONFIGS = {
    "learned, post-LN, tanh": GPTConfig(**SMALL, positions="learned", norm_placement="post", activation="gelu_tanh", attention_bias=True),
    "llama": GPTConfig.preset("llama", **(SMALL | dict(num_kv_heads=2))),
    "interleaved, one key head": GPTConfig(**SMALL, positions="rope_interleaved", num_kv_heads=1, attention_bias=True, activation="relu"),
    "no positions, gated, no biases": GPTConfig(
        **SMALL, positions="none", norm="rms_norm", norm_placement="post", gated=True, feed_forward_bias=False, scale_embeddings=False
    ),
    "original": GPTConfig(**SMALL, double_attention_dropout=True, init="torch"),
    "encoder, pre-LN, rope": EncoderConfig(
        vocab_size=11, d_model=24, max_len=16, positions="rope_half", norm_placement="pre", norm="rms_norm", gated=True, num_classes=3, dropout=0.2
    ),
} | {f"rope {name}": GPTConfig(**SMALL | dict(num_layers=1), positions="rope_half", rope=rope) for name, rope in STRETCHED.items()}


TABLES = ("rope linear", "rope dynamic_linear", "rope ntk")
"""Differ from the others in their tables alone, which have a test of their own."""


@pytest.mark.parametrize(
    ("name", "dropout"),
    [pytest.param(name, number % 2 == 0, marks=pytest.mark.slow if name in TABLES else []) for number, name in enumerate(CONFIGS)],
)
def test_both_packages_compute_the_same(name: str, dropout: bool) -> None:
    config = CONFIGS[name]
    rng = np.random.default_rng(len(name))
    ours = oracle.flax_model(config, seed=7)
    theirs = oracle.torch_model(config, oracle.flax_weights(ours))
    inputs = {
        "tokens": rng.integers(0, config.vocab_size, (3, 13)),
        "targets": rng.integers(0, 3, 3) if isinstance(config, EncoderConfig) else rng.integers(0, config.vocab_size, (3, 13)),
        "lengths": np.array([13, 5, 9]),
        "dropout_key": np.array([1, 2], np.uint32) if dropout else None,
    }
    report = compare.check(ours, theirs, inputs)
    assert report.ok, report.failures()


@pytest.mark.parametrize(
    ("name", "empty"),
    [("llama", True), ("learned, post-LN, tanh", True), ("interleaved, one key head", False), ("rope dynamic_ntk", True)],
)
def test_the_cache_changes_nothing(name: str, empty: bool) -> None:
    """Prefill of 5, told or not that the cache is empty, and then single tokens against one forward pass, judged as a second program."""
    config = CONFIGS[name]
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 12)).astype(np.int32)
    ours = oracle.flax_model(config, seed=3)
    theirs = oracle.torch_model(config, oracle.flax_weights(ours))

    def with_cache(dtype: str) -> dict[str, np.ndarray]:
        with jax.enable_x64(dtype == "float64"):
            model = oracle.flax_model(config, oracle.flax_weights(ours), dtype=dtype)
            logits, cache = model.step(jnp.asarray(tokens[:, :5]), init_cache(model.config, 2, 12), empty=empty)
            parts = [logits]
            for t in range(5, 12):
                logits, cache = model.step(jnp.asarray(tokens[:, t : t + 1]), cache)
                parts.append(logits)
            return {"logits": np.concatenate(parts, axis=1)}

    def whole(dtype: str) -> dict[str, np.ndarray]:
        model = oracle.torch_model(theirs.config, oracle.torch_weights(theirs), dtype=dtype)
        return {"logits": oracle.torch_values(model, oracle.Batch(tokens, tokens))["logits"]}

    report = compare.check_programs(with_cache, whole)
    assert report.ok, report.failures()


def test_permuted_projections_turn_one_layout_into_the_other() -> None:
    config = GPTConfig(**SMALL, positions="rope_interleaved", num_kv_heads=2, attention_bias=True)
    interleaved = oracle.flax_model(config, seed=5)
    weights = torch_weights(interleaved)
    weights |= {name: array + 0.1 for name, array in weights.items() if name.endswith("W_K.bias")}
    permuted = permute_rotary(weights, to="rope_half", num_heads=4, num_kv_heads=2)
    assert any(not np.array_equal(permuted[name], weights[name]) for name in weights)
    back = permute_rotary(permuted, to="rope_interleaved", num_heads=4, num_kv_heads=2)
    assert all(np.array_equal(back[name], weights[name]) for name in weights)

    load_weights(interleaved, weights)
    half = MiniGPT(dataclasses.replace(config, positions="rope_half"), rngs=nnx.Rngs(9))
    tokens = np.random.default_rng(2).integers(0, 11, (2, 13)).astype(np.int32)
    batch = oracle.Batch(tokens, tokens)
    theirs = oracle.torch_model(config, weights)

    def logits(dtype: str) -> dict[str, np.ndarray]:
        model = oracle.flax_model(half.config, permuted, dtype=dtype)
        return {"logits": oracle.flax_values(model, batch)["logits"]}

    def reference(dtype: str) -> dict[str, np.ndarray]:
        model = oracle.torch_model(config, oracle.torch_weights(theirs), dtype=dtype)
        return {"logits": oracle.torch_values(model, oracle.Batch(tokens, tokens))["logits"]}

    report = compare.check_programs(logits, reference)
    assert report.ok, report.failures()
    load_weights(half, weights)
    assert not compare.check_programs(lambda dtype: {"logits": oracle.flax_values(_in(half, dtype), batch)["logits"]}, reference).ok


def _in(model: MiniGPT, dtype: str) -> nnx.Module:
    return oracle.flax_model(model.config, oracle.flax_weights(model), dtype=dtype)


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "rope_half", pytest.param("rope_interleaved", marks=pytest.mark.slow)])
def test_positions_are_equal_in_both_up_to_8191(kind: str) -> None:
    """One batch in which every position from 0 to 8191 stands once: maps, logits and gradients by name."""
    config = GPTConfig(5, d_model=8, num_heads=2, num_layers=1, d_ff=4, max_len=8192, positions=kind)
    rng = np.random.default_rng(0)
    positions = rng.permutation(8192).reshape(256, 32)
    ours = oracle.flax_model(config, oracle.torch_weights(oracle.torch_model(config, seed=1)))
    theirs = oracle.torch_model(config, oracle.flax_weights(ours))
    report = compare.check(ours, theirs, {"tokens": rng.integers(0, 5, (256, 32)), "targets": rng.integers(0, 5, (256, 32)), "positions": positions})
    assert report.ok, report.failures()


@pytest.mark.parametrize("scaling", STRETCHED)
def test_rotations_of_every_scaling_are_equal_in_both_up_to_8191(scaling: str) -> None:
    """The same bits in both, and those of the float64 angles rounded once."""
    rope = dataclasses.replace(STRETCHED[scaling], trained_len=2048)
    config = GPTConfig(5, d_model=64, num_heads=2, max_len=8192, positions="rope_half", rope=rope)
    ours, theirs = rotary.RotaryPositions(config)(8192), torch_ref.nn.rotary.RotaryPositions(config)(8192)
    exact = rope_tables.tables(config, 8192, 8192)
    for a, b, truth in zip(ours, theirs, exact, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a[0], truth.astype(np.float32))
    places = np.array([[8191, 0, 4097]])
    for a, b, whole in zip(rotary.RotaryPositions(config)(3, jnp.asarray(places), 8192),
                           torch_ref.nn.rotary.RotaryPositions(config)(3, torch.from_numpy(places), 8192), ours, strict=True):  # fmt: skip
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a[0], whole[0, places[0]])


@pytest.mark.parametrize("scaling", ["dynamic_ntk", "dynamic_linear"])
def test_a_traced_span_gives_the_tables_of_the_host(scaling: str) -> None:
    """At positions 0 … 8191. Four fractions of a turn are added and multiplied by 2π, with one rounding each, before an elementary function."""
    bound = (4 * 2 * np.pi + tolerances.ELEMENTARY) * tolerances.UNIT["float32"]
    config = GPTConfig(
        5, d_model=128, num_heads=2, max_len=8192, positions="rope_half", rope=RopeConfig(scaling=scaling, factor=2.0, trained_len=1000)
    )
    module = rotary.RotaryPositions(config)
    for span in (900, 8192):
        exact = rope_tables.tables(config, 8192, span)
        traced = jax.jit(lambda span: module(8192, span=span))(jnp.array([span]))
        for table, truth in zip(traced, exact, strict=True):
            worst = float(np.abs(np.asarray(table[0], np.float64) - truth).max())
            assert worst <= bound, worst


def test_yarn_as_published() -> None:
    """Peng et al. 2023: equation 22 for the factor, and section 3.2 with β = 32 and 1: fast pairs as trained, slow ones interpolated in full."""
    config = GPTConfig(5, d_model=64, num_heads=1, max_len=8192, positions="rope_half", rope=RopeConfig(scaling="yarn", factor=4.0, trained_len=2048))
    assert rope_tables.attention_factor(config) == 0.1 * math.log(4.0) + 1.0
    plain = rope_tables.inverse_frequencies(dataclasses.replace(config, rope=RopeConfig()), 8192)
    ratio = rope_tables.inverse_frequencies(config, 8192) / plain
    rotations = 2048 * plain / (2 * math.pi)
    assert ratio[0] == 1.0
    assert np.all(ratio[rotations < 1] == 0.25)
    assert np.all(np.diff(ratio) <= 0)
    cos, sin = rope_tables.tables(config, 1, 8192)
    assert np.all(cos == rope_tables.attention_factor(config))
    assert np.all(sin == 0)


@pytest.mark.parametrize("init", ["scaled", "torch"])
def test_initial_weights_have_the_stated_spread(init: str) -> None:
    """Radford et al. 2019, section 2.3, or torch's own; judged by the standard error of an estimated standard deviation, five of them."""
    config = GPTConfig(97, d_model=64, num_layers=8, init=init)
    uniform = lambda fan_in: 1 / math.sqrt(3 * fan_in)
    expected = {"token_embed": 0.02, "W_Q": 0.02, "W_O": 0.02 / 4, "linear1": 0.02, "linear2": 0.02 / 4}
    if init == "torch":
        expected = {"token_embed": 1.0, "W_Q": uniform(64), "W_O": uniform(64), "linear1": uniform(64), "linear2": uniform(256)}
    for weights in (oracle.flax_weights(oracle.flax_model(config)), oracle.torch_weights(oracle.torch_model(config))):
        for part, spread in expected.items():
            array = np.concatenate([value.ravel() for name, value in weights.items() if f"{part}.weight" in name])
            assert abs(array.std() / spread - 1) < 5 / math.sqrt(2 * array.size), (part, array.std(), spread)
        assert np.ptp(np.concatenate([value for name, value in weights.items() if "norm" in name and name.endswith("weight")])) == 0


def test_interpolated_neighbours_stay_apart() -> None:
    positions = rope_tables.interpolated(np.arange(64), trained=16, length=64)
    assert len(np.unique(positions)) == 64
    assert positions.max() < 16


def test_the_base_of_ntk_is_computed_not_guessed() -> None:
    assert round(rope_tables.ntk_base(10_000.0, 2.0, 128)) == 20_221


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: RopeConfig(factor=0.0), "factor"),
        (lambda: RopeConfig(scaling="yarn", trained_len=0), "trained_len"),
        (lambda: GPTConfig(5, d_model=12, num_heads=4, positions="rope_half"), "d_model"),
        (lambda: GPTConfig(5, num_heads=4, num_kv_heads=3), "num_kv_heads"),
        (lambda: GPTConfig(5, d_model=3, num_heads=1), "d_model"),
        (lambda: GPTConfig(5, activation="gelu"), "activation"),
        (lambda: GPTConfig.from_dict({"vocab_size": 5, "rope": {"factor": -1.0}}), "factor"),
        (lambda: GPTConfig.from_dict({"vocab_size": 5, "heads": 2}), "heads"),
        (lambda: rope_tables.ntk_base(1e4, 2.0, 2), "head width"),
        (lambda: permute_rotary({"a.W_Q.weight": np.zeros((6, 4))}, to="rope_half", num_heads=2, num_kv_heads=2), "a.W_Q.weight"),
    ],
)
def test_refusals_name_the_argument(make, argument: str) -> None:
    with pytest.raises(InputError) as refused:
        make()
    assert refused.value.argument == argument


@pytest.mark.parametrize(("kv_heads", "parameters"), [(8, 1_048_576), (2, 655_360), (1, 589_824)])
def test_grouped_queries_have_the_stated_parameters_and_cache(kv_heads: int, parameters: int) -> None:
    """At D 512 and H 8, without biases (Ainslie et al. 2023); the cache shrinks by H / K."""
    config = GPTConfig(5, d_model=512, num_heads=8, num_kv_heads=kv_heads, num_layers=1, max_len=4)
    ours = nnx.eval_shape(lambda: flax_gpt.nn.attention.MultiHeadAttention(config, "place", rngs=nnx.Rngs(0)))
    with torch.device("meta"):
        theirs = torch_ref.nn.attention.MultiHeadAttention(config, "place")
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(ours, nnx.Param))) == parameters
    assert sum(p.numel() for p in theirs.parameters()) == parameters
    cache = jax.eval_shape(lambda: init_cache(config, 3))
    assert [leaf.size for leaf in (*cache.keys, *cache.values)] == [3 * 4 * 512 * kv_heads // 8] * 2
