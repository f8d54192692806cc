"""The experiments of both packages: equal from equal inputs, equal to what the originals give, and drawn."""

import dataclasses
import functools
import importlib
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from PIL import Image

import torch_ref.experiments.leak
import torch_ref.experiments.mask_gradients
import torch_ref.experiments.rank
import torch_ref.experiments.scaling
import torch_ref.experiments.scores
import torch_ref.experiments.sharing
import torch_ref.experiments.training
import torch_ref.models.gpt
import torch_ref.nn.attention
import torch_ref.nn.positions
import torch_ref.nn.sharing
import torch_ref.weights.tree
from flax_gpt import figures, masks
from flax_gpt.config import EncoderConfig, GPTConfig
from flax_gpt.errors import InputError
from flax_gpt.experiments import leak, mask_gradients, positions, rank, result, scaling, scores, sharing, training
from flax_gpt.generation.sampling import generate
from flax_gpt.models.gpt import MiniGPT
from flax_gpt.nn.attention import MultiHeadAttention, SingleHeadAttention
from flax_gpt.nn.sharing import SHARING
from flax_gpt.training.data import Batch
from flax_gpt.weights import tree
from parity_tests import compare, golden_data, oracle, tolerances

TINY = {
    "scaling": dict(widths=[1, 9], length=5, draws=3),
    "rank": dict(length=12, d_model=6, heads=3),
    "visible": dict(length=4),
    "masks": dict(length=5),
    "mask-gradients": dict(length=4, d_model=6, head_dim=3),
    "positions": dict(length=20, d_model=6),
    "scores": dict(length=4, width=3),
    "leak": dict(window=12, steps=200, batch_size=16, held_out_windows=8),
    "sharing": dict(letters=3, length=3, steps=60, batch_size=16, d_model=16),
}


@functools.cache
def tiny(name, seed=0):
    return importlib.import_module(f"flax_gpt.experiments.{name.replace('-', '_')}").run(seed, **TINY[name])


def assert_equal(ours, theirs, **options):
    """ours, theirs: functions of a dtype's name → {name: array}; see compare.check_programs. In float64 the flax side runs with x64 on."""

    def in_numpy(dtype):
        with jax.enable_x64(dtype == "float64"):
            return {name: np.asarray(value) for name, value in ours(dtype).items()}

    def from_torch(dtype, *generator):
        return {name: value.detach().numpy().copy() for name, value in theirs(dtype, *generator).items()}

    report = compare.check_programs(in_numpy, from_torch, **options)
    assert report.ok, report.failures()
    return report


def assert_measures_equal(ours, theirs, *inputs, integers=()):
    """`measure` of both packages on the same arrays; what is named in `integers` is equal in float64 and not compared in float32."""
    jitted = jax.jit(ours)

    def flax_side(dtype):
        return jitted(*(jnp.asarray(x, dtype) for x in inputs))

    def torch_side(dtype):
        return theirs(*(torch.from_numpy(x).to(getattr(torch, dtype)) for x in inputs))

    with jax.enable_x64(True):
        found, wanted = flax_side("float64"), torch_side("float64")
        for name in integers:
            np.testing.assert_array_equal(np.asarray(found[name]), wanted[name].numpy())
    keep = lambda values: {name: value for name, value in values.items() if name not in integers}
    return assert_equal(lambda dtype: keep(flax_side(dtype)), lambda dtype: keep(torch_side(dtype)))


# 1/√d_k


def test_scaling_gives_the_known_figures():
    found = scaling.run()
    assert found.widths == [4, 16, 64, 256]
    assert found.length == 16
    last = {what: {name: values[-1] for name, values in getattr(found, what).items()} for what in ("entropy", "largest", "score_std")}
    assert round(last["entropy"]["unscaled"], 1) == 0.2
    assert round(last["largest"]["unscaled"], 1) == 0.9
    assert round(last["entropy"]["scaled"], 1) in (2.3, 2.4)
    assert round(last["largest"]["scaled"], 2) == 0.25
    assert round(last["score_std"]["unscaled"]) == 16  # √256
    assert round(last["score_std"]["scaled"], 1) == 1.0
    for i, width in enumerate(found.widths):
        assert found.entropy["unscaled"][i] < found.entropy["scaled"][i] < math.log(16)
        assert 1 / 16 < found.largest["scaled"][i] < found.largest["unscaled"][i] < 1, width


