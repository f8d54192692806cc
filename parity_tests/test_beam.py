"""Beam search: equal to an exhaustive search on tiny vocabularies, to the plain form in torch, and to itself without the cache."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref.generation.beam
import torch_ref.models.encoder_decoder
import torch_ref.models.gpt
from flax_gpt.config import BeamConfig, EncoderDecoderConfig, GPTConfig, RopeConfig
from flax_gpt.errors import InputError, RunError
from flax_gpt.generation import beam
from flax_gpt.generation.beam import beam_search
from flax_gpt.generation.sampling import generate
from flax_gpt.models.encoder_decoder import EncoderDecoder
from flax_gpt.models.gpt import MiniGPT
from flax_gpt.weights import tree
from parity_tests import compare

SIZES = dict(d_model=16, num_heads=2, num_layers=1, num_kv_heads=1, dropout=0.3, init="torch")
TRANSLATE = EncoderDecoderConfig(5, source_vocab_size=7, max_len=14, **SIZES)
WRITE = GPTConfig(6, max_len=20, **SIZES)
DYNAMIC = RopeConfig(scaling="dynamic_ntk", trained_len=6)
TOKENS = np.random.default_rng(0).integers(0, 6, (3, 7))
LENGTHS = np.array([7, 2, 5])
EOS = 2
NEW = 9
BEAMS = dict(beams=3, n_best=3)


def pair(config, dtype):
    """The same weights in both packages, in train mode. Uneven final norms keep the tied head from answering with its input."""
    kinds = (EncoderDecoder, torch_ref.models.encoder_decoder.EncoderDecoder) if config.vocab_size == 5 else (MiniGPT, torch_ref.models.gpt.MiniGPT)
    torch.manual_seed(0)
    weights = {name: tensor.numpy() for name, tensor in kinds[1](config).state_dict().items()}
    for name in weights.keys() & {"decoder_norm.weight", "final_norm.weight"}:
        weights[name] = np.random.default_rng(3).normal(0, 0.5, weights[name].shape).astype(np.float32)
    config = type(config).from_dict(config.to_dict() | dict(dtype=dtype, param_dtype=dtype))
    theirs = kinds[1](config)
    theirs.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    with jax.enable_x64(dtype == "float64"):
        ours = kinds[0](config, rngs=nnx.Rngs(0))
        tree.load_weights(ours, weights)
    return ours, theirs


@pytest.fixture(scope="module")
def models():
    return {(config, dtype): pair(config, dtype) for config in (TRANSLATE, WRITE) for dtype in ("float64", "float32")}


def ours(model, *arguments, **options):
    with jax.enable_x64(model.config.dtype == "float64"), jax.default_matmul_precision("highest"):
        return beam_search(model, *arguments, **options)


def eos_of(config):
    return {} if config is TRANSLATE else {"eos": EOS}


def same_tokens(found, wanted):
    np.testing.assert_array_equal(found.lengths, wanted.lengths)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)


def scores(found):
    return {"scores": np.asarray(found.scores), "log_probs": np.asarray(found.log_probs)}


# The search itself


@pytest.mark.parametrize("config", [TRANSLATE, WRITE], ids=["translation", "gpt"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_wide_beams_find_what_an_exhaustive_search_finds(models, config, use_cache):
    """With as many beams as there are candidates nothing is cut off, so that the n best are the n best of all sequences."""
    V, until, eos = config.vocab_size, 3, EOS
    every = [
        list(y) for n in range(1, until + 1) for y in itertools.product(range(V), repeat=n) if eos not in y[:-1] and (y[-1] == eos or n == until)
    ]
    beams = (V - 1) ** (until - 1) * V
    row, length = TOKENS[1:2], int(LENGTHS[1])
    model, theirs = models[config, "float64"]
    with torch.no_grad():
        fed = torch.tensor([([1] if config is TRANSLATE else row[0, :length].tolist()) + (y + [0] * until)[:until] for y in every])
        theirs.eval()
        logits = theirs(torch.tensor(row[:, :length]).expand(len(every), -1), fed)[0] if config is TRANSLATE else theirs(fed)[0]
    log_probs = torch.log_softmax(logits, -1).numpy()[:, (0 if config is TRANSLATE else length - 1) :]
    log_probs = np.array([sum(rows[i, token] for i, token in enumerate(y)) for y, rows in zip(every, log_probs, strict=True)])
    for exponent in (0.0, 1.0, 2.5, -0.7):
        scores = log_probs / np.array([len(y) for y in every]) ** exponent
        order = np.argsort(-scores, kind="stable")[:beams]
        options = dict(beams=beams, n_best=beams, early_stopping="never", length_exponent=exponent) | eos_of(config)
        found = ours(model, row, until, lengths=LENGTHS[1:2], use_cache=use_cache, **options)
        assert [y[:n].tolist() for y, n in zip(found.tokens[0], found.lengths[0], strict=True)] == [every[i] for i in order]


@pytest.mark.parametrize("config", [TRANSLATE, WRITE], ids=["translation", "gpt"])
def test_a_narrow_search_equals_the_plain_one(models, config):
    """The tokens are equal in float64, with the cache and without; scores and log probabilities are within the rounding of each dtype."""
    request = dict(lengths=LENGTHS, **BEAMS, **eos_of(config))
    plain = lambda dtype: torch_ref.generation.beam.beam_search(models[config, dtype][1], TOKENS, NEW, **request)
    found = ours(models[config, "float64"][0], TOKENS, NEW, **request)
    same_tokens(found, plain("float64"))
    same_tokens(ours(models[config, "float64"][0], TOKENS, NEW, use_cache=False, **request), found)
    report = compare.check_programs(
        lambda dtype: scores(found if dtype == "float64" else ours(models[config, dtype][0], TOKENS, NEW, **request)),
        lambda dtype: scores(plain(dtype)),
    )
    assert report.ok, report.failures()
    assert len(np.unique(found.lengths)) > 1  # some end, at different places
    for hypotheses, n in zip(found.tokens, found.lengths, strict=True):
        for tokens, length in zip(hypotheses, n, strict=True):
            assert (tokens[: length - 1] != EOS).all()
            assert length == NEW or tokens[length - 1] == EOS
            assert (tokens[length:] == (TRANSLATE.pad if config is TRANSLATE else EOS)).all()


@pytest.mark.parametrize(
    "options",
    [
        dict(early_stopping=True, length_exponent=1.5),
        dict(early_stopping="never", length_exponent=-0.5),
        dict(early_stopping="never", length_exponent=2.0),
        dict(no_repeat_ngram=1, length_exponent=0.0),
        dict(no_repeat_ngram=2),
    ],
)
def test_every_option_equals_the_plain_search(models, options):
    for config in (WRITE,) if "no_repeat_ngram" in options else (TRANSLATE,):
        model, theirs = models[config, "float64"]
        arguments = (TOKENS, 4 if options.get("no_repeat_ngram") == 1 else NEW)
        found = ours(model, *arguments, lengths=LENGTHS, **BEAMS, **eos_of(config), **options)
        same_tokens(found, torch_ref.generation.beam.beam_search(theirs, *arguments, lengths=LENGTHS, **BEAMS, **eos_of(config), **options))
        n = options.get("no_repeat_ngram", 0)
        for b, (hypotheses, lengths) in enumerate(zip(found.tokens, found.lengths, strict=True)):
            for tokens, length in zip(hypotheses, lengths, strict=True):
                whole = ([1] if config is TRANSLATE else TOKENS[b, : LENGTHS[b]].tolist()) + tokens[:length].tolist()
                first = 0 if config is TRANSLATE else LENGTHS[b]
                grams = [tuple(whole[i : i + n]) for i in range(len(whole) - n + 1)] if n else []
                assert all(gram not in grams[:i] for i, gram in enumerate(grams) if i + n > first)


def test_the_last_row_and_the_other_rows_change_nothing(models):
    """Neither does what lies in the padding."""
    model = models[WRITE, "float64"][0]
    whole = ours(model, np.where(np.arange(7) < LENGTHS[:, None], TOKENS, -5), NEW, lengths=LENGTHS, eos=EOS, **BEAMS)
    for b, length in enumerate(LENGTHS):
        same_tokens(ours(model, TOKENS[b : b + 1, :length], NEW, eos=EOS, **BEAMS), beam.Hypotheses(*(x[b : b + 1] for x in whole)))


def test_one_beam_is_greedy(models):
    model = models[WRITE, "float64"][0]
    with jax.enable_x64(True):
        text = generate(model, TOKENS, NEW, lengths=LENGTHS, temperature=0, eos=EOS)
    found = ours(model, TOKENS, NEW, lengths=LENGTHS, beams=1, eos=EOS)
    for row, length, tokens in zip(text, LENGTHS, found.tokens[:, 0], strict=True):
        np.testing.assert_array_equal(row[length : length + NEW], tokens)
    model, theirs = models[TRANSLATE, "float64"]
    found = ours(model, TOKENS, lengths=LENGTHS, beams=1, early_stopping="never")
    theirs.eval()
    for b, length in enumerate(LENGTHS):
        target = [TRANSLATE.bos]
        while len(target) <= TRANSLATE.max_len and target[-1] != EOS:
            with torch.no_grad():
                target.append(int(theirs(torch.tensor(TOKENS[b : b + 1, :length]), torch.tensor([target]))[0][0, -1].argmax()))
        assert found.tokens[b, 0, : found.lengths[b, 0]].tolist() == target[1:]


@pytest.mark.parametrize("config", [TRANSLATE, WRITE], ids=["translation", "gpt"])
def test_the_cache_stays_consistent_when_dynamic_scaling_passes_the_trained_length(config):
    model, theirs = pair(type(config).from_dict(config.to_dict() | dict(positions="rope_half", rope=DYNAMIC)), "float64")
    options = dict(lengths=LENGTHS, **BEAMS, **eos_of(config))
    wanted = torch_ref.generation.beam.beam_search(theirs, TOKENS, NEW, **options)
    for use_cache in (True, False):
        same_tokens(ours(model, TOKENS, NEW, use_cache=use_cache, **options), wanted)


def test_equals_rank_by_parent_and_id(models):
    """A model without preferences: the first tokens win, and every hypothesis that ends ties with the others of its length."""
    model, theirs = pair(WRITE, "float64")
    weights = tree.torch_weights(model)
    with jax.enable_x64(True):
        tree.load_weights(model, weights | {name: np.zeros_like(weights[name]) for name in ("token_embed.weight", "lm_head.weight")})
    theirs.load_state_dict({name: torch.from_numpy(array) for name, array in tree.torch_weights(model).items()})
    options = dict(beams=3, n_best=3, early_stopping="never")
    found = ours(model, TOKENS[:1], 3, **options)
    assert found.tokens[0].tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]
    same_tokens(torch_ref.generation.beam.beam_search(theirs, TOKENS[:1], 3, **options), found)


# Early stopping, by hand: the plain search over a table of probabilities


def follow(table):
    """Probabilities of e, a and b by what stands before; the rest goes evenly to tokens that lead nowhere."""

    def log_probs(hypotheses):
        rows = [table.get("".join("eab".ljust(100, "?")[t] for t in tokens[1:]), [0.001, 0.001, 0.001]) for tokens in hypotheses]
        return torch.log(torch.tensor([[*row, *[(1 - sum(row)) / 97] * 97] for row in rows], dtype=torch.float64))

    return log_probs


TABLE = {"": [0.5, 0.3, 0.1], "a": [0.3, 0.6, 0.001], "aa": [0.9, 0.05, 0.001]}
TABLE |= {"a" * n: [1e-6, 1 - 1e-4, 1e-6] for n in range(3, 11)} | {"a" * 11: [1 - 1e-4, 1e-6, 1e-6]}
MEANINGS = [(True, 2, "e"), (False, 3, "aae"), ("never", 12, "aaaaaaaaaaae")]


@pytest.mark.parametrize(("early_stopping", "steps", "best"), MEANINGS)
def test_early_stopping_has_its_three_published_meanings(early_stopping, steps, best):
    """Two beams, scores log P / length.

    After two steps e (-0.69) and ae (-1.20) have ended, and aa, ended now, would score ln(0.18) / 2 = -0.86: False goes on. After three aae (-0.61)
    has ended, and aaa would score ln(0.009) / 3 = -1.57: False stops; over 12 tokens it could reach -0.39: "never" goes on, and rightly.
    """
    seen = []

    def watched(hypotheses):
        seen.append(len(hypotheses[0]))
        return follow(TABLE)(hypotheses)

    found = torch_ref.generation.beam._search(watched, [9], 12, BeamConfig(2, 1, 1.0, early_stopping), 0)
    assert "".join("eab"[t] for t in found[0].tokens[1:]) == best
    assert seen[-1] == steps


class TableModel(nnx.Module):
    """A language model that is a table: log probabilities (L, V, V) of the next token by position and last token."""

    def __init__(self, log_probs):
        self.config = GPTConfig(log_probs.shape[1], d_model=2, num_heads=1, num_layers=1, max_len=len(log_probs))
        self.table = nnx.Param(jnp.asarray(log_probs, jnp.float32))

    def __call__(self, tokens, *, span=None):
        return self.table[...][jnp.arange(tokens.shape[1]), tokens], None

    def step(self, tokens, cache, *, empty=False):
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        return self.table[...][positions, tokens], cache._replace(lengths=cache.lengths + tokens.shape[1])


@pytest.mark.parametrize(("early_stopping", "steps", "best"), MEANINGS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_the_compiled_search_stops_where_the_plain_one_does(early_stopping, steps, best, use_cache, monkeypatch):
    """The same table as above, by position and last token: what begins otherwise leads nowhere."""
    dead = np.concatenate([np.full(3, 0.001), np.full(97, 0.997 / 97)])
    probabilities = np.tile(dead, (13, 100, 1))
    for prefix, row in TABLE.items():
        last = 1 if prefix else 9
        probabilities[len(prefix), last] = [*row, *[(1 - sum(row)) / 97] * 97]
    states, search = [], beam._search
    monkeypatch.setattr(beam, "_search", lambda *arguments, **options: states.append(search(*arguments, **options)) or states[-1])
    options = dict(beams=2, early_stopping=early_stopping, eos=0, use_cache=use_cache)
    found = beam_search(TableModel(np.log(probabilities)), [[9]], 12, **options)
    assert "".join("eab"[t] for t in found.tokens[0, 0, : found.lengths[0, 0]]) == best
    assert int(states[0].made) == steps


def test_a_longer_search_never_finds_less(models):
    """What has ended does not steer the beams, so that the three meanings are ordered; each must make a difference somewhere."""
    model = models[TRANSLATE, "float64"][0]
    draws = np.random.default_rng(5)
    requests = [(draws.integers(0, 7, (3, 7)), draws.integers(1, 8, 3)) for _ in range(20)]

    def best(meaning):
        options = dict(length_exponent=1.5, early_stopping=meaning, **BEAMS)
        return np.concatenate([ours(model, sources, NEW, lengths=lengths, **options).scores for sources, lengths in requests])

    scores = [best(meaning) for meaning in (True, False, "never")]
    assert (scores[0] <= scores[1]).all()
    assert (scores[1] <= scores[2]).all()
    assert (scores[0] < scores[2]).any()


# How it is computed


def test_the_memory_is_not_copied_for_the_beams():
    """In the compiled program no array of B · K rows has the source's length."""
    model = EncoderDecoder(TRANSLATE, rngs=nnx.Rngs(0))
    rule = beam.Rule(np.int32(NEW), np.int32(EOS), np.int32(1), np.float32(1))
    sizes = {}
    for use_cache in (True, False):
        plan = BeamConfig(beams=5)
        traced = beam._search.trace(model, np.zeros((3, 13), np.int32), LENGTHS, rule, plan=plan, room=10, use_cache=use_cache)
        sizes[use_cache] = "[15,13," in str(traced.jaxpr)
    assert sizes == {True: False, False: True}


