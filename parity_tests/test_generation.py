"""Generation: both packages write the golden tokens and each other's; the cache, the padding and the batch change nothing."""

import dataclasses
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

import flax_gpt.random
import torch_ref.generation.draws
import torch_ref.generation.sampling
import torch_ref.random
from flax_gpt.config import GPTConfig, RopeConfig
from flax_gpt.errors import InputError, RunError
from flax_gpt.generation import draws, sampling
from flax_gpt.generation.cache import init_cache
from flax_gpt.generation.sampling import generate, stream
from flax_gpt.training.tokenizer import CharTokenizer
from flax_gpt.weights.tree import torch_weights
from parity_tests import compare, oracle, tolerances
from parity_tests.report import Report

# Most tests ask for NEW tokens after up to 16 of three rows, so that they share a few compilations.
V, MAX_LEN, NEW = 11, 24, 30
CONFIG = GPTConfig(V, d_model=16, num_heads=2, num_kv_heads=1, num_layers=1, max_len=MAX_LEN, dropout=0.5, attention_dropout=0.5, init="torch")
PROMPTS = np.random.default_rng(0).integers(0, V, (3, 9))
LENGTHS = np.array([9, 3, 6])
TOKENIZER = CharTokenizer("".join(sorted("abc 春天来了。\n!")))
GOLDEN = {
    "minigpt": GPTConfig(37, d_model=32, num_heads=4, num_layers=2, d_ff=64, max_len=16),
    "minigpt_seed_size": GPTConfig(233, d_model=64, num_heads=4, num_layers=3, d_ff=256, max_len=128),
}


@pytest.fixture(scope="module")
def ours():
    """A model that does not repeat itself: uneven weights of the last norm keep the tied head from answering with its input."""
    weights = torch_weights(oracle.flax_model(CONFIG))
    return oracle.flax_model(CONFIG, weights | {"final_norm.weight": np.random.default_rng(1).normal(0, 0.6, 16).astype(np.float32)})


@pytest.fixture(scope="module")
def theirs(ours):
    return oracle.torch_model(CONFIG, torch_weights(ours))


@pytest.fixture(scope="module")
def constant(ours):
    """A model whose logits are all equal."""
    return oracle.flax_model(CONFIG, torch_weights(ours) | {n: np.zeros((V, 16), np.float32) for n in ("token_embed.weight", "lm_head.weight")})


def reference(model, tokens, new, *, seed=0, **options):
    return torch_ref.generation.sampling.generate(model, tokens, new, key=torch_ref.random.key_from_seed(seed), **options).numpy()


def written(model, tokens, new, *, seed=0, **options):
    return generate(model, tokens, new, key=flax_gpt.random.key_from_seed(seed), **options)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_tokens_in_both_frameworks(name):
    file = load_file(Path(__file__).parent / "golden" / f"{name}.safetensors")
    for prefix, prompt, greedy in (("", file["tokens"][:1, :4], "greedy"), ("trained/", file["trained/prompt"][None], "trained/greedy")):
        start = f"{prefix}weights/"
        weights = {key.removeprefix(start): value for key, value in file.items() if key.startswith(start)}
        model, new = oracle.flax_model(GOLDEN[name], weights), len(file["trained/greedy"]) - 4
        assert name == "minigpt" or new + 4 > model.config.max_len  # the window slides
        found = [generate(model, prompt, new, temperature=0, use_cache=use_cache) for use_cache in (True, False)]
        found.append(reference(oracle.torch_model(GOLDEN[name], weights), prompt, new, temperature=0))
        for tokens in found:
            np.testing.assert_array_equal(tokens[:, : len(file[greedy])], file[greedy][None])


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0),
        dict(),
        dict(top_k=4, top_p=0.8, temperature=2.5),
        dict(top_k=0, top_p=1.0, temperature=1.5, eos=7),
        dict(top_k=V + 1, top_p=0.5),
    ],
)
def test_both_frameworks_draw_the_same_tokens_with_and_without_cache(ours, theirs, options):
    """Rows of different lengths, past max_len, so that each row's window begins to slide at a time of its own."""
    want = reference(theirs, PROMPTS, NEW, lengths=LENGTHS, **options)
    for use_cache in (True, False):
        np.testing.assert_array_equal(written(ours, PROMPTS, NEW, lengths=LENGTHS, use_cache=use_cache, **options), want)
    ends = LENGTHS + NEW
    drawn = np.concatenate([row[length:end] for row, length, end in zip(want, LENGTHS, ends, strict=True)])
    assert len(np.unique(drawn)) > V / 2  # the same token for ever would show nothing
    for row, prompt, length, end in zip(want, PROMPTS, LENGTHS, ends, strict=True):
        np.testing.assert_array_equal(row[:length], prompt[:length])
        assert (row[end:] == options.get("eos", 0)).all()
        if "eos" in options:
            new = row[length:end]
            assert 7 in new
            assert (new[np.argmax(new == 7) :] == 7).all()


