"""Both packages against the arrays that the original programs computed."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import flax_gpt.masks
import flax_gpt.nn.positions
import torch_ref.masks
import torch_ref.nn.positions
from flax_gpt.kernels.api import attend
from parity_tests import compare, golden_data, oracle, tolerances
from parity_tests.report import Report
from torch_ref.kernels.api import attend as torch_attend

MODELS = list(golden_data.CONFIGS)


@functools.cache
def models(name):
    weights, config = golden_data.group(name, "weights"), golden_data.CONFIGS[name]
    return oracle.flax_model(config, weights), oracle.torch_model(config, weights)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name):
    golden = golden_data.outputs(name)
    ours, theirs = models(name)
    parameters = {n for n in golden_data.group(name, "weights") if n not in ("causal_mask", "pos_encoding.pe", "pos.pe", "lm_head.weight")}
    assert {n.removeprefix("grads/") for n in golden if n.startswith("grads/")} == parameters
    report = compare.check(ours, theirs, golden_data.batch(name), original=golden)
    assert report.ok, report.failures()
    judged = {row.name for row in report.rows if "original" in row.grades}
    assert judged == set(golden)


@pytest.mark.parametrize(("name", "optimizer"), [("minigpt", "adamw"), ("minigpt_seed_size", "adamw"), ("tiny_transformer", "adam")])
def test_optimizer_steps(name, optimizer):
    """Ten steps, and five for the largest model."""
    count, golden = golden_data.steps(name, optimizer)
    ours, theirs = models(name)
    report = compare.check_steps(ours, theirs, golden_data.batch(name), golden_data.OPTIMIZERS[optimizer], (1, count), original=golden)
    assert report.ok, report.failures()
    judged = {row.name for row in report.rows if "original" in row.grades}
    assert judged == set(golden)


def check_piece(ours, theirs, golden):
    """ours, theirs: functions of (numpy inputs cast to the dtype by `cast`) → {name: array}."""

    def flax_side(dtype):
        with jax.enable_x64(dtype == "float64"):
            return {name: np.asarray(value) for name, value in ours(lambda x: jnp.asarray(x, dtype)).items()}

    def torch_side(dtype):
        found = theirs(lambda x: torch.from_numpy(x).to(getattr(torch, dtype)))
        return {name: value.detach().numpy().copy() for name, value in found.items()}

    report = compare.check_programs(flax_side, torch_side, original=golden)
    assert report.ok, report.failures()
    assert {row.name for row in report.rows if "original" in row.grades} == set(golden)


def test_scaled_dot_product_attention():
    golden = golden_data.group("pieces", "sdpa")
    visible = ~golden["masked"]  # (2, 1, 6, 9)

    def run(attend, cast, mask):
        q, k, v = (cast(golden[name].swapaxes(1, 2).copy()) for name in "qkv")
        return {"out": attend(q, k, v).swapaxes(1, 2), "out_masked": attend(q, k, v, mask=mask).swapaxes(1, 2)}

    check_piece(
        lambda cast: run(attend, cast, jnp.asarray(visible)),
        lambda cast: run(torch_attend, cast, torch.from_numpy(visible)),
        {name: golden[name] for name in ("out", "out_masked")},
    )


@pytest.mark.parametrize("kind", ["none", "causal", "padding", "combined"])
def test_single_head(kind):
    """Output, map and, under a mask, the gradient of the output's sum with respect to x."""
    golden = golden_data.group("pieces", "single_head")
    kernels = [golden[f"weights/W_{name}.weight"] for name in "qkv"]
    prefix = "" if kind == "none" else f"{kind}/"
    wanted = {name: golden[prefix + name] for name in ("out", "attention", "grad_x") if prefix + name in golden}
    mask = None if kind == "none" else golden_data.arrays("pieces")[f"masks/{kind}"] == 1

    def run(attend, x, cast, mask):
        q, k, v = ((x @ cast(kernel).T)[:, :, None, :] for kernel in kernels)
        out, weights = attend(q, k, v, mask=mask, empty_rows="uniform", return_weights=True)
        return {"out": out[:, :, 0], "attention": weights[:, 0]}

    def ours(cast):
        forward = lambda x: run(attend, x, cast, None if mask is None else jnp.asarray(mask))
        found = forward(cast(golden["x"]))
        return found if mask is None else found | {"grad_x": jax.grad(lambda x: forward(x)["out"].sum())(cast(golden["x"]))}

    def theirs(cast):
        x = cast(golden["x"]).requires_grad_()
        found = run(torch_attend, x, cast, None if mask is None else torch.from_numpy(mask))
        return found if mask is None else found | {"grad_x": torch.autograd.grad(found["out"].sum(), x)[0]}

    check_piece(ours, theirs, wanted)


def test_masks():
    golden = {name: value == 1 for name, value in golden_data.group("pieces", "masks").items()}
    lengths = np.array([3], np.int32)
    for masks, array in ((flax_gpt.masks, jnp.asarray), (torch_ref.masks, torch.from_numpy)):
        made = {
            "causal": masks.causal_mask(5),
            "padding": masks.padding_mask(array(lengths), 5)[0, 0],
            "combined": masks.combined_mask(array(lengths), 5)[0, 0],
        }
        for name, mask in made.items():
            np.testing.assert_array_equal(np.broadcast_to(np.asarray(mask), (5, 5)), golden[name])


def test_sinusoidal_positions():
    """The table is exact; the original's was computed in float32 angles, and its distance is what their rounding explains."""
    ours, theirs = (positions.sinusoidal_table(100, 64) for positions in (flax_gpt.nn.positions, torch_ref.nn.positions))
    np.testing.assert_array_equal(ours, theirs)

    def original():
        frequencies = torch.exp(torch.arange(0, 64, 2, dtype=torch.float64) * (-math.log(10000.0) / 64))
        angles = torch.arange(100, dtype=torch.float64)[:, None] * frequencies
        return {"table": torch.stack([angles.sin(), angles.cos()], dim=-1).reshape(100, 64).numpy()}

    report, deviations = Report(), tolerances.scatter(original)
    compare.judge(report, "float64", {"flax": {"table": ours}}, original(), deviations)
    golden = golden_data.arrays("pieces")["positions/sinusoidal"]
    compare.judge(report, "float32", {"flax": {"table": ours.astype(np.float32)}, "original": {"table": golden}}, original(), deviations)
    assert report.ok, report.failures()