def test_scaling_is_equal_in_both():
    for q, k in scaling.draw(0, [4, 256], 16, 4):
        assert_measures_equal(scaling.measure, torch_ref.experiments.scaling.measure, q, k)


def test_entropy_of_a_certain_row_has_a_finite_gradient():
    p = jnp.array([1.0, 0.0, 0.0])
    assert float(scaling.entropy(p)) == 0.0
    assert np.isfinite(np.asarray(jax.grad(scaling.entropy)(p))).all()


# Rank


def test_ranks_are_what_is_computed():
    found = rank.run()
    assert found.threshold == 1e-5
    assert (found.single.heads, found.single.width, found.multi.heads, found.multi.width) == (1, 64, 8, 8)
    assert found.single.map_rank == [128]
    assert set(found.multi.map_rank) <= {127, 128}
    assert found.single.score_rank == [64]
    assert found.multi.score_rank == [8] * 8
    assert max(found.multi.map_effective_rank) < found.single.map_effective_rank[0] < 128


def test_effective_rank_of_known_spectra():
    spectra = jnp.array([[2.0, 2.0, 2.0, 2.0], [5.0, 0.0, 0.0, 0.0]])
    assert np.asarray(rank.effective_rank(spectra)).round(6).tolist() == [4.0, 1.0]