def test_a_dynamic_scaling_holds_for_the_whole_generation():
    """Two layers, prompts within the trained length, texts far beyond it and beyond the window: rows, cache and packages agree."""
    rope = RopeConfig(scaling="dynamic_ntk", factor=2.0, trained_len=6)
    config = dataclasses.replace(CONFIG, num_layers=2, positions="rope_half", rope=rope)
    norm = {"final_norm.weight": np.random.default_rng(1).normal(0, 0.6, 16).astype(np.float32)}
    model = oracle.flax_model(config, torch_weights(oracle.flax_model(config)) | norm)
    tokens = written(model, PROMPTS, NEW, lengths=LENGTHS)
    assert np.array_equal(tokens, written(model, PROMPTS, NEW, lengths=LENGTHS, use_cache=False))
    assert np.array_equal(tokens, reference(oracle.torch_model(config, torch_weights(model)), PROMPTS, NEW, lengths=LENGTHS))


def test_a_row_of_a_padded_batch_equals_the_row_alone(ours):
    batch = written(ours, PROMPTS, NEW, lengths=LENGTHS, temperature=0)
    dirty = np.where(np.arange(9) < LENGTHS[:, None], PROMPTS, -5)  # what lies in the padding is not even looked at
    np.testing.assert_array_equal(written(ours, dirty, NEW, lengths=LENGTHS, temperature=0), batch)
    for b, length in enumerate(LENGTHS):
        np.testing.assert_array_equal(written(ours, PROMPTS[b : b + 1, :length], NEW, temperature=0)[0], batch[b, : length + NEW])


def test_a_draw_depends_on_key_row_and_position_alone(ours):
    whole = written(ours, PROMPTS[:1], NEW)
    assert (written(ours, PROMPTS, NEW)[:1] == whole).all()  # not on the number of rows
    for cut in (12, MAX_LEN + 1):  # nor on where the prompt ends, within max_len or beyond it
        np.testing.assert_array_equal(written(ours, whole[:, :cut], 27)[:, : 9 + NEW], whole[:, : cut + 27])
    same = written(ours, np.repeat(PROMPTS[:1], 3, axis=0), NEW)
    assert len(np.unique(same, axis=0)) == 3  # but rows differ
    assert (written(ours, PROMPTS[:1], NEW, seed=1) != whole).any()  # and keys
    key = jax.random.key(7)
    np.testing.assert_array_equal(generate(ours, PROMPTS, NEW, key=key), generate(ours, PROMPTS, NEW, key=jax.random.key_data(key)))


