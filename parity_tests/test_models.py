"""flax_gpt against torch_ref: fresh random weights of many sizes, in float64 and float32, maps to gradients, dropout off and on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_gpt.config import EncoderConfig, GPTConfig
from parity_tests import compare, oracle

SMALLEST = GPTConfig(vocab_size=2, d_model=2, num_heads=1, num_layers=1, d_ff=1, max_len=1)
GROUPED = GPTConfig(vocab_size=101, d_model=48, num_heads=6, num_kv_heads=2, num_layers=2, d_ff=40, max_len=20, norm_eps=1e-3, init="torch")
ONE_KEY_HEAD = GPTConfig(vocab_size=11, d_model=24, num_heads=3, num_kv_heads=1, num_layers=1, max_len=40)
WIDE = GPTConfig(vocab_size=300, d_model=64, num_layers=2, max_len=64)
DROPPING = GPTConfig(
    vocab_size=23, d_model=16, num_heads=2, num_layers=2, max_len=12, dropout=0.3, attention_dropout=0.2, double_attention_dropout=True
)
ENCODER = EncoderConfig(vocab_size=5, d_model=16, num_heads=2, num_layers=1, d_ff=8, max_len=9, num_classes=3)
DEEP_ENCODER = EncoderConfig(vocab_size=50, d_model=30, num_heads=5, num_layers=2, max_len=12, num_classes=7, init="torch")


def random_batch(config, rows, length, seed, **more):
    rng = np.random.default_rng(seed)
    classes = (rows,) if isinstance(config, EncoderConfig) else (rows, length)
    targets = rng.integers(0, getattr(config, "num_classes", config.vocab_size), classes)
    return {"tokens": rng.integers(0, config.vocab_size, (rows, length)), "targets": targets} | more


CASES = {
    "smallest": (SMALLEST, 1, 1, {}),
    "grouped heads, padding": (GROUPED, 3, 17, {"lengths": [17, 1, 9]}),
    "one key head, positions": (ONE_KEY_HEAD, 2, 9, {"positions": [[*range(31, 40)], [5, 3, 3, 0, 39, 7, 8, 1, 2]]}),
    "wide": (WIDE, 4, 64, {}),
    "dropout": (DROPPING, 3, 12, {"dropout_key": [7, 2**32 - 1]}),
    "encoder, padding": (ENCODER, 4, 9, {"lengths": [9, 4, 0, 1]}),
    "deep encoder": (DEEP_ENCODER, 3, 12, {}),
}


@pytest.mark.parametrize("seeds", [(0,), pytest.param((1, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case, seeds):
    config, rows, length, more = CASES[case]
    for seed in seeds:
        theirs = oracle.torch_model(config, seed=seed)
        ours = oracle.flax_model(config, oracle.torch_weights(theirs))
        report = compare.check(ours, theirs, random_batch(config, rows, length, seed, **more))
        assert report.ok, f"seed {seed}: {report.failures()}"


def test_weights_that_came_from_flax():
    """The other way round: flax_gpt initialises, torch_ref loads."""
    ours = oracle.flax_model(ONE_KEY_HEAD)
    theirs = oracle.torch_model(ONE_KEY_HEAD, oracle.flax_weights(ours))
    report = compare.check(ours, theirs, random_batch(ONE_KEY_HEAD, 2, 9, 5, positions=CASES["one key head, positions"][3]["positions"]))
    assert report.ok, report.failures()


def test_dropout_drops():
    """The comparison with dropout on is one: other keys, and none, give other logits."""
    model = oracle.torch_model(DROPPING, dtype="float64")
    batch = oracle.Batch.of(random_batch(DROPPING, 3, 12, 0))
    found = [
        oracle.torch_values(model, dataclasses.replace(batch, dropout_key=key))["logits"] for key in (None, np.uint32([7, 8]), np.uint32([8, 7]))
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(found[one] - found[other]).min() > 0


def test_first_row_moves_the_draws():
    """A part of a batch that says where it stands drops what the whole batch drops there."""
    config = dataclasses.replace(DROPPING, num_layers=1)
    tokens = np.random.default_rng(3).integers(0, 23, (4, 12)).astype(np.int32)
    theirs = oracle.torch_model(config, seed=3)
    ours = oracle.flax_model(config, oracle.torch_weights(theirs))
    theirs.train()
    ours.train()
    graph, state = nnx.split(ours)

    @jax.jit
    def flax_logits(part, first_row):
        model = nnx.merge(graph, state, copy=True)
        model.dropout.seed_key[...], model.dropout.step[...], model.dropout.first_row[...] = jnp.uint32([1, 2]), jnp.uint32(5), first_row
        return model(part)[0]

    def torch_logits(part, first_row):
        theirs.dropout.seed_key, theirs.dropout.step, theirs.dropout.first_row = torch.tensor([1, 2]), 5, int(first_row)
        return theirs(torch.from_numpy(part))[0].detach().numpy()

    for logits in (flax_logits, torch_logits):
        whole = np.asarray(logits(tokens, np.uint32(0)))[2:]
        in_place, moved = (np.abs(np.asarray(logits(tokens[2:], np.uint32(row))) - whole).max() for row in (2, 0))
        assert in_place < moved / 1000  # rounding differs with the shape, and nothing else does
