"""flax_gpt against torch_ref: fresh random weights of many sizes, in float64 and float32, maps to gradients, dropout off and on."""

import dataclasses

import numpy as np
import pytest

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
DEEP_ENCODER = EncoderConfig(vocab_size=50, d_model=30, num_heads=5, num_layers=3, max_len=12, num_classes=7, init="torch")


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


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case):
    config, rows, length, more = CASES[case]
    for seed in range(3):
        ours = oracle.flax_model(config, seed=seed)
        theirs = oracle.torch_model(config, oracle.flax_weights(ours))
        report = compare.check(ours, theirs, random_batch(config, rows, length, seed, **more))
        assert report.ok, f"seed {seed}: {report.failures()}"


def test_weights_that_came_from_torch():
    """The other way round: torch initialises, flax_gpt loads."""
    theirs = oracle.torch_model(ONE_KEY_HEAD)
    ours = oracle.flax_model(ONE_KEY_HEAD, oracle.torch_weights(theirs))
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
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 23, (4, 12)).astype(np.int32)
    for model, array in ((oracle.flax_model(DROPPING), np.asarray), (oracle.torch_model(DROPPING), lambda x: oracle.torch.from_numpy(x))):
        model.train()

        def run(part, first_row, model=model, array=array):
            if isinstance(model, oracle.torch.nn.Module):
                model.dropout.seed_key, model.dropout.step, model.dropout.first_row = oracle.torch.tensor([1, 2]), 5, first_row
                return model(array(part))[0].detach().numpy()
            model.dropout.seed_key[...], model.dropout.step[...] = np.uint32([1, 2]), np.uint32(5)
            model.dropout.first_row[...] = np.uint32(first_row)
            return np.asarray(model(array(part))[0])

        whole = run(tokens, 0)
        dropped = [run(tokens[2:], 2), run(tokens[2:], 0)]
        distance = [np.abs(whole[2:] - part).max() for part in dropped]
        assert distance[0] < distance[1] / 1000
