"""The values inside this project's models: their order, and the place and the kind of each fault that is planted in one of them."""

import contextlib
import functools
from unittest import mock

import numpy as np
import pytest
import torch

import torch_ref.kernels.dense
import torch_ref.nn.attention
import torch_ref.nn.rotary
from flax_gpt.config import GPTConfig
from parity_tests import adapters, check, compare, oracle, ports
from parity_tests import test_models_faults as faults
from parity_tests.report import Report

ROTARY = GPTConfig.preset("llama", vocab_size=11, d_model=16, num_heads=2, num_kv_heads=1, num_layers=1, max_len=8)
ROTARY_BATCH = oracle.Batch.of(
    {"tokens": np.random.default_rng(3).integers(0, 11, (2, 6)), "targets": np.random.default_rng(4).integers(0, 11, (2, 6))}
)


class Compiled(ports.Case):
    """A case whose JAX side runs once: the faults are planted in torch."""

    our_results = functools.cache(ports.Case.our_results)
    our_taps = functools.cache(ports.Case.our_taps)


@functools.cache
def sound(config, batch_name):
    batch = {"plain": faults.BATCH, "rotary": ROTARY_BATCH}[batch_name]
    weights = oracle.torch_weights(oracle.torch_model(config, seed=0))
    ours = oracle.flax_model(config, weights, dtype="float64")
    case = compare._own_case(ours, oracle.torch_model(config, weights, dtype="float64"), batch)
    return Compiled(**{field: getattr(case, field) for field in case.__dataclass_fields__}), weights


def first_difference(fault, config=faults.CONFIG, batch="plain"):
    case, weights = sound(config, batch)
    model = oracle.torch_model(config, weights, dtype="float64")
    with torch.no_grad():
        context = fault(model) or contextlib.nullcontext()
    theirs = adapters.Torch(oracle.torch_model(config, weights, dtype="float64"), train=None)
    theirs.at = lambda dtype, rounded=None: model  # no copy: some faults are closures over the model
    faulty = Compiled(**{field: getattr(case, field) for field in case.__dataclass_fields__} | {"theirs": theirs})
    faulty.our_results, faulty.our_taps = case.our_results, case.our_taps
    report = Report()
    with context:
        ports.compare(report, faulty, ("float32",), nonfinite=(), logits=(), tapped=None)
    return report.first_divergence


def tiled_keys(model):
    """Query head h reads key head h % K."""
    tiled = lambda case, q, k: torch.einsum("bthd,bshd->bhts", q, k.repeat(1, 1, case.group, 1)) * case.scale
    return mock.patch.object(torch_ref.kernels.dense, "scores", tiled)


def neighbours(model):
    return mock.patch.dict(torch_ref.nn.attention.ROTATE, rope_half=torch_ref.nn.rotary.rotate_interleaved)


def no_norm(model):
    model.blocks[0].norm1.forward = lambda x: x


EVERY_ROW = "addition: the difference is the same for every row of the batch, as of positions or a bias"
PLACES = {
    faults.epsilon: ("taps/blocks.0.norm1", "epsilon: ours is a layer norm with epsilon 1e-05, theirs is a layer norm with epsilon 1e-06"),
    faults.one_epsilon: ("taps/final_norm", "epsilon: ours is a layer norm with epsilon 1e-05, theirs is a layer norm with epsilon 1.001e-05"),
    faults.tanh_gelu: (
        "taps/blocks.0.feed_forward.linear2:input",
        "activation: ours is the exact (erf) GELU, theirs the tanh approximation of GELU",
    ),
    faults.transposed_kernel: ("taps/blocks.1.attention.output", "transposed kernel: theirs multiplies by the transpose"),
    faults.mask_off_by_one: ("taps/blocks.0.attention:map", "mask off by one: theirs sees one position more"),
    faults.no_embedding_scale: ("taps/positions:input", "scale: ours is 5.65685 (√32) times theirs"),
    faults.untied_head: ("grads/token_embed.embedding", ""),
    faults.head_grouping: (
        "taps/blocks.0.attention.query",
        "order of positions or columns: along axis 2 ours holds those of theirs in another order",
    ),
    tiled_keys: ("taps/blocks.0.attention:scores", "head grouping: query head h reads key head h // (H / K) in ours, h % K in theirs"),
    faults.scale_of_the_model_width: ("taps/blocks.0.attention:scores", "scale: ours is 2 (√4) times theirs"),
    faults.positions_off_by_one: ("taps/positions", EVERY_ROW),
    faults.halves_for_pairs: ("taps/positions", EVERY_ROW),
    faults.no_residual: ("taps/blocks.0.norm2:input", "addition: ours adds blocks.0.attention/0 and theirs does not"),
    no_norm: ("taps/blocks.0.norm1", "left out: theirs is still the value of blocks.0.norm1:input, unchanged"),
    faults.dropout_active: (
        "taps/blocks.0.feed_forward.linear2:input",
        "dropout active in theirs: 1% of the elements are 0, the others divided by 0.99",
    ),
    faults.softmax_over_queries: ("taps/blocks.0.attention/1", "transposed: the last two axes are exchanged"),
    faults.unbiased_variance: (
        "taps/blocks.0.norm1",
        "norm: ours is a layer norm with epsilon 1e-05, theirs is a layer norm with the unbiased variance with epsilon 1e-05",
    ),
    faults.missing_bias_gradient: ("grads/blocks.1.feed_forward.linear1.bias", ""),
}
SAMPLE = (faults.transposed_kernel, faults.mask_off_by_one, tiled_keys, faults.untied_head)