def test_one_compilation_serves_every_request_of_a_size(models):
    model = models[TRANSLATE, "float32"][0]
    beam_search(model, TOKENS, 9, lengths=LENGTHS, **BEAMS)
    before = beam._search._cache_size()
    beam_search(model, TOKENS[:, :4], 5, lengths=[1, 4, 2], beams=3, n_best=2, length_exponent=0.1)
    beam_search(model, TOKENS, 12, beams=3)
    assert beam._search._cache_size() == before


# What is refused


@pytest.mark.parametrize(
    ("config", "change", "argument"),
    [
        (TRANSLATE, dict(beams=0), "beams"),
        (TRANSLATE, dict(beams=-1), "beams"),
        (TRANSLATE, dict(beams=2.0), "beams"),
        (TRANSLATE, dict(beams=True), "beams"),
        (TRANSLATE, dict(beams=10**9), "beams"),
        (WRITE, dict(beams=2**31 // WRITE.vocab_size + 1), "beams"),
        (TRANSLATE, dict(beams=2, n_best=3), "n_best"),
        (TRANSLATE, dict(n_best=0), "n_best"),
        (TRANSLATE, dict(early_stopping="always"), "early_stopping"),
        (TRANSLATE, dict(length_exponent=math.nan), "length_exponent"),
        (TRANSLATE, dict(no_repeat_ngram=-1), "no_repeat_ngram"),
        (TRANSLATE, dict(max_new_tokens=15), "max_new_tokens"),
        (TRANSLATE, dict(max_new_tokens=0), "max_new_tokens"),
        (TRANSLATE, dict(tokens=np.zeros((2, 0), np.int32)), "tokens"),
        (TRANSLATE, dict(tokens=np.zeros((0, 3), np.int32)), "tokens"),
        (TRANSLATE, dict(tokens=np.zeros((1, 15), np.int32)), "tokens"),
        (TRANSLATE, dict(tokens=[[7]]), "tokens"),
        (TRANSLATE, dict(tokens=[[-1]]), "tokens"),
        (TRANSLATE, dict(tokens=np.array([[0.5]])), "tokens"),
        (TRANSLATE, dict(lengths=[0, 1, 1]), "lengths"),
        (TRANSLATE, dict(lengths=[8, 1, 1]), "lengths"),
        (TRANSLATE, dict(eos=3), "eos"),
        (WRITE, dict(eos=6), "eos"),
        (WRITE, dict(max_new_tokens=14), "max_new_tokens"),
        (WRITE, dict(tokens=np.zeros((1, 20), np.int32), max_new_tokens=None), "tokens"),
    ],
)
def test_both_packages_refuse_in_the_same_words(models, config, change, argument):
    arguments = dict(tokens=TOKENS, max_new_tokens=4) | change
    refusals = []
    for function, model in zip((beam_search, torch_ref.generation.beam.beam_search), models[config, "float32"], strict=True):
        with pytest.raises(InputError) as refused:
            function(model, **arguments)
        refusals.append(str(refused.value))
        assert refused.value.argument == argument
    assert refusals[0] == refusals[1]


def test_more_beams_than_memory_holds_are_refused(models):
    model, _ = models[TRANSLATE, "float32"]
    with pytest.raises(InputError, match=r"^beams = 200000000: hypotheses for each of \d rows need at least .* GiB, and this device holds "):
        beam_search(model, TOKENS, 5, beams=200_000_000)
    beam_search(model, TOKENS, 5, beams=2_000)


def test_what_cannot_be_continued_and_what_is_not_finite_fail(models):
    for dtype, side, function in (("float32", 0, beam_search), ("float32", 1, torch_ref.generation.beam.beam_search)):
        with pytest.raises(RunError, match="row 0 has no continuation of 7 tokens"):
            function(models[WRITE, dtype][side], [[0]], 7, beams=3, no_repeat_ngram=1)
    model, theirs = pair(TRANSLATE, "float32")
    model.target_embed.embedding[...] = model.target_embed.embedding[...] * np.nan
    theirs.target_embed.weight.data *= math.nan
    for function, broken in ((beam_search, model), (torch_ref.generation.beam.beam_search, theirs)):
        with pytest.raises(RunError, match="not finite"):
            function(broken, TOKENS, 9, **BEAMS)
