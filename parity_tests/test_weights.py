"""Weights in and out of both packages: bit for bit, under the original's names, all or nothing."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
import torch
from flax import nnx

import flax_gpt.weights.tree
import torch_ref.weights.tree
from flax_gpt.config import EncoderConfig, GPTConfig, OptimizerConfig
from flax_gpt.errors import InputError
from flax_gpt.nn.positions import Buffer
from parity_tests import golden_data, oracle

SMALL = GPTConfig(vocab_size=7, d_model=8, num_heads=2, num_kv_heads=1, num_layers=2, d_ff=8, max_len=5)
SMALL_ENCODER = EncoderConfig(vocab_size=3, d_model=8, num_heads=2, num_layers=1, max_len=6)


def flax_model(config):
    """A model with torch's numbers in it: drawing them in torch compiles nothing."""
    return oracle.flax_model(config, oracle.torch_weights(oracle.torch_model(config)))


SIDES = {
    "flax": (
        lambda config: oracle.flax_model(config, oracle.torch_weights(oracle.torch_model(config))),
        flax_gpt.weights.tree.load_weights,
        flax_gpt.weights.tree.torch_weights,
    ),
    "torch": (oracle.torch_model, torch_ref.weights.tree.load_weights, torch_ref.weights.tree.torch_weights),
}
sides = pytest.mark.parametrize("side", SIDES)


def assert_same(ours, theirs):
    assert set(ours) == set(theirs)
    for name in theirs:
        assert ours[name].dtype == theirs[name].dtype, name
        assert ours[name].tobytes() == theirs[name].tobytes(), name


@sides
@pytest.mark.parametrize("name", golden_data.CONFIGS)
def test_the_originals_load_unchanged_and_come_back_bitwise(side, name, tmp_path):
    make, load, read = SIDES[side]
    golden, model = golden_data.group(name, "weights"), make(golden_data.CONFIGS[name])
    load(model, golden)
    assert_same(read(model), golden)
    safetensors.numpy.save_file(golden, tmp_path / "weights.safetensors")
    other = make(golden_data.CONFIGS[name])
    load(other, tmp_path / "weights.safetensors")
    assert_same(read(other), golden)


def test_a_saved_file_goes_round_both_packages(tmp_path):
    ours = oracle.flax_model(SMALL, seed=3)
    flax_gpt.weights.tree.save_weights(ours, tmp_path / "flax.safetensors")
    theirs = oracle.torch_model(SMALL)
    torch_ref.weights.tree.load_weights(theirs, tmp_path / "flax.safetensors")
    torch.save(theirs.state_dict(), tmp_path / "torch.pt")
    again = oracle.torch_model(SMALL)
    torch_ref.weights.tree.load_weights(again, tmp_path / "torch.pt")
    assert_same(oracle.torch_weights(again), oracle.flax_weights(ours))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["flax.safetensors", "torch.pt"]


def test_a_plain_state_dict_loads_with_torchs_own_call():
    golden = golden_data.group("minigpt", "weights")
    model = oracle.torch_model(golden_data.CONFIGS["minigpt"])
    assert str(model.load_state_dict({name: torch.from_numpy(value) for name, value in golden.items()})) == "<All keys matched successfully>"
    assert_same({name: value.numpy() for name, value in model.state_dict().items()}, golden)


