"""What is no array, no model, or no sensible number is refused by both packages, in the same words and before anything is computed."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import torch_ref.generation.beam
import torch_ref.generation.sampling
import torch_ref.kernels.api
import torch_ref.models.encoder_decoder
import torch_ref.models.gpt
from flax_gpt.config import EncoderConfig, EncoderDecoderConfig, GPTConfig, OptimizerConfig, RopeConfig, TrainConfig
from flax_gpt.errors import InputError
from flax_gpt.generation.beam import beam_search
from flax_gpt.generation.sampling import generate, stream
from flax_gpt.kernels.api import attend
from flax_gpt.models.encoder_decoder import EncoderDecoder
from flax_gpt.nn import rope_tables
from flax_gpt.training import memory
from flax_gpt.training.data import load_corpus
from flax_gpt.training.labels import LabelTokenizer
from flax_gpt.training.loop import train
from flax_gpt.training.optimizer import make_optimizer
from flax_gpt.training.pairs import PairTokenizer
from flax_gpt.training.state import new_model
from flax_gpt.training.table import read_table
from flax_gpt.training.tokenizer import CharTokenizer
from flax_gpt.weights.tree import load_weights
from parity_tests import oracle, translation_oracle

SIZES = dict(d_model=8, num_heads=2, num_layers=1, max_len=9)
GPT = GPTConfig(7, **SIZES, positions="rope_half", rope=RopeConfig(scaling="dynamic_ntk", trained_len=4))
PAIRS = EncoderDecoderConfig(7, **SIZES)
TOKENS = np.zeros((2, 3), np.int32)
RAGGED = [[1], [1, 2]]
OBJECTS = np.array([[1, None, 2]] * 2, object)


@pytest.fixture(scope="module")
def models():
    pairs = translation_oracle.Case(PAIRS, translation_oracle.new_weights(PAIRS), None)
    gpt, classifier = (oracle.torch_model(config, seed=0) for config in (GPT, EncoderConfig()))
    return {
        "gpt": (oracle.flax_model(GPT, oracle.torch_weights(gpt)), gpt),
        "classifier": (oracle.flax_model(EncoderConfig(), oracle.torch_weights(classifier)), classifier),
        "encoder-decoder": (translation_oracle.flax_model(pairs), translation_oracle.torch_model(pairs)),
        "none": (None, None),
    }


def refusals(*calls):
    found = []
    for call in calls:
        with pytest.raises(InputError) as refused:
            call()
        found.append(str(refused.value))
    return found


def tensors(values):
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype != object else value for name, value in values.items()}


@pytest.mark.parametrize("kind", ["gpt", "classifier"])
@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (dict(tokens=[[0, 0]]), "tokens"),
        (dict(tokens=RAGGED), "tokens"),
        (dict(tokens="abc"), "tokens"),
        (dict(tokens=None), "tokens"),
        (dict(tokens=TOKENS.astype(np.float32)), "tokens"),
        (dict(tokens=TOKENS.astype(bool)), "tokens"),
        (dict(lengths=[1, 2]), "lengths"),
        (dict(lengths=[[1], 2]), "lengths"),
        (dict(lengths="2"), "lengths"),
        (dict(lengths=np.array([1.0, 2.0])), "lengths"),
        (dict(lengths=np.array([1, 4])), "lengths"),
        (dict(lengths=np.array([1, -1])), "lengths"),
    ],
)
def test_models_take_arrays(models, kind, change, argument):
    ours, theirs = models[kind]
    values = dict(tokens=TOKENS) | change
    words = refusals(lambda: ours(**values), lambda: theirs(**tensors(values)))
    assert words[0] == words[1]
    assert words[0].startswith(f"{argument} = ")


def test_models_take_no_objects_and_ids_of_every_integer_type(models):
    ours, theirs = models["gpt"]
    for change in (dict(tokens=OBJECTS), dict(lengths=OBJECTS[:, 0]), dict(positions=OBJECTS)):
        refusals(lambda change=change: ours(**(dict(tokens=TOKENS) | change)), lambda change=change: theirs(**tensors(dict(tokens=TOKENS) | change)))
    for kind in (np.uint8, np.int8, np.int16, np.int32, np.int64):
        for model, array in ((ours, jnp.asarray), (theirs, torch.from_numpy)):
            assert model(array(TOKENS.astype(kind)))[0].shape == (2, 3, 7)


@pytest.mark.parametrize(
    "span", [0, -5, 10, 10**30, 2.5, float("nan"), True, "3", [3], np.array([-1, 3]), np.array([3, 10]), np.array([2.5, 3]), np.ones(3, int)]
)
def test_a_span_is_the_length_of_a_sequence(models, span):
    ours, theirs = models["gpt"]
    words = refusals(lambda: ours(TOKENS, span=span), lambda: theirs(torch.from_numpy(TOKENS), span=tensors(dict(span=span))["span"]))
    assert words[0] == words[1]
    assert words[0].startswith("span = ")


def test_a_span_a_row_given_as_numpy_is_read(models):
    ours, _ = models["gpt"]
    for lengths in (dict(span=np.array([3, 9])), dict(lengths=np.array([1, 3]))):
        jax_lengths = {name: jnp.asarray(value) for name, value in lengths.items()}
        np.testing.assert_array_equal(ours(TOKENS, **lengths)[0], ours(TOKENS, **jax_lengths)[0])


@pytest.mark.parametrize("change", [dict(source=[[1]]), dict(target=RAGGED), dict(source_lengths=[1, 1]), dict(target_lengths="12")])
def test_encoder_decoders_take_arrays(models, change):
    ours, theirs = models["encoder-decoder"]
    values = dict(source=TOKENS, target=TOKENS) | change
    words = refusals(lambda: ours(**values), lambda: theirs(**tensors(values)))
    assert words[0] == words[1]
    assert words[0].startswith(f"{next(iter(change))} = ")


@pytest.mark.parametrize("kind", ["none", "classifier", "encoder-decoder"])
def test_what_writes_nothing_is_no_model_to_generate_with(models, kind):
    ours, theirs = models[kind]
    words = refusals(
        lambda: generate(ours, TOKENS, 3, temperature=0),
        lambda: torch_ref.generation.sampling.generate(theirs, TOKENS, 3, temperature=0),
    )
    assert words[0] == words[1]
    if kind != "encoder-decoder":
        words += refusals(lambda: beam_search(ours, TOKENS, 3), lambda: torch_ref.generation.beam.beam_search(theirs, TOKENS, 3))
        assert words[2] == words[3]
    assert all(line.startswith("model = ") for line in words)


@pytest.mark.parametrize("change", [dict(tokens=RAGGED), dict(tokens="abc"), dict(tokens=OBJECTS), dict(lengths=RAGGED), dict(lengths="ab")])
def test_prompts_are_rows_of_numbers(models, change):
    ours, theirs = models["gpt"]
    arguments = dict(tokens=TOKENS, max_new_tokens=2) | change
    words = refusals(
        lambda: generate(ours, temperature=0, **arguments),
        lambda: torch_ref.generation.sampling.generate(theirs, temperature=0, **arguments),
        lambda: beam_search(ours, **arguments),
        lambda: torch_ref.generation.beam.beam_search(theirs, **arguments),
    )
    assert all(line.startswith(f"{next(iter(change))} = ") for line in words)


@pytest.mark.parametrize(
    "change",
    [
        dict(kv_lengths=[[1], 2]),
        dict(kv_lengths="ab"),
        dict(kv_lengths=["a", "b"]),
        dict(kv_lengths=[1.5, 2.0]),
        dict(kv_lengths=object()),
        dict(empty_rows=np.array(["zero", "nan"])),
        dict(empty_rows=["zero"]),
        dict(empty_rows=None),
        dict(implementation=np.array(["dense", "blocked"])),
        dict(implementation=None),
        dict(dropout_rate=0.1, dropout_key=[[1], 2]),
        dict(dropout_rate=0.1, dropout_key=object()),
        dict(dropout_rate=np.array([0.1, 0.2])),
        dict(scale=np.array([1.0, 2.0])),
        dict(window=np.array([1, 2])),
        dict(query_offset=[1, 1]),
        dict(mask=[[True]]),
        dict(bias=3),
    ],
)
def test_attend_takes_what_its_docstring_says(change):
    q = np.zeros((2, 3, 2, 4), np.float32)
    words = refusals(lambda: attend(q, q, q, **change), lambda: torch_ref.kernels.api.attend(*3 * [torch.from_numpy(q)], **change))
    assert all(line.startswith(f"{list(change)[-1]} = ") for line in words)


def test_float64_is_not_cut_to_float32_with_a_warning():
    q = np.zeros((1, 2, 1, 4))
    with pytest.raises(InputError, match=r"^q = 'float64\[1, 2, 1, 4\]': is float64, which needs jax.enable_x64\(True\)"):
        attend(q, q, q)
    with pytest.raises(InputError, match=r"^dtype = 'float64': needs jax.enable_x64\(True\)"):
        EncoderDecoder(EncoderDecoderConfig(7, **SIZES, dtype="float64"), rngs=None)
    with pytest.raises(InputError, match=r"^param_dtype = 'float64': needs jax.enable_x64\(True\)"):
        EncoderDecoder(EncoderDecoderConfig(7, **SIZES, param_dtype="float64"), rngs=None)


@pytest.mark.parametrize(
    ("sizes", "argument"),
    [
        (dict(d_model=10_000_000), "d_model"),
        (dict(num_layers=1_000_000_000), "d_model"),
        (dict(d_ff=2_000_000_000), "d_model"),
        (dict(max_len=2_000_000_000), "d_model"),
        (dict(batch_size=100_000_000), "batch_size"),
    ],
)
def test_what_no_memory_holds_is_refused_before_anything_is_written(sizes, argument, tmp_path):
    training = TrainConfig(batch_size=sizes.pop("batch_size", 4), window=16)
    with pytest.raises(InputError, match=rf"^{argument} = .* GiB, and this device holds "):
        train(dict(d_model=16, num_layers=1) | sizes, training, None, tmp_path / "run", progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "optimizer", [OptimizerConfig(), OptimizerConfig("adam"), OptimizerConfig("sgd"), OptimizerConfig("sgd", momentum=0.0)], ids=lambda o: o.optimizer
)
@pytest.mark.parametrize("config", [GPT, EncoderConfig(), PAIRS, dataclasses.replace(GPT, gated=True, positions="learned", num_kv_heads=1)])
def test_the_memory_of_a_state_is_underestimated_by_little(config, optimizer):
    params = nnx.state(nnx.eval_shape(lambda: new_model(config, 0)), nnx.Param)
    kept = jax.eval_shape(make_optimizer(optimizer, 10).init, params)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, params, kept)))
    table = 4 * config.max_len * config.d_model if config.positions == "sinusoidal" else 0
    assert 0.8 * whole < memory.state_bytes(config, optimizer) - table <= whole


def test_the_parts_of_a_batch_need_the_memory_of_one():
    tokens = int(memory.device_bytes() / memory.step_bytes(GPT, 1) / 2)
    with pytest.raises(InputError, match=f"^batch_size = {16 * tokens}: rows of 1 tokens in 2 parts make a step need at least "):
        memory.check_memory(GPT, TrainConfig(batch_size=16 * tokens, accumulate=2), 1)
    memory.check_memory(GPT, TrainConfig(batch_size=16 * tokens, accumulate=16), 1)


def test_devices_made_of_the_processor_hold_a_state_each_in_one_memory():
    devices = int(memory.device_bytes() / memory.state_bytes(GPT, OptimizerConfig())) + 1
    memory.check_memory(GPT, TrainConfig(batch_size=8), 1)
    with pytest.raises(InputError, match=f"makes parameters, gradients and moments on each of {devices} devices of at least "):
        memory.check_memory(GPT, TrainConfig(batch_size=8), 1, devices)


PAIR_TOKENIZER = PairTokenizer(CharTokenizer("ab"), CharTokenizer("ab"))


@pytest.mark.parametrize("text", [b"ab", None, 3, ["a", "b"], np.array([0, 1])])
@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (CharTokenizer, "characters"),
        (CharTokenizer.from_text, "text"),
        (CharTokenizer("ab").encode, "text"),
        (PAIR_TOKENIZER.encode_source, "source"),
        (PAIR_TOKENIZER.encode_target, "target"),
        (LabelTokenizer(CharTokenizer("ab"), ["0", "1"]).encode, "text"),
    ],
)
def test_a_text_is_a_string(call, argument, text):
    with pytest.raises(InputError, match=f"^{argument} = .*: must be a string, and is of the type {type(text).__name__}"):
        call(text)


def test_a_prompt_is_a_string(models):
    with pytest.raises(InputError, match=r"^prompt = b'a': must be a string"):
        stream(models["gpt"][0], CharTokenizer("abcdefg"), b"a", 3)


@pytest.mark.parametrize("read", [load_corpus, read_table])
@pytest.mark.parametrize("data", [b"text.txt", 3, ["a.txt"]])
def test_data_are_named_by_a_path(read, data):
    with pytest.raises(InputError, match=f"^data = '{type(data).__name__}': must be a path"):
        read(data)


def test_tensors_of_torch_load_whatever_their_dtype():
    config = GPTConfig(7, **SIZES)
    theirs = oracle.torch_model(config, seed=0)
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        ours = oracle.flax_model(config, oracle.torch_weights(theirs))
        state = {name: tensor.to(kind).requires_grad_() for name, tensor in theirs.state_dict().items() if tensor.dtype != torch.bool}
        load_weights(ours, state)
        for name, array in oracle.flax_weights(ours).items():
            if name in state:
                np.testing.assert_array_equal(array, state[name].detach().float().numpy())
    for bad in ("a string", [[1.0], [1.0, 2.0]], torch.zeros(3).to_sparse()):
        with pytest.raises(InputError, match="final_norm"):
            load_weights(ours, state | {"final_norm.bias": bad})


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        (dict(factor=1e-320), "factor"),
        (dict(factor=1e300), "factor"),
        (dict(factor=-1.0), "factor"),
        (dict(scaling="yarn", beta_slow=1e-320), "beta_slow"),
        (dict(scaling="yarn", attention_factor=1e300), "attention_factor"),
        (dict(scaling="llama3", low_freq_factor=1e-320), "low_freq_factor"),
        (dict(base=1e308), "base"),
        (dict(base=1.0), "base"),
    ],
)
def test_scalings_that_no_float_holds_are_refused(options, argument):
    with pytest.raises(InputError, match=f"^{argument} = "):
        RopeConfig(**options)


@given(
    scaling=st.sampled_from(["linear", "dynamic_linear", "ntk", "dynamic_ntk", "yarn", "llama3"]),
    factor=st.sampled_from([1e-9, 0.5, 1.0, 40.0, 1e9]),
    base=st.sampled_from([1.0000000000000002, 10.0, 1e15]),
    slow=st.sampled_from([1e-9, 1.0, 1e8]),
    width=st.sampled_from([4, 64]),
    length=st.sampled_from([1, 7, 2**31 - 1]),
)
def test_every_scaling_that_is_allowed_is_finite(scaling, factor, base, slow, width, length):
    options = dict(beta_slow=slow, beta_fast=1e9, low_freq_factor=slow, high_freq_factor=1e9)
    rope = RopeConfig(scaling=scaling, factor=factor, base=base, trained_len=5, **options)
    config = GPTConfig(7, d_model=width, num_heads=1, positions="rope_half", rope=rope)
    assert np.isfinite(rope_tables.inverse_frequencies(config, length)).all()
    assert math.isfinite(rope_tables.attention_factor(config))


@pytest.mark.parametrize("scaling", ["ntk", "dynamic_ntk"])
def test_a_scaling_of_the_base_needs_a_second_pair(scaling):
    with pytest.raises(InputError, match=r"^d_model = 4: must give a d_model / num_heads above 2"):
        GPTConfig(7, d_model=4, num_heads=2, positions="rope_half", rope=RopeConfig(scaling=scaling, factor=2.0))