def test_every_fault_has_its_place():
    """But for the one that takes parameters away, which names refuse."""
    assert set(faults.MODEL_FAULTS) - {faults.norm_after_attention} <= set(PLACES)


@pytest.mark.parametrize("fault", [pytest.param(f, id=f.__name__, marks=[] if f in SAMPLE else pytest.mark.slow) for f in PLACES])
def test_a_fault_is_found_in_its_place(fault):
    row = first_difference(fault)
    assert (row.name, row.diagnosis) == PLACES[fault], row.reason
    assert row.dtype == "float64"


def test_layouts_of_rotary_positions_are_told_apart():
    row = first_difference(neighbours, ROTARY, "rotary")
    assert (row.name, row.diagnosis) == ("taps/blocks.0.attention:q", "RoPE layout: ours turns halves, theirs neighbours")


def test_the_chain_of_a_sound_model():
    """Every part that a reader of the model would ask for, in the order of computation."""
    weights = oracle.torch_weights(oracle.torch_model(ROTARY, seed=0))
    ours, theirs = oracle.flax_model(ROTARY, weights), oracle.torch_model(ROTARY, weights)
    batch = {"tokens": ROTARY_BATCH.tokens, "targets": ROTARY_BATCH.targets}
    report = check(ours, theirs, batch, tapped=True)
    assert report.ok, report.failures()
    chain = [
        *("token_embed", ":embedding", "blocks.0.norm1", "blocks.0.attention.query", "blocks.0.attention:q", "blocks.0.attention:k"),
        *("blocks.0.attention:v", "blocks.0.attention:scores", "blocks.0.attention:map", "blocks.0.attention.output", "blocks.0:residual1"),
        *("blocks.0.norm2", "blocks.0.feed_forward.linear1", "blocks.0.feed_forward", "blocks.0:residual2", "final_norm", ":head"),
    ]
    for dtype in ("float64", "float32"):
        names = [row.name.removeprefix("taps/") for row in report.rows if row.kind == "tap" and row.dtype == dtype]
        assert [name for name in names if name in chain] == chain
        back = [row.name.removeprefix("cotangents/") for row in report.rows if row.kind == "cotangent" and row.dtype == dtype]
        assert back == [name for name in reversed(names) if name in back]
        assert {"blocks.0.attention:scores", "blocks.0.attention:map", ":embedding"} <= set(back)
    assert set(report.maps) == {"attention/0"}
    assert report.maps["attention/0"]["flax"].shape == (2, 2, 6, 6)
    assert report.environment["jax"]


@pytest.mark.slow
def test_half_precision():
    weights = oracle.torch_weights(oracle.torch_model(faults.CONFIG, seed=0))
    ours, theirs = oracle.flax_model(faults.CONFIG, weights), oracle.torch_model(faults.CONFIG, weights)
    report = check(ours, theirs, {"tokens": faults.BATCH.tokens, "targets": faults.BATCH.targets}, dtypes=("bfloat16", "float16"))
    assert report.ok, report.failures()
    assert {row.dtype for row in report.rows} == {"exact", "float64", "bfloat16", "float16"}
    coarse = next(row for row in report.rows if row.dtype == "bfloat16" and row.name == "logits")
    assert coarse.errors["flax"] > 2.0**-12  # it was bfloat16 that ran