@sides
def test_all_errors_come_together_and_nothing_changes(side):
    make, load, read = SIDES[side]
    model = make(SMALL)
    before = read(model)
    wrong = {name: value + 1 for name, value in before.items() if value.dtype != bool}
    del wrong["final_norm.bias"], wrong["blocks.1.self_attn.W_K.weight"]
    wrong |= {"blocks.9.norm1.weight": np.zeros(3, np.float32), "optimizer.step": np.zeros((), np.float32)}
    wrong["blocks.0.ffn.linear1.bias"] = np.zeros((2, 4), np.float32)
    wrong["final_norm.weight"] = np.zeros(9, np.float32)
    wrong["token_embed.weight"] = wrong["token_embed.weight"].copy()
    wrong["token_embed.weight"][0, 0] += 1
    wrong["causal_mask"] = np.zeros((5, 5), bool)
    wrong["blocks.0.norm2.weight"] = np.ones(8, np.int64)
    with pytest.raises(InputError) as caught:
        load(model, wrong)
    message = str(caught.value)
    for part in (
        "missing final_norm.bias [8]",
        "missing blocks.1.self_attn.W_K.weight [4, 8]",
        "unexpected blocks.9.norm1.weight [3]",
        "unexpected optimizer.step []",
        "blocks.0.ffn.linear1.bias has the shape [2, 4], the model has [8]",
        "final_norm.weight has the shape [9], the model has [8]",
        "lm_head.weight differs from token_embed.weight, with which it is tied",
        "causal_mask is not the model's",
        "blocks.0.norm2.weight has the dtype int64, which holds no weights",
    ):
        assert part in message
    assert "\n" not in message
    assert_same(read(model), before)


def test_both_packages_refuse_in_the_same_words():
    errors = []
    for make, load, _ in SIDES.values():
        with pytest.raises(InputError) as caught:
            load(make(SMALL_ENCODER), {"embed.weight": np.zeros((3, 9), np.float32), "strange": np.zeros(2, np.float32)})
        errors.append(sorted(caught.value.limit.split("; ")))
    assert errors[0] == errors[1]


@sides
def test_square_kernels_are_transposed_by_kind(side):
    """Every kernel is square here: a shape cannot tell its orientation."""
    make, load, _ = SIDES[side]
    square = GPTConfig(vocab_size=8, d_model=8, num_heads=2, num_layers=1, d_ff=8, max_len=8)
    weights = oracle.torch_weights(oracle.torch_model(square))
    model = make(square)
    load(model, weights)
    block = model.blocks[0]
    for layer, name in (
        (block.attention.query, "self_attn.W_Q"),
        (block.attention.output, "self_attn.W_O"),
        (block.feed_forward.linear2, "ffn.linear2"),
    ):
        held = np.asarray(layer.kernel[...]).T if side == "flax" else layer.weight.detach().numpy()
        np.testing.assert_array_equal(held, weights[f"blocks.0.{name}.weight"])
        assert not np.array_equal(held, held.T)


@sides
def test_aliases_and_buffers_may_be_absent(side):
    make, load, read = SIDES[side]
    golden = golden_data.group("minigpt", "weights")
    model = make(golden_data.CONFIGS["minigpt"])
    own = read(model)["pos_encoding.pe"]
    load(model, {name: value for name, value in golden.items() if name not in ("lm_head.weight", "causal_mask", "pos_encoding.pe")})
    assert_same(read(model), golden | {"pos_encoding.pe": own})


@sides
def test_the_position_table_is_kept_as_stored(side):
    """torch's float32 table is not the rounded float64 one; a file's own is used and given back."""
    make, load, read = SIDES[side]
    model = make(golden_data.CONFIGS["minigpt_seed_size"])
    golden = golden_data.group("minigpt_seed_size", "weights")
    own = read(model)["pos_encoding.pe"]
    assert not np.array_equal(own, golden["pos_encoding.pe"])
    load(model, golden)
    np.testing.assert_array_equal(read(model)["pos_encoding.pe"], golden["pos_encoding.pe"])
    moved = golden | {"pos_encoding.pe": golden["pos_encoding.pe"] + 1}
    load(model, moved)
    np.testing.assert_array_equal(read(model)["pos_encoding.pe"], moved["pos_encoding.pe"])


def test_the_position_table_is_never_trained():
    for config, name in ((SMALL, "pos_encoding.pe"), (SMALL_ENCODER, "pos.pe")):
        ours, theirs = oracle.flax_model(config), oracle.torch_model(config)
        trained = {path for path, _ in nnx.to_flat_state(nnx.state(ours, nnx.Param))}
        assert ("positions", "table") not in trained
        assert [path for path, _ in nnx.to_flat_state(nnx.state(ours, Buffer))] == [("positions", "table")]
        parameters = set(oracle.torch_weights(theirs)) - {name, "lm_head.weight", "causal_mask"}
        assert set(flax_gpt.weights.tree.torch_weights(ours, nnx.state(ours, nnx.Param))) == parameters
        assert set(torch_ref.weights.tree.gradients(theirs)) == parameters


