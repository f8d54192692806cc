"""Clip, AdamW, Adam and schedules: flax_gpt against torch_ref, and torch_ref against torch used by hand."""

import contextlib
import copy
import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch

import torch_ref.training.optimizer
from flax_gpt.config import GPTConfig, OptimizerConfig
from parity_tests import compare, oracle

CONFIG = GPTConfig(vocab_size=29, d_model=16, num_heads=2, num_layers=1, d_ff=24, max_len=8)
OPTIMIZERS = {
    "adamw, warm-up and cosine": OptimizerConfig(lr=3e-3, warmup_steps=3, decay="matrices", weight_decay=0.1),
    "adamw, tight clip": OptimizerConfig(lr=1e-2, schedule="constant", decay="all", clip=1e-3, beta1=0.8, beta2=0.99, eps=1e-6),
    "adam, no clip": OptimizerConfig(optimizer="adam", lr=1e-3, schedule="constant", clip=None),
    "sgd, momentum and decay": OptimizerConfig(optimizer="sgd", lr=0.05, warmup_steps=3, momentum=0.8, weight_decay=0.1, clip=0.5),
    "sgd, nesterov": OptimizerConfig(optimizer="sgd", lr=0.02, schedule="constant", nesterov=True, decay="all", weight_decay=0.02, clip=None),
    "sgd, plain": OptimizerConfig(optimizer="sgd", lr=0.1, schedule="constant", momentum=0.0, weight_decay=0.0),
}


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return {"tokens": rng.integers(0, 29, (3, 8)), "targets": rng.integers(0, 29, (3, 8))}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *(pytest.param(name, (1, 10), marks=[pytest.mark.slow] if name == "sgd, plain" else []) for name in OPTIMIZERS),
        pytest.param("sgd, momentum and decay", (1, 10, 100), marks=pytest.mark.slow),
    ],
)
def test_steps(name, steps):
    """Parameters and moments after the first, the tenth and, for SGD, the hundredth step, losses and gradient norms of all."""
    config = OPTIMIZERS[name]
    theirs = oracle.torch_model(CONFIG, seed=0)
    ours = oracle.flax_model(CONFIG, oracle.torch_weights(theirs))
    report = compare.check_steps(ours, theirs, batch(), config, steps)
    assert report.ok, report.failures()
    names = [row.name for row in report.rows if row.dtype == "float32"]
    assert {name.split("/")[0] for name in names} == {"losses", "grad_norms", *(f"step{number}" for number in steps)}
    moments = {"exp_avg", "exp_avg_sq"} if config.optimizer != "sgd" else {"momentum_buffer"} if config.momentum else set()
    assert {name.split("/")[1] for name in names if "/" in name} == {"weights"} | moments


def test_dropout_on():
    """The same elements are dropped, so a train-mode step is comparable too."""
    config = GPTConfig(vocab_size=29, d_model=16, num_heads=2, num_layers=1, d_ff=24, max_len=8, dropout=0.5)
    theirs = oracle.torch_model(config, seed=0)
    ours = oracle.flax_model(config, oracle.torch_weights(theirs))
    optimizer = OPTIMIZERS["adamw, warm-up and cosine"]
    report = compare.check_steps(ours, theirs, batch() | {"dropout_key": [3, 4]}, optimizer, (1, 2))
    assert report.ok, report.failures()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_reference_is_torch_itself(name):
    """torch_ref's optimizer, bit for bit, against torch.optim, clip_grad_norm_ and LambdaLR written out."""
    config = OPTIMIZERS[name]
    model = oracle.torch_model(CONFIG)
    by_hand = copy.deepcopy(model)
    data = oracle.Batch.of(batch())
    wrapped = torch_ref.training.optimizer.make_optimizer(model, config, 10)
    decay = config.weight_decay if config.optimizer != "adam" else 0.0
    groups = [
        {"params": [p], "weight_decay": decay if config.decay == "all" or ("norm" not in name and name.endswith("weight")) else 0.0}
        for name, p in by_hand.named_parameters()
    ]
    if config.optimizer == "sgd":
        plain = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
    else:
        kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
        plain = kind(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
    schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda count: torch_ref.training.optimizer.learning_rate_factor(config, 10, count))
    for _ in range(3):
        oracle.torch_values(model, data)
        oracle.torch_values(by_hand, data)
        norm = wrapped.step()
        expected = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), float("inf") if config.clip is None else config.clip)
        plain.step()
        schedule.step()
        assert torch.equal(norm, expected)
        for (name, p), (_, q) in zip(model.named_parameters(), by_hand.named_parameters(), strict=True):
            assert torch.equal(p, q), name


def wrong_clip(config):
    """optax's formula, without 1e-6 under the norm."""

    def clip(parameters, max_norm, total_norm, *args, **kwargs):
        for p in parameters:
            p.grad.mul_(torch.clamp(max_norm / total_norm, max=1.0))

    return config, mock.patch.object(torch.nn.utils, "clip_grads_with_norm_", clip)


def coupled_decay(config):
    """L2 in the gradient: Adam's weight_decay, not AdamW's."""
    return config, mock.patch.object(torch.optim, "AdamW", torch.optim.Adam)


def other(**changes):
    return lambda config: (dataclasses.replace(config, **changes), contextlib.nullcontext())


FAULTS = {
    "clip without 1e-6": wrong_clip,
    "coupled decay": coupled_decay,
    "decay on every parameter": other(decay="all"),
    "no decay": other(weight_decay=0.0),
    "another beta2": other(beta2=0.9990001),
    "another epsilon": other(eps=1.01e-8),
    "schedule one step late": other(warmup_steps=4),
    "no clip": other(clip=None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails(name):
    config = OptimizerConfig(lr=3e-3, warmup_steps=3, decay="matrices", weight_decay=0.1, clip=0.5)
    ours = oracle.flax_model(CONFIG, oracle.torch_weights(oracle.torch_model(CONFIG, seed=0)))
    weights, data = oracle.flax_weights(ours), oracle.Batch.of(batch())
    faulty, context = FAULTS[name](config)
    with context:
        theirs = {dtype: oracle.torch_model(CONFIG, weights, dtype=dtype) for dtype in ("float64", "float32")}
        wide = oracle.in_float64(ours)
        report = compare.check_programs(
            lambda dtype: oracle.flax_steps(wide if dtype == "float64" else ours, data, config, (2,)),
            lambda dtype, powers=None: oracle.torch_steps(theirs[dtype], data, faulty, (2,), powers),
            has_powers=True,
        )
    failed = {row.dtype for row in report.rows if not row.ok}
    assert "float64" in failed, report.summary()
    if name not in ("clip without 1e-6", "another beta2", "another epsilon"):  # these move results by less than float32's rounding
        assert "float32" in failed, report.summary()
