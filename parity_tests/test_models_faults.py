"""The comparison proved: each fault, planted in a model, must make it fail, in float64 and in float32 alike."""

import contextlib
import functools
import math
from unittest import mock

import numpy as np
import pytest
import torch

import torch_ref.kernels.dense
import torch_ref.masks
import torch_ref.models.gpt
import torch_ref.nn.attention
import torch_ref.nn.feed_forward
from flax_gpt.config import GPTConfig
from parity_tests import compare, oracle

CONFIG = GPTConfig(vocab_size=37, d_model=32, num_heads=4, num_kv_heads=2, num_layers=2, d_ff=48, max_len=16)
BATCH = oracle.Batch.of({"tokens": np.random.default_rng(1).integers(0, 37, (3, 12)), "targets": np.random.default_rng(2).integers(0, 37, (3, 12))})
NOTHING = contextlib.nullcontext()


@functools.cache
def sound(dtype):
    model = oracle.flax_model(CONFIG, oracle.torch_weights(oracle.torch_model(CONFIG, seed=0)))
    model = model if dtype == "float32" else oracle.in_float64(model)
    return oracle.flax_weights(model), oracle.flax_values(model, BATCH)


def compared(fault):
    """The report on a torch model in which `fault(model)`, a change that may return a context to run under, was planted."""

    def faulty(dtype):
        model = oracle.torch_model(CONFIG, sound("float32")[0], dtype=dtype)
        with torch.no_grad():
            context = fault(model) or NOTHING
        with context:
            return oracle.torch_values(model, BATCH)

    return compare.check_programs(lambda dtype: sound(dtype)[1], faulty)


def epsilon(model):
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6


def one_epsilon(model):
    model.final_norm.eps = 1.001e-5


def tanh_gelu(model):
    return mock.patch.dict(torch_ref.nn.feed_forward.ACTIVATIONS, gelu_exact=functools.partial(torch.nn.functional.gelu, approximate="tanh"))


def transposed_kernel(model):
    weight = model.blocks[1].attention.output.weight
    weight.copy_(weight.T.clone())


def mask_off_by_one(model):
    sound_mask = torch_ref.masks.causal_mask
    return mock.patch.object(torch_ref.masks, "causal_mask", lambda T, S=None, offset=None: sound_mask(T, S, 1 if offset is None else offset + 1))


def no_embedding_scale(model):
    model.embed = lambda tokens, positions=None: model.positions(model.token_embed(tokens), positions)


def untied_head(model):
    copy = model.token_embed.weight.detach().clone().requires_grad_()
    model.head = lambda x: torch.nn.functional.linear(model.final_norm(x), copy)


def head_grouping(model):
    """Query head h reads key head h % K: the same as exchanging heads 1 and 2 of a model with h // (H / K)."""
    order = torch.cat([torch.arange(8), torch.arange(16, 24), torch.arange(8, 16), torch.arange(24, 32)])
    for block in model.blocks:
        block.attention.query.weight.copy_(block.attention.query.weight[order].clone())
        block.attention.output.weight.copy_(block.attention.output.weight[:, order].clone())


def scale_of_the_model_width(model):
    return mock.patch.object(torch_ref.nn.attention, "attend", functools.partial(torch_ref.nn.attention.attend, scale=1 / math.sqrt(32)))


def positions_off_by_one(model):
    model.positions.table.copy_(model.positions.table.roll(1, 1))


def halves_for_pairs(model):
    """Sines in the first half of the columns and cosines in the second."""
    table = model.positions.table
    table.copy_(torch.cat([table[..., 0::2], table[..., 1::2]], dim=-1))


def no_residual(model):
    block = model.blocks[0]
    block.forward = lambda x, **options: (block.feed_forward(block.norm2(x)), block.attention(block.norm1(x), causal=True, return_attention=True)[1])


def norm_after_attention(model):
    model.blocks[0].norm1 = torch.nn.Identity()


def dropout_active(model):
    """In a model in eval mode one place still drops, always the same elements."""

    def dropout(x, rate, draw, place):
        torch.manual_seed(0)
        return torch.nn.functional.dropout(x, 0.01)

    return mock.patch.object(torch_ref.nn.feed_forward, "dropout", dropout)


def softmax_over_queries(model):
    sound_attend = torch_ref.nn.attention.attend

    def attend(q, k, v, **options):
        out, weights = sound_attend(q, k, v, **options)
        return out, weights.transpose(2, 3).contiguous()

    return mock.patch.object(torch_ref.nn.attention, "attend", attend)


def unbiased_variance(model):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + self.eps) * self.weight + self.bias

    return mock.patch.object(type(model.final_norm), "forward", forward)


def missing_bias_gradient(model):
    model.blocks[1].feed_forward.linear1.bias.requires_grad_(False)


MODEL_FAULTS = [
    *(epsilon, one_epsilon, tanh_gelu, transposed_kernel, mask_off_by_one, no_embedding_scale, untied_head, head_grouping, scale_of_the_model_width),
    *(positions_off_by_one, halves_for_pairs, no_residual, norm_after_attention, dropout_active, softmax_over_queries, unbiased_variance),
    missing_bias_gradient,
]