def test_tied_weights_are_one_leaf_before_and_after_training():
    """Three steps that decay everything: the head is still the embedding, in memory and on disk."""
    config = OptimizerConfig(lr=0.1, schedule="constant", decay="all")
    rng = np.random.default_rng(0)
    batch = oracle.Batch.of({"tokens": rng.integers(0, 7, (2, 5)), "targets": rng.integers(0, 7, (2, 5))})
    ours = oracle.flax_model(SMALL)
    theirs = oracle.torch_model(SMALL, oracle.flax_weights(ours))
    names = [name for name in oracle.flax_weights(ours) if name not in ("lm_head.weight", "pos_encoding.pe", "causal_mask")]
    for found in (oracle.flax_steps(ours, batch, config, (3,)), oracle.torch_steps(theirs, batch, config, (3,))):
        assert sorted(key for key in found if key.startswith("step3/weights/")) == sorted(f"step3/weights/{name}" for name in names)
        assert np.abs(found["step3/weights/token_embed.weight"] - oracle.flax_weights(ours)["token_embed.weight"]).min() > 0

    params = nnx.state(ours, nnx.Param)
    assert len(jax.tree.leaves(params)) == len(names)
    nnx.update(ours, optax.apply_updates(params, jax.tree.map(np.ones_like, params)))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 1
    assert len(list(theirs.parameters())) == len(names)
    for written in (oracle.flax_weights(ours), oracle.torch_weights(theirs)):
        np.testing.assert_array_equal(written["lm_head.weight"], written["token_embed.weight"])
    hidden = np.ones((1, 1, 8), np.float32)
    hidden[..., 0] = 3
    assert np.asarray(ours.head(hidden)).shape == theirs.head(torch.from_numpy(hidden)).shape == (1, 1, 7)


@sides
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_go_round(side, dtype, tmp_path):
    """Stored as they are, and cast to the parameters' dtype on the way in."""
    make, load, read = SIDES[side]
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    stored = {name: value if value.dtype == bool else value.astype(kind) for name, value in oracle.torch_weights(oracle.torch_model(SMALL)).items()}
    safetensors.numpy.save_file(stored, tmp_path / "weights.safetensors")
    for source in (stored, tmp_path / "weights.safetensors"):
        narrow = make(SMALL)
        load(narrow, source)
        assert_same(read(narrow), {name: value if value.dtype == bool else value.astype(np.float32) for name, value in stored.items()})
    with jax.enable_x64(dtype == "float64"):
        model = make(dataclasses.replace(SMALL, dtype=dtype, param_dtype=dtype))
        load(model, stored)
        table = {"pos_encoding.pe": stored["pos_encoding.pe"].astype(np.promote_types(np.float32, kind) if dtype == "float64" else np.float32)}
        assert_same(read(model), stored | table)


@sides
def test_files_that_are_none_are_refused_by_name(side, tmp_path):
    make, load, _ = SIDES[side]
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    for name in ("absent.safetensors", "cut.safetensors"):
        with pytest.raises(InputError, match=name.replace(".", r"\.")):
            load(make(SMALL), tmp_path / name)


class Payload:
    def __reduce__(self):
        return (print, ("this code must not run",))


def test_a_pickle_with_code_is_refused(tmp_path, capsys):
    torch.save({"token_embed.weight": Payload()}, tmp_path / "bad.pt")
    with pytest.raises(InputError, match=r"bad\.pt.*not a \.pt file of plain tensors"):
        torch_ref.weights.tree.load_weights(oracle.torch_model(SMALL), tmp_path / "bad.pt")
    assert "must not run" not in capsys.readouterr().out


def test_gradients_and_moments_are_spelled_like_weights():
    model = oracle.flax_model(SMALL)
    params = nnx.state(model, nnx.Param)
    spelled = flax_gpt.weights.tree.torch_weights(model, jax.tree.map(lambda x: 2 * x, params))
    whole = oracle.flax_weights(model)
    assert_same(spelled, {name: 2 * whole[name] for name in spelled})