def test_one_compilation_serves_every_request_of_a_bucket():
    model = oracle.flax_model(dataclasses.replace(CONFIG, max_len=25))  # a model that no other test has compiled
    before = sampling._start._cache_size(), sampling._advance._cache_size()
    requests = [
        (length, dict(temperature=temperature, top_k=top_k, top_p=top_p, eos=eos))
        for length, temperature, top_k, top_p, eos in ((1, 1.0, 3, None, None), (7, 0.5, None, 0.9, 4), (16, 2.0, 5, 0.2, 0))
    ]
    for length, options in requests:
        for new in (1, 9, 16):
            written(model, np.ones((1, length), np.int32), new, **options)
        list(stream(model, TOKENIZER, "天" * length, 16, every=3, key=jax.random.key(0), **options))
    assert (sampling._start._cache_size(), sampling._advance._cache_size()) == (before[0] + 1, before[1] + 1)


def test_the_loop_neither_copies_nor_gathers_nor_searches_the_cache():
    """In the compiled loop, arrays of the cache's size are carried, written to at one place and read as they lie."""
    model = oracle.flax_model(dataclasses.replace(CONFIG, num_heads=6, num_kv_heads=2, d_model=48, max_len=53), seed=3)
    lengths, before, spans = LENGTHS.astype(np.int32), np.zeros(3, np.int32), np.full(3, 48, np.int32)
    start = sampling._start(model, np.zeros((3, 16), np.int32), lengths, before, spans, room=32, use_cache=True)
    method, rule = draws.read_rule(0, None, None, None, None, V)
    text = sampling._advance.lower(model, start, rule, np.int32(NEW), method=method).compile().as_text()
    found = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w\-]+)\(", text)
    operations = {name for sizes, name in found if math.prod(map(int, sizes.split(","))) == start.cache.keys[0].size}
    assert "get-tuple-element" in operations  # the loop carries it
    assert not {"copy", "transpose", "is-finite", "select", "gather"} & operations, operations
    sampling._advance(model, start, rule, np.int32(NEW), method=method)
    assert start.cache.keys[0].is_deleted()  # donated


def test_nothing_is_dropped_out_and_the_mode_is_restored(ours):
    for use_cache in (True, False):
        model = oracle.flax_model(CONFIG, torch_weights(ours))
        model.train()
        step = int(model.dropout.step[...])
        first, second = (written(model, PROMPTS, NEW, temperature=0, lengths=LENGTHS, use_cache=use_cache) for _ in range(2))
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, written(ours, PROMPTS, NEW, temperature=0, lengths=LENGTHS))
        assert not model.dropout.deterministic
        assert int(model.dropout.step[...]) == step
    other = oracle.torch_model(CONFIG, torch_weights(ours)).train()
    other.blocks[0].eval()
    modes = [module.training for module in other.modules()]
    np.testing.assert_array_equal(reference(other, PROMPTS, NEW, temperature=0, lengths=LENGTHS), first)
    assert [module.training for module in other.modules()] == modes
    assert len(set(modes)) == 2


def test_equal_logits_give_the_lowest_id(constant):
    for options in (dict(temperature=0), dict(top_k=1), dict(top_p=1e-6)):
        assert (written(constant, PROMPTS, NEW, **options)[:, 9:] == 0).all()
    tied = np.array([[1.0, 3.0, 3.0, 2.0, 3.0]], np.float32)
    for top_k, kept in ((1, [1]), (2, [1, 2]), (4, [1, 2, 3, 4])):
        for filtered in (
            draws.filter_logits(jnp.asarray(tied), top_k, 2.0),
            torch_ref.generation.draws.filter_logits(torch.tensor(tied), top_k, 2.0),
        ):
            assert np.flatnonzero(np.isfinite(np.asarray(filtered)[0])).tolist() == kept


