"""Both packages against the arrays that the original programs computed."""

import dataclasses
import functools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_gpt.masks
import flax_gpt.nn.attention
import flax_gpt.nn.positions
import torch_ref.masks
import torch_ref.nn.attention
import torch_ref.nn.positions
from flax_gpt.config import GPTConfig
from flax_gpt.kernels.api import attend
from flax_gpt.nn import rope_tables, rotary
from parity_tests import compare, golden_data, oracle, tolerances
from parity_tests.report import Report
from torch_ref.kernels.api import attend as torch_attend
from torch_ref.nn import rotary as torch_rotary

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


@pytest.mark.parametrize(
    ("name", "optimizer"), [("minigpt", "adamw"), pytest.param("minigpt_seed_size", "adamw", marks=pytest.mark.slow), ("tiny_transformer", "adam")]
)
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


@pytest.mark.parametrize("kind", ["none", "causal", "padding", "combined", "permutation"])
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


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_grouped_queries(kv_heads):
    """The attention modules of both packages with the original's weights, D 64 and H 8."""
    golden = golden_data.group("pieces", f"gqa{kv_heads}")
    config = GPTConfig(vocab_size=2, d_model=64, num_heads=8, num_kv_heads=kv_heads)
    parts = {name: golden[f"weights/W_{name[0]}.weight"] for name in ("query", "key", "value", "output")}
    typed = lambda x: dataclasses.replace(config, dtype=str(x.dtype).removeprefix("torch."), param_dtype=str(x.dtype).removeprefix("torch."))

    def both(module, x):
        return {"out": module(x)[0], "out_causal": module(x, causal=True)[0]}

    def ours(cast):
        x = cast(golden["x"])
        module = nnx.eval_shape(lambda: flax_gpt.nn.attention.MultiHeadAttention(typed(x), "place", rngs=nnx.Rngs(0)))
        for name, weight in parts.items():
            getattr(module, name).kernel.set_value(cast(weight.T))
        return both(module, x)

    def theirs(cast):
        x = cast(golden["x"])
        module = torch_ref.nn.attention.MultiHeadAttention(typed(x), "place")
        module.load_state_dict({f"{name}.weight": cast(weight) for name, weight in parts.items()})
        with torch.no_grad():
            return both(module, x)

    check_piece(ours, theirs, {name: golden[name] for name in ("out", "out_causal")})


@pytest.mark.parametrize("layout", ["rope_half", "rope_interleaved"])
def test_rotary_positions(layout):
    """Both packages and the original, whose angles are float32, against the formula in float64."""
    golden = golden_data.group("pieces", "rope_half") | golden_data.group("pieces", layout)
    config = GPTConfig(vocab_size=2, d_model=64, num_heads=4, positions=layout)
    T = golden["q"].shape[1]
    wanted = {name: golden[name] for name in ("q_out", "k_out")}
    if layout == "rope_half":
        twice = {name: golden[name] for name in ("cos", "sin")}
        for table in twice.values():
            np.testing.assert_array_equal(table, np.tile(table[:1, :, :8], (2, 1, 2)))
        wanted |= {name: table[:1, :, :8] for name, table in twice.items()}

    def formula(dtype):
        kind = getattr(torch, dtype)
        angles = torch.arange(T, dtype=kind)[:, None] * 10000.0 ** (-torch.arange(0, 16, 2, dtype=kind) / 16)
        cos, sin = angles.cos()[None], angles.sin()[None]
        turned = {f"{name}_out": turn(torch.from_numpy(golden[name]).to(kind), cos[:, :, None], sin[:, :, None]) for name in "qk"}
        return {name: value.numpy() for name, value in (turned | dict(cos=cos, sin=sin)).items() if name in wanted}

    def turn(x, cos, sin):
        if layout == "rope_half":
            return x * torch.cat([cos, cos], -1) + torch.cat([-x[..., 8:], x[..., :8]], -1) * torch.cat([sin, sin], -1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def package(module, array):
        def run(dtype):
            with jax.enable_x64(dtype == "float64"):
                rotation = module.RotaryPositions(dataclasses.replace(config, dtype=dtype))(T)
                turned = {f"{name}_out": module.ROTATE[layout](array(golden[name].astype(dtype)), rotation) for name in "qk"}
                return {name: np.asarray(value) for name, value in (turned | rotation._asdict()).items() if name in wanted}

        return run

    for module, array in ((rotary, jnp.asarray), (torch_rotary, torch.from_numpy)):
        report = compare.check_programs(package(module, array), formula, original=wanted)
        assert report.ok, report.failures()
        assert {row.name for row in report.rows if "original" in row.grades} == set(wanted)


def test_frequencies_of_rotary_positions():
    """Dh 64: the last pair turns by 10000^(−62/64) a position; the original's are float32, off by a unit in the last place at most."""
    ours = rope_tables.inverse_frequencies(GPTConfig(vocab_size=2, d_model=64, num_heads=1, positions="rope_half"), 1)
    golden = golden_data.arrays("pieces")["rope/theta64"]
    assert round(ours[-1], 6) == 0.000133

    def formula():
        return {"theta": (1 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)).numpy()}

    report = Report()
    compare.judge(
        report, "float32", {"flax": {"theta": ours.astype(np.float32)}, "original": {"theta": golden}}, formula(), tolerances.scatter(formula)
    )
    assert report.ok, report.failures()


READERS = {
    r"(tokens|targets|labels|logits|loss|grad_norm|attention/\d|weights/.*|grads/.*)": "test_outputs_and_gradients",
    r"(adamw|adam)/.*": "test_optimizer_steps",
    r"(trained/.*|greedy)": "test_golden_tokens_in_both_frameworks",
}
PIECE_READERS = {
    r"sdpa/.*": "test_scaled_dot_product_attention",
    r"single_head/.*": "test_single_head",
    r"masks/(causal|padding|combined)": "test_masks",
    r"masks/permutation4?": "test_permutation_is_the_originals",
    r"positions/sinusoidal": "test_sinusoidal_positions",
    r"gqa\d/.*": "test_grouped_queries",
    r"rope_(half|interleaved)/.*": "test_rotary_positions",
    r"rope/theta64": "test_frequencies_of_rotary_positions",
}


@pytest.mark.parametrize("name", [*MODELS, "pieces"])
def test_every_golden_array_has_its_test(name):
    readers = PIECE_READERS if name == "pieces" else READERS
    for key in golden_data.arrays(name):
        assert len([pattern for pattern in readers if re.fullmatch(pattern, key)]) == 1, key
    sources = "".join(path.read_text(encoding="utf-8") for path in pathlib.Path(__file__).parent.glob("test_*.py"))
    for test in readers.values():
        assert f"def {test}(" in sources