BELOW_FLOAT32 = {one_epsilon}
"""Faults that move results by less than rounding to float32 does; only the float64 run can tell them."""


@pytest.mark.parametrize("fault", MODEL_FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_fails(fault):
    report = compared(fault)
    assert not report.ok
    failed = {row.dtype for row in report.rows if not row.ok}
    assert failed == ({"float64"} if fault in BELOW_FLOAT32 else {"float64", "float32"}), report.summary()
    assert report.first_divergence.dtype == "float64"


def test_a_reference_that_does_not_repeat_itself_fails():
    """Its scatter would excuse anything."""
    drop = lambda x, rate, draw, place: torch.nn.functional.dropout(x, 0.5)
    report = compared(lambda model: mock.patch.object(torch_ref.nn.feed_forward, "dropout", drop))
    assert report.first_divergence.name == "torch repeats itself"


def test_no_fault_passes():
    report = compared(lambda model: None)
    assert report.ok, report.failures()


def test_a_shorter_product_fails_in_float32_alone():
    """Products of operands cut to TF32's 10 stored bits: the program is right, its arithmetic is not."""
    weights = sound("float32")[0]

    def cut(values):
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)

    shorter = {name: cut(value) if name.endswith(("W_Q.weight", "W_K.weight")) else value for name, value in weights.items() if value.dtype != bool}
    ours = {
        "float64": sound("float64")[1],
        "float32": oracle.flax_values(oracle.flax_model(CONFIG, shorter), BATCH),
    }
    models = {dtype: oracle.torch_model(CONFIG, weights, dtype=dtype) for dtype in ("float64", "float32")}
    report = compare.check_programs(ours.__getitem__, lambda dtype: oracle.torch_values(models[dtype], BATCH))
    assert {row.dtype for row in report.rows if not row.ok} == {"float32"}
    assert "over budget: flax" in report.failures()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_single_bad_element_fails(bad):
    good = sound("float32")[1]
    models = {dtype: oracle.torch_model(CONFIG, sound("float32")[0], dtype=dtype) for dtype in ("float64", "float32")}
    damaged = good["grads/final_norm.bias"].copy()
    damaged[3] = bad
    ours = {"float64": sound("float64")[1], "float32": good | {"grads/final_norm.bias": damaged}}
    report = compare.check_programs(ours.__getitem__, lambda dtype: oracle.torch_values(models[dtype], BATCH))
    assert [(row.name, row.dtype) for row in report.rows if not row.ok] == [("grads/final_norm.bias", "float32")]


def test_missing_unexpected_and_misshapen_results_fail():
    truth = sound("float64")[1]
    ours = {name: value for name, value in truth.items() if name != "loss"} | {"extra": np.zeros(1), "logits": truth["logits"][:1]}
    report = compare.Report()
    deviations = {name: np.ones((2, *value.shape)) for name, value in truth.items()}
    compare.judge(report, "float64", {"flax": ours}, truth, deviations)
    assert {row.name: row.note for row in report.rows if row.note} == {
        "loss": "missing from flax",
        "logits": "flax has the shape [1, 12, 37], not [3, 12, 37]",
        "extra": "only in flax",
    }
    assert not report.ok


def test_other_weights_are_refused_before_anything_is_compared():
    ours = oracle.flax_model(CONFIG, oracle.torch_weights(oracle.torch_model(CONFIG, seed=0)))
    weights = oracle.flax_weights(ours)
    changed = weights["final_norm.bias"].copy()
    changed[0] = np.nextafter(np.float32(0), np.float32(1))
    report = compare.check(
        ours, oracle.torch_model(CONFIG, weights | {"final_norm.bias": changed}), {"tokens": BATCH.tokens, "targets": BATCH.targets}
    )
    assert [row.note for row in report.rows] == ["differs: final_norm.bias"]
    assert not report.ok


def test_an_empty_report_is_no_success():
    assert not compare.Report().ok


@pytest.mark.parametrize("length", [12, 80])  # `dense` and `blocked`
def test_a_weight_that_is_not_finite_is_hidden_by_neither_package(length):
    config = GPTConfig(vocab_size=37, d_model=32, num_heads=4, num_layers=2, d_ff=48, max_len=length)
    weights = oracle.torch_weights(oracle.torch_model(config, seed=0))
    weights["token_embed.weight"][36] = weights["lm_head.weight"][36] = np.nan
    tokens = np.random.default_rng(1).integers(0, 36, (2, length))
    tokens[0, 5] = 36
    ours, theirs = oracle.flax_model(config, weights), oracle.torch_model(config, weights)
    with torch.no_grad():  # called without maps, as models are trained: with them `dense` would serve both lengths
        found = [np.asarray(ours(tokens)[0]), theirs(torch.from_numpy(tokens))[0].numpy()]
    for logits in found:
        logits = logits[..., :36]  # the head is the embedding: the last column is NaN everywhere
        assert np.isnan(logits[0, 5:]).all()
        assert np.isfinite(logits[1]).all()