@given(
    logits=st.lists(st.integers(-40, 40), min_size=7, max_size=7).map(lambda x: np.array([x], np.float32) / 8),
    top_k=st.integers(1, 9),
    top_p=st.integers(1, 63).map(lambda n: n / 64),
)
def test_filters_keep_the_smallest_set_that_reaches_p(logits, top_k, top_p):
    order = sorted(range(logits.size), key=lambda i: (-logits[0, i], i))[:top_k]
    weights = np.exp(logits[0, order].astype(np.float64))
    before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
    kept = sorted(i for i, mass in zip(order, before, strict=True) if mass < top_p)
    unsure = (np.abs(before - top_p) <= tolerances.mass_error(logits.size)).any()  # rounding decides: any of the two sets is right
    for filtered in (
        draws.filter_logits(jnp.asarray(logits), top_k, top_p),
        torch_ref.generation.draws.filter_logits(torch.tensor(logits), top_k, top_p),
    ):
        filtered = np.asarray(filtered)[0]
        finite = np.isfinite(filtered)
        assert (filtered[finite] == logits[0, finite]).all()
        assert unsure or np.flatnonzero(finite).tolist() == kept
        assert finite[order[0]]


def test_a_set_that_reaches_p_exactly_is_not_enlarged():
    """Four equal tokens, exact quarters: at p = ½ two are enough, just above it the third is needed; a p that float32 flushes keeps one."""
    logits = np.array([[0.0, -np.inf, 0.0, 0.0, 0.0]], np.float32)
    for top_p, count in ((0.25, 1), (0.5, 2), (0.5000001, 3), (1e-40, 1)):
        for filtered in (
            draws.filter_logits(jnp.asarray(logits), 5, np.float32(top_p)),
            torch_ref.generation.draws.filter_logits(torch.tensor(logits), 5, top_p),
        ):
            assert np.isfinite(np.asarray(filtered)).sum() == count, top_p


def test_draws_follow_the_softmax():
    """Pearson's statistic over 40,000 draws lies within six standard deviations of its mean, the degrees of freedom (Pearson 1900)."""
    logits = np.array([2.0, 0.0, -1.0, 1.0, -np.inf, 0.5], np.float32)
    rows = 40_000
    _, rule = draws.read_rule(1.0, None, None, None, flax_gpt.random.key_from_seed(5), 6)
    keys = draws.row_keys(rule, rows)
    draw = jax.jit(draws.draw, static_argnums=1)
    tokens = np.asarray(draw(jnp.broadcast_to(logits, (rows, 6)), "plain", rule, keys, jnp.full(rows, 17)))
    expected = rows * np.exp(logits) / np.exp(logits).sum()
    seen = np.bincount(tokens, minlength=6)
    assert seen[4] == 0
    possible = expected > 0
    statistic = float(np.sum((seen[possible] - expected[possible]) ** 2 / expected[possible]))
    freedom = possible.sum() - 1
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom)
    noise = np.asarray(draws.gumbel(keys, 6))
    assert np.isfinite(noise).all()  # so that the last token left by a filter is drawn


def test_the_loop_ends_when_every_row_has_drawn_eos(constant):
    """All logits are equal, so the greedy token is 0 at once."""
    assert list(stream(constant, TOKENIZER, "天", NEW, samples=3, every=1, temperature=0, eos=0)) == [("", "", "")]
    assert (generate(constant, PROMPTS, NEW, temperature=0, eos=0)[:, 9:] == 0).all()