@pytest.mark.parametrize("heads", [1, 4])
def test_spectra_are_equal_in_both(heads):
    q, k = rank.draw(0, 24, 16).reshape(2, 1, 24, heads, 16 // heads)
    counts = ("map_rank", "score_rank", "mean_map_rank")
    assert_measures_equal(rank.measure, torch_ref.experiments.rank.measure, q, k, integers=counts)


# Masks and their gradients


def test_visible_context():
    found = importlib.import_module("flax_gpt.experiments.visible").run()
    assert (found.counts, found.mean, found.smallest, found.largest) == (list(range(1, 11)), 5.5, 1, 10)


def test_pictured_masks_are_those_of_the_torch_side():
    found = tiny("masks")
    lengths = torch.tensor(found.lengths)
    wanted = {
        "causal": torch_ref.masks.causal_mask(5)[None],
        "bidirectional": torch_ref.masks.bidirectional_mask(5)[None],
        "window": torch_ref.masks.window_mask(5, window=tuple(found.window))[None],
        "permutation": torch_ref.masks.permutation_mask(found.order)[None],
        "padding": torch_ref.masks.padding_mask(lengths, 5)[:, 0].expand(2, 5, 5),
        "combined": torch_ref.masks.combined_mask(lengths, 5)[:, 0],
    }
    assert found.kinds == {name: mask.tolist() for name, mask in wanted.items()}
    assert found.visible == {name: torch_ref.masks.visible_counts(mask).tolist() for name, mask in wanted.items()}


def single_head(weights, dtype):
    """Both packages' attention of one head, D 24 and Dh 8, with weights {query | key | value: (Dh, D)}."""
    config = EncoderConfig(d_model=24, num_heads=1, dtype=dtype, param_dtype=dtype)
    with jax.enable_x64(dtype == "float64"):
        ours, theirs = SingleHeadAttention(config, 8, rngs=nnx.Rngs(0)), torch_ref.nn.attention.SingleHeadAttention(config, 8)
        for name, weight in weights.items():
            getattr(ours, name).kernel.set_value(jnp.asarray(weight.T, dtype))
            getattr(theirs, name).weight.data.copy_(torch.from_numpy(weight))
    return ours, theirs


def assert_gradients_equal(x, weights, kinds, **options):
    """kinds: {name: boolean mask or None}, as numpy."""

    def ours(dtype):
        seen = {name: None if mask is None else jnp.asarray(mask) for name, mask in kinds.items()}
        with jax.enable_x64(dtype == "float64"):
            attention, _ = single_head(weights, dtype)
            return jax.jit(lambda x: mask_gradients.measure(attention, x, seen, **options.get("attend", {})))(jnp.asarray(x, dtype))

    def theirs(dtype):
        seen = {name: None if mask is None else torch.from_numpy(mask.copy()) for name, mask in kinds.items()}
        _, attention = single_head(weights, dtype)
        values = torch.from_numpy(x).to(getattr(torch, dtype))
        return torch_ref.experiments.mask_gradients.measure(attention, values, seen, **options.get("attend", {}))

    return assert_equal(ours, theirs, **{name: value for name, value in options.items() if name != "attend"})


def test_gradients_under_masks_are_the_originals():
    """The original's −1e9 fill gives a uniform row where nothing is seen."""
    golden = golden_data.group("pieces", "single_head")
    weights = {name: golden[f"weights/W_{name[0]}.weight"] for name in ("query", "key", "value")}
    kinds = {name: golden_data.arrays("pieces")[f"masks/{name}"] == 1 for name in ("causal", "padding", "combined", "permutation")}
    original = {f"{name}/grad_x": golden[f"{name}/grad_x"] for name in kinds}
    report = assert_gradients_equal(golden["x"], weights, kinds, attend={"empty_rows": "uniform"}, original=original)
    assert {row.name for row in report.rows if "original" in row.grades} == set(original)


def test_gradients_under_batched_masks_are_equal_in_both():
    rng = np.random.default_rng(0)
    weights = {name: rng.uniform(-0.2, 0.2, (8, 24)).astype(np.float32) for name in ("query", "key", "value")}
    kinds = {"none": None, "combined": np.asarray(masks.combined_mask(np.array([2, 4], np.int32), 4))}
    kinds["permutation"] = np.asarray(masks.permutation_mask([[3, 0, 1, 2], [0, 1, 2, 3]]))
    assert_gradients_equal(rng.standard_normal((2, 4, 24)).astype(np.float32), weights, kinds)


def test_a_query_sends_no_gradient_to_what_it_does_not_see():
    found = tiny("mask-gradients")
    T = found.length
    seen = {
        "none": np.ones((T, T), bool),
        "causal": masks.causal_mask(T),
        "padding": masks.padding_mask(np.array([found.real], np.int32), T)[0, 0],
        "combined": masks.combined_mask(np.array([found.real], np.int32), T)[0, 0],
        "permutation": masks.permutation_mask(found.order),
    }
    assert list(found.influence) == list(seen)
    for name, mask in seen.items():
        hidden = ~(np.broadcast_to(np.asarray(mask), (T, T)) | np.eye(T, dtype=bool))  # x[t] also makes query t
        influence = np.asarray(found.influence[name])
        assert (influence[hidden] == 0).all(), name
        off_diagonal = np.broadcast_to(np.asarray(mask), (T, T)) & ~np.eye(T, dtype=bool)
        assert (influence[off_diagonal] > 0).all(), name
        assert found.equal[name] == (name == "none") == (found.distance[name] == 0), name


# Positions and scores


def test_position_pictures_show_the_table_of_both_packages():
    found = positions.run()
    np.testing.assert_array_equal(found.table, torch_ref.nn.positions.sinusoidal_table(100, 64))
    period = np.array([found.table[0][0], found.table[round(found.wavelengths[2])][found.columns[2]]])
    assert period.round(1).tolist() == [0.0, 0.0]


def test_scores_are_equal_in_both():
    assert_measures_equal(scores.measure, torch_ref.experiments.scores.measure, *scores.draw(0, 6, 8))


def test_weights_beside_scores_are_those_of_the_causal_mask():
    found = tiny("scores")
    weights = np.asarray(found.weights)
    assert (np.triu(weights, 1) == 0).all()
    assert weights.sum(axis=-1).round(6).tolist() == [1.0] * found.length


# Small trainings


def with_dtype(config, dtype):
    return dataclasses.replace(config, dtype=dtype, param_dtype=dtype)


def assert_training_equal(make_ours, make_theirs, config, batches, optimizer, measure, their_measure, inputs):
    """`fit` on `batches`, where there are any, and then `measure` on `inputs` (integers stay, the rest is cast)."""
    weights = tree.torch_weights(make_ours(config))

    def ours(dtype):
        with jax.enable_x64(dtype == "float64"):
            model = make_ours(with_dtype(config, dtype))
            tree.load_weights(model, weights)
            cast = [jnp.asarray(x if x.dtype.kind == "i" else x.astype(dtype)) for x in inputs]
            losses = {} if batches is None else {"losses": training.fit(model, batches, optimizer)}
            return losses | nnx.jit(measure)(model, *cast)

    def theirs(dtype, generator=None):
        model = make_theirs(with_dtype(config, dtype))
        torch_ref.weights.tree.load_weights(model, weights)
        betas = {}
        if generator is not None:
            betas = {name: tolerances.RoundedPower.of(getattr(optimizer, name), generator) for name in ("beta1", "beta2")}
        cast = [torch.from_numpy(x) if x.dtype.kind == "i" else torch.from_numpy(x).to(getattr(torch, dtype)) for x in inputs]
        losses = {}
        if batches is not None:
            arrays = tuple(map(torch.from_numpy, batches))
            losses["losses"] = torch_ref.experiments.training.fit(model, arrays, dataclasses.replace(optimizer, **betas))
        return losses | their_measure(model, *cast)

    return assert_equal(ours, theirs, has_powers=batches is not None)


@pytest.mark.parametrize("name", SHARING)
def test_gradients_and_an_optimizer_step_of_every_variant_are_equal(name):
    """Maps, logits, every gradient by name, and parameters and moments after a step of AdamW."""
    config = sharing.model_config(letters=3, length=3, d_model=8, heads=2, layers=1)
    weights = tree.torch_weights(sharing.make_model(config, name, 0))
    part = sharing.draw(0, 3, 3, (1, 3))
    batch = oracle.Batch(part.tokens[0], part.targets[0], lengths=np.array([6, 2, 5], np.int32))

    def ours(dtype):
        with jax.enable_x64(dtype == "float64"):
            model = sharing.make_model(with_dtype(config, dtype), name, 0)
            tree.load_weights(model, weights)
        return oracle.flax_values(model, batch) | oracle.flax_steps(model, batch, sharing.OPTIMIZER, (1,))

    def theirs(dtype, powers=None):
        model = torch_ref.experiments.sharing.make_model(with_dtype(config, dtype), name)
        torch_ref.weights.tree.load_weights(model, weights)
        return oracle.torch_values(model, batch) | oracle.torch_steps(model, batch, sharing.OPTIMIZER, (1,), powers)

    report = compare.check_programs(ours, theirs, has_powers=True)
    assert report.ok, report.failures()
    names = {row.name for row in report.rows}
    parameters = {parameter for parameter in weights if parameter not in ("pos_encoding.pe", "causal_mask", "lm_head.weight")}
    assert {f"{group}{parameter}" for group in ("grads/", "step1/weights/", "step1/exp_avg_sq/") for parameter in parameters} <= names


@pytest.mark.parametrize("name", SHARING)
def test_sharing_is_equal_in_both(name):
    """The experiment's measures."""
    config = sharing.model_config(letters=3, length=3, d_model=8, heads=2, layers=1)
    fresh = [part[0] for part in sharing.draw(1, 3, 3, (1, 4))]
    assert_training_equal(
        lambda config: sharing.make_model(config, name, 0),
        lambda config: torch_ref.experiments.sharing.make_model(config, name),
        config,
        None,
        sharing.OPTIMIZER,
        sharing.measure,
        torch_ref.experiments.sharing.measure,
        fresh,
    )


@pytest.mark.parametrize("causal", [True, False])
def test_leak_is_equal_in_both(causal):
    """For a causal model the honest loss is the loss: their difference is zero in theory. The other is also trained."""
    config = leak.model_config(vocab_size=11, window=6, d_model=8, heads=2, layers=1)
    tokens = np.random.default_rng(0).integers(0, 11, 200)
    batches, fresh = None if causal else leak.draw(tokens, 0, 6, (3, 4)), leak.draw(tokens, 1, 6, (1, 3))

    def with_difference(measure):
        def measured(model, *inputs):
            found = measure(model, *inputs)
            return found | ({"difference": found["honest_loss"] - found["held_out_loss"]} if causal else {})

        return measured

    assert_training_equal(
        lambda config: evaluated(MiniGPT(config, rngs=nnx.Rngs(0), causal=causal)),
        lambda config: torch_ref.models.gpt.MiniGPT(config, causal=causal).eval(),
        config,
        batches,
        leak.OPTIMIZER,
        with_difference(leak.measure),
        with_difference(torch_ref.experiments.leak.measure),
        [fresh.tokens[0], fresh.targets[0]],
    )


def evaluated(model):
    model.eval()
    return model


# Sharing


def test_parameters_of_the_variants():
    found = tiny("sharing")
    D = found.d_model
    attention = {name: variant.attention_parameters for name, variant in found.variants.items()}
    assert attention == {"separate": 4 * D * D, "key_value": 3 * D * D, "query_key": 3 * D * D, "none": D * D}
    others = {variant.parameters - variant.attention_parameters for variant in found.variants.values()}
    assert len(others) == 1


def test_what_the_variants_reach():
    found = tiny("sharing")
    for name, variant in found.variants.items():
        assert variant.train["step"][-1] == found.steps
        assert variant.train["loss"][-1] < variant.train["loss"][0], name
        assert (round(variant.symmetry, 4) == 1.0) == (name in ("query_key", "none")), name


CONFIG = GPTConfig(vocab_size=7, d_model=16, num_heads=4, num_layers=1, max_len=12, dropout=0.0, init="torch", positions="rope_half")


PARTS = ("query", "key", "value", "output")
SOURCES = {
    "separate": {"query": "query", "key": "key", "value": "value"},
    "key_value": {"query": "query", "key": "key", "value": "key"},
    "query_key": {"query": "query", "key": "query", "value": "value"},
    "none": {},
}
"""Projection of the separate module → the one of the shared module that stands for it; a unit matrix where there is none."""


@pytest.mark.parametrize("name", SHARING)
def test_variants_are_separate_attention_with_equal_weights(name):
    """Copied or unit weights in the separate module, under RoPE, a causal mask and padding, give the same bits."""
    source = SOURCES[name] | {"output": "output"}
    x = np.random.default_rng(0).standard_normal((2, 6, 16)).astype(np.float32)

    shared, whole = SHARING[name](CONFIG, "place", rngs=nnx.Rngs(1)), MultiHeadAttention(CONFIG, "place", rngs=nnx.Rngs(2))
    for target in PARTS:
        kernel = getattr(shared, source[target]).kernel[...] if target in source else jnp.eye(CONFIG.d_model)
        getattr(whole, target).kernel.set_value(kernel)
    assert {part for part in PARTS if hasattr(shared, part)} == set(source.values())
    rotation = MiniGPT(CONFIG, rngs=nnx.Rngs(0)).rotation(6, None, None)
    options = dict(causal=True, lengths=jnp.array([6, 4]), rotation=rotation, return_attention=True)
    for ours, theirs in zip(shared(jnp.asarray(x), **options), whole(jnp.asarray(x), **options), strict=True):
        np.testing.assert_array_equal(ours, theirs)

    shared, whole = torch_ref.nn.sharing.SHARING[name](CONFIG, "place"), torch_ref.nn.attention.MultiHeadAttention(CONFIG, "place")
    for target in PARTS:
        weight = getattr(shared, source[target]).weight if target in source else torch.eye(CONFIG.d_model)
        getattr(whole, target).weight.data.copy_(weight)
    assert {part for part in PARTS if hasattr(shared, part)} == set(source.values())
    rotation = torch_ref.models.gpt.MiniGPT(CONFIG).rotation(6, None, None)
    options = dict(causal=True, lengths=torch.tensor([6, 4]), rotation=rotation, return_attention=True)
    for ours, theirs in zip(shared(torch.from_numpy(x), **options), whole(torch.from_numpy(x), **options), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["key_value", "query_key"])
def test_variants_generate_the_same_with_a_cache(name):
    model = sharing.make_model(CONFIG, name, 0)
    prompt = jnp.array([[1, 2, 3]], jnp.int32)
    np.testing.assert_array_equal(generate(model, prompt, 6, temperature=0), leak.continue_greedily(model, prompt, 6))


@pytest.mark.parametrize("name", ["query_key", "none"])
def test_equal_queries_and_keys_need_equal_heads(name):
    grouped = dataclasses.replace(CONFIG, num_kv_heads=2)
    for make in (lambda: SHARING[name](grouped, "place", rngs=nnx.Rngs(0)), lambda: torch_ref.nn.sharing.SHARING[name](grouped, "place")):
        with pytest.raises(InputError, match="num_kv_heads = 2: must equal num_heads = 4"):
            make()


def test_unknown_ways_of_sharing_are_refused():
    with pytest.raises(InputError, match="sharing = 'all': must be one of separate, key_value, query_key, none"):
        sharing.make_model(CONFIG, "all", 0)
    with pytest.raises(InputError, match="sharing = 'all'"):
        torch_ref.experiments.sharing.make_model(CONFIG, "all")


# The leak


def test_the_leak_fools_the_loss_and_fails_in_earnest():
    found = tiny("leak")
    assert found.bidirectional.train["loss"][-1] < found.causal.train["loss"][-1] / 2
    assert found.bidirectional.held_out_loss < found.causal.held_out_loss / 2
    assert found.bidirectional.honest_loss > found.causal.honest_loss
    assert found.bidirectional.honest_accuracy < found.causal.honest_accuracy < found.bidirectional.held_out_accuracy
    assert len(found.causal.continuation) == len(found.bidirectional.continuation) == found.window - len(found.prompt)


def decoders(causal):
    ours = MiniGPT(CONFIG, rngs=nnx.Rngs(0), causal=causal)
    theirs = torch_ref.models.gpt.MiniGPT(CONFIG, causal=causal).eval()
    torch_ref.weights.tree.load_weights(theirs, tree.torch_weights(ours))
    ours.eval()
    return ours, theirs


@pytest.mark.parametrize("causal", [True, False])
def test_continuations_are_equal_in_both(causal):
    ours, theirs = decoders(causal)
    prompt = np.array([[1, 2, 3], [6, 5, 4]], np.int32)
    written = np.asarray(leak.continue_greedily(ours, jnp.asarray(prompt), 7))
    np.testing.assert_array_equal(written[:, :3], prompt)
    np.testing.assert_array_equal(written, torch_ref.experiments.leak.continue_greedily(theirs, torch.from_numpy(prompt), 7).numpy())
    if causal:
        np.testing.assert_array_equal(written, generate(ours, jnp.asarray(prompt), 7, temperature=0))


@pytest.mark.parametrize("causal", [True, False])
def test_only_the_causal_model_is_blind_to_what_follows(causal):
    tokens = np.array([[1, 2, 3, 4], [1, 2, 3, 5]], np.int32)
    ours, theirs = decoders(causal)
    for logits in (np.asarray(ours(jnp.asarray(tokens))[0]), theirs(torch.from_numpy(tokens))[0].detach().numpy()):
        assert np.array_equal(logits[0, :3], logits[1, :3]) == causal


def test_a_model_that_is_not_causal_has_no_cache():
    ours, _ = decoders(causal=False)
    with pytest.raises(InputError, match="causal = False: must be True"):
        generate(ours, jnp.array([[1, 2]], jnp.int32), 3, temperature=0)


# Numbers and pictures


@pytest.mark.parametrize("name", figures.EXPERIMENTS)
def test_every_experiment_is_drawn_and_its_numbers_are_json(name, tmp_path):
    numbers = tiny(name)
    picture = importlib.import_module(f"flax_gpt.figures.{name.replace('-', '_')}").draw(numbers, tmp_path / "picture.png")
    with Image.open(picture) as image:
        image.load()
        assert min(image.size) > 300
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20
    saved = numbers.save(tmp_path / "numbers.json")
    assert json.loads(saved.read_text(encoding="utf-8")) == json.loads(json.dumps(numbers.to_dict()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["numbers.json", "picture.png"]


@pytest.mark.parametrize("name", ["scaling", "rank", "masks", "mask-gradients", "scores"])
def test_numbers_depend_on_the_seed_alone(name):
    first, again, other = tiny(name), tiny.__wrapped__(name), tiny(name, 1)
    assert first == again
    assert dataclasses.replace(other, seed=0) != first


def test_the_table_draws_by_name(tmp_path):
    assert figures.draw("visible", tmp_path / "new", seed=3) == [tmp_path / "new" / "visible.png", tmp_path / "new" / "visible.json"]
    assert json.loads((tmp_path / "new" / "visible.json").read_text(encoding="utf-8"))["seed"] == 3
    with pytest.raises(InputError, match="NAME = 'loss': must be one of scaling, "):
        figures.draw("loss", tmp_path)


@pytest.mark.parametrize("name", figures.EXPERIMENTS)
@pytest.mark.parametrize("seed", [-1, 2**32, 0.5])
def test_seeds_out_of_range_are_refused(name, seed, tmp_path):
    with pytest.raises(InputError, match=r"^seed = "):
        figures.draw(name, tmp_path, seed)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options", "argument"),
    [
        ("scaling", dict(widths=[]), "widths"),
        ("scaling", dict(widths=[4, 0]), "widths"),
        ("scaling", dict(length=0), "length"),
        ("scaling", dict(draws=0), "draws"),
        ("rank", dict(length=0), "length"),
        ("rank", dict(d_model=0), "d_model"),
        ("rank", dict(heads=3), "heads"),
        ("visible", dict(length=0), "length"),
        ("masks", dict(length=1), "length"),
        ("mask-gradients", dict(length=1), "length"),
        ("mask-gradients", dict(head_dim=0), "head_dim"),
        ("mask-gradients", dict(d_model=0), "d_model"),
        ("positions", dict(length=1), "length"),
        ("positions", dict(d_model=7), "d_model"),
        ("positions", dict(d_model=0), "d_model"),
        ("scores", dict(width=0), "width"),
        ("leak", dict(window=3), "window"),
        ("leak", dict(window=10**6), "window"),
        ("leak", dict(steps=0), "steps"),
        ("sharing", dict(letters=0), "letters"),
        ("sharing", dict(steps=0), "steps"),
        ("sharing", dict(d_model=15), "d_model"),
    ],
)
def test_impossible_sizes_are_refused(name, options, argument):
    with pytest.raises(InputError, match=f"^{argument} = "):
        importlib.import_module(f"flax_gpt.experiments.{name.replace('-', '_')}").run(0, **options)


def test_a_number_that_json_lacks_is_refused_and_leaves_no_file(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Broken(result.Result):
        loss: float

    with pytest.raises(ValueError, match="not JSON compliant"):
        Broken(0, math.nan).save(tmp_path / "broken.json")
    assert not list(tmp_path.iterdir())


def test_smoothing_keeps_the_last_step_and_the_mean():
    found = training.smoothed(np.arange(10.0), 3)
    assert found == {"step": [4, 7, 10], "loss": [1.5, 5.0, 8.0]}
    assert training.smoothed(np.arange(2.0), 50) == {"step": [1, 2], "loss": [0.0, 1.0]}


def test_batches_of_the_copying_task():
    batch: Batch = sharing.draw(0, 4, 3, (2, 5))
    assert batch.tokens.shape == batch.targets.shape == batch.weights.shape == (2, 5, 6)
    assert (batch.tokens[..., 3] == 4).all()
    np.testing.assert_array_equal(batch.targets[batch.weights == 1].reshape(2, 5, 3), batch.tokens[..., :3])