def test_streamed_pieces_are_the_generated_text(ours):
    prompt, key = "春天 a", jax.random.key(3)
    ids = TOKENIZER.encode(prompt)
    for eos in (None, 2):
        parts = list(stream(ours, TOKENIZER, prompt, NEW, samples=3, every=7, key=key, eos=eos))
        rows = generate(ours, np.repeat(ids[None], 3, axis=0), NEW, key=key, eos=eos)[:, len(ids) :]
        texts = [TOKENIZER.decode(row if eos is None or eos not in row else row[: np.argmax(row == eos)]) for row in rows]
        assert ["".join(pieces) for pieces in zip(*parts, strict=True)] == texts
        assert all(len(piece) <= 7 for pieces in parts for piece in pieces)
    assert len(parts) > 1
    assert len(list(stream(ours, TOKENIZER, prompt, NEW, every=7, key=key))) == 5


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_cached_logits_are_those_of_the_whole_sequence(dtype):
    """Prefill of a padded batch, a chunk of three, then single tokens, against the plain forward pass of the other framework in float64."""
    config = dataclasses.replace(CONFIG, num_heads=4, num_kv_heads=2, num_layers=2)
    ours = oracle.flax_model(config)
    truth_model = oracle.in_float64(oracle.torch_model(config, torch_weights(ours)))
    tokens = np.random.default_rng(1).integers(0, V, (3, MAX_LEN))

    def whole():
        with torch.no_grad():
            return {"logits": truth_model(torch.from_numpy(tokens))[0].numpy()}

    with jax.enable_x64(dtype == "float64"):
        model = oracle.flax_model(config, torch_weights(ours), dtype=dtype)
        found = np.zeros((3, MAX_LEN, V), dtype)
        padded = np.where(np.arange(9) < LENGTHS[:, None], tokens[:, :9], 0)
        graph, state = nnx.split(model)
        step = jax.jit(lambda tokens, cache: nnx.merge(graph, state, copy=True).step(tokens, cache))
        logits, cache = step(padded.astype(np.int32), init_cache(model.config, 3))
        filled = LENGTHS.copy()
        for b in range(3):
            found[b, : LENGTHS[b]] = logits[b, : LENGTHS[b]]
        cache = cache._replace(lengths=jnp.asarray(filled, jnp.int32))
        for size in [3] + [1] * 12:
            places = filled[:, None] + np.arange(size)
            logits, cache = step(np.take_along_axis(tokens, places, axis=1).astype(np.int32), cache)
            np.put_along_axis(found, places[..., None], np.asarray(logits), axis=1)
            filled += size
    end = filled.min()
    truth = {name: value[:, :end] for name, value in whole().items()}
    deviations = {name: value[:, :, :end] for name, value in tolerances.scatter(whole).items()}
    report = Report()
    compare.judge(report, dtype, {"cached": {"logits": found[:, :end]}}, truth, deviations)
    assert report.ok, report


def test_whatever_does_not_fit_is_refused_in_both(ours, theirs):
    fits = dict(tokens=[[1, 2]], max_new_tokens=3, temperature=0)
    cases = [
        (dict(tokens=np.zeros((2, 0), int)), "tokens = [2, 0]: must have the shape (B, T), both at least 1"),
        (dict(tokens=np.zeros((0, 2), int)), "tokens = [0, 2]: must have the shape (B, T), both at least 1"),
        (dict(tokens=[1, 2]), "tokens = [2]: must have the shape (B, T), both at least 1"),
        (dict(tokens=np.array([[1.0, 2.0]])), "tokens = 'float64': must be integers"),
        (dict(tokens=np.array([[True]])), "tokens = 'bool': must be integers"),
        (dict(tokens=[[1, V]]), f"tokens = {V}: must lie in [0, vocab_size = {V})"),
        (dict(tokens=[[1, -1]]), f"tokens = -1: must lie in [0, vocab_size = {V})"),
        (dict(max_new_tokens=-1), "max_new_tokens = -1: must be an integer of at least 0"),
        (dict(max_new_tokens=2.0), "max_new_tokens = 2.0: must be an integer of at least 0"),
        (dict(max_new_tokens=MAX_LEN - 1, overflow="error"), "max_new_tokens = 23: must be at most 22 after 2 tokens: max_len = 24"),
        (dict(tokens=np.ones((1, 30), int), overflow="error"), "max_new_tokens = 3: must be at most 0 after 30 tokens: max_len = 24"),
        (dict(overflow="wrap"), "overflow = 'wrap': must be 'slide' or 'error'"),
        (dict(temperature=-0.5), "temperature = -0.5: must be 0 (greedy) or at least 1e-6"),
        (dict(temperature=float("nan")), "temperature = nan: must be a finite number"),
        (dict(temperature="hot"), "temperature = 'hot': must be a number"),
        (dict(top_k=-1), "top_k = -1: must be at least 0"),
        (dict(top_k=2.5), "top_k = 2.5: must be an integer or None"),
        (dict(top_p=0), "top_p = 0: must lie in (0, 1]"),
        (dict(top_p=1.5), "top_p = 1.5: must lie in (0, 1]"),
        (dict(eos=V), f"eos = {V}: must be an id in [0, vocab_size = {V})"),
        (dict(lengths=[3]), "lengths = 3: must lie in [1, T = 2]"),
        (dict(lengths=[0]), "lengths = 0: must lie in [1, T = 2]"),
        (dict(lengths=[1, 1]), "lengths = [2]: must have the shape (B,) = (1,)"),
    ]
    for change, message in cases:
        arguments = fits | change
        for function, model in ((generate, ours), (torch_ref.generation.sampling.generate, theirs)):
            with pytest.raises(InputError) as caught:
                function(model, **arguments)
            assert str(caught.value) == message
    for function, model in ((generate, ours), (torch_ref.generation.sampling.generate, theirs)):
        with pytest.raises(InputError, match=r"^key = None: is required when temperature is above 0"):
            function(model, [[1, 2]], 3)
        with pytest.raises(InputError, match=r"^key = "):
            function(model, [[1, 2]], 3, key=np.zeros(3, np.float32))
    with pytest.raises(InputError, match=r"one key of jax\.random"):
        generate(ours, [[1, 2]], 3, key=jax.random.split(jax.random.key(0)))


def test_a_module_that_is_no_tree_is_refused(ours):
    class Opaque(nnx.Module, pytree=False):
        def __init__(self):
            self.config = ours.config

    with pytest.raises(InputError, match="model = 'Opaque': must be a module that jax can take apart"):
        generate(Opaque(), PROMPTS, NEW, temperature=0)


def test_what_just_fits_is_not_refused(ours, theirs):
    for function, model in ((generate, ours), (torch_ref.generation.sampling.generate, theirs)):
        assert function(model, [[1, 2]], MAX_LEN - 2, temperature=0, overflow="error").shape == (1, MAX_LEN)
        np.testing.assert_array_equal(function(model, [[1, 2]], 0, temperature=0), [[1, 2]])
    for tokens in (PROMPTS.astype(np.uint8), jnp.asarray(PROMPTS, jnp.int32), PROMPTS.tolist()):
        np.testing.assert_array_equal(generate(ours, tokens, NEW, temperature=0), generate(ours, PROMPTS, NEW, temperature=0))


def test_stream_refuses_at_the_call(ours):
    for change, name in (
        (dict(prompt=""), "prompt"),
        (dict(prompt="é"), "prompt"),
        (dict(samples=0), "samples"),
        (dict(every=0), "every"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(top_p=2.0), "top_p"),
        (dict(max_new_tokens=MAX_LEN, overflow="error"), "max_new_tokens"),
        (dict(tokenizer=CharTokenizer("ab")), "tokenizer"),
    ):
        arguments = dict(tokenizer=TOKENIZER, prompt="a", max_new_tokens=3, temperature=0) | change
        with pytest.raises(InputError, match=f"^{name} = "):
            stream(ours, **arguments)


def test_logits_that_are_not_finite_end_the_run(ours):
    for use_cache in (True, False):
        broken = oracle.flax_model(CONFIG, torch_weights(ours) | {"final_norm.bias": np.full(16, np.nan, np.float32)})
        with pytest.raises(RunError, match="new token 1 are not finite"):
            generate(broken, PROMPTS, NEW, temperature=0, lengths=LENGTHS, use_cache=use_cache)
    with pytest.raises(RunError, match="not finite"):
        torch_ref.generation.sampling.generate(oracle.torch_model(CONFIG, torch_weights(broken)), PROMPTS, 3, temperature=0)
