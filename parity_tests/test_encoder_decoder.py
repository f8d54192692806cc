"""The encoder-decoder: equal in both packages and to torch.nn's own layers; its cache, its pairs, and the runs that train it."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import torch_ref.nn.block
import torch_ref.training.loss
from flax_gpt.config import EncoderDecoderConfig, OptimizerConfig, TrainConfig
from flax_gpt.corpus import make_dates, make_majority
from flax_gpt.errors import InputError
from flax_gpt.figures import attention, cross_attention
from flax_gpt.generation.cache import init_cache
from flax_gpt.generation.translate import translate
from flax_gpt.training.loop import evaluate, load_run, train
from flax_gpt.training.loss import cross_entropy
from flax_gpt.training.pairs import EOS, PairTokenizer, encode_pairs, pair_loss
from flax_gpt.training.table import Shuffled, Table, read_table, split_rows
from flax_gpt.training.tokenizer import CharTokenizer
from parity_tests import compare, run_parity
from parity_tests import translation_oracle as oracle

SIZES = dict(source_vocab_size=11, d_model=16, num_heads=4, num_layers=1, d_ff=24, max_len=9)
PRE = EncoderDecoderConfig(7, **SIZES, num_kv_heads=2, dropout=0.2, attention_dropout=0.1)
POST = EncoderDecoderConfig(7, **SIZES, norm_placement="post", activation="relu", attention_bias=True, positions="learned", init="torch")
ROPE = EncoderDecoderConfig(
    7, **SIZES, positions="rope_half", norm="rms_norm", activation="silu", gated=True, feed_forward_bias=False, scale_embeddings=False, num_kv_heads=1
)


def table(*rows: tuple[str, str]) -> Table:
    return Table(tuple(rows), tuple(range(1, len(rows) + 1)), "test", "0")


def batch() -> Any:
    """Three pairs of different lengths and a row that is none, padded to 9; a target holds the ids of pad, bos and eos as real tokens."""
    draws = np.random.default_rng(0)
    source, target, labels = draws.integers(0, 11, (4, 9)), draws.integers(0, 7, (4, 9)), draws.integers(0, 7, (4, 9))
    labels[0, :3] = 0, 1, 2
    lengths = np.array([9, 4, 6, 0]), np.array([8, 9, 2, 0])
    weights = np.arange(9) < lengths[1][:, None]
    integers = (x.astype(np.int32) for x in (source, lengths[0], target, lengths[1], labels))
    return oracle.PairBatch(*integers, weights.astype(np.float32))


# The model


@pytest.mark.parametrize(
    ("config", "smoothing", "dropout"),
    [(PRE, 0.1, True), (POST, 0.3, False)],
    ids=["dropout", "post"],
)
def test_both_packages_compute_the_same(config, smoothing, dropout):
    key = np.array([5, 7], np.uint32) if dropout else None
    report = oracle.check(oracle.Case(config, oracle.new_weights(config), batch(), smoothing, key))
    assert report.ok, report.failures()
    names = {row.name for row in report.rows}
    last = config.num_layers - 1
    assert {f"{kind}/{last}" for kind in oracle.KINDS} | {
        "logits",
        "grads/target_embed.weight",
        f"weights/encoder_blocks.{last}.norm2.weight",
    } <= names


FAULTS = {
    "an epsilon in the decoder": (
        lambda model: setattr(model.decoder_blocks[0].norm2, "eps", 1e-3),
        "taps/decoder_blocks.0.norm2",
        "epsilon: ours is a layer norm with epsilon 1e-05, theirs is a layer norm with epsilon 0.001",
    ),
    "an activation in the encoder": (
        lambda model: setattr(model.encoder_blocks[0].feed_forward, "activation", "relu"),
        "taps/encoder_blocks.0.feed_forward:activation",
        "activation: ours is the exact (erf) GELU, theirs ReLU",
    ),
    "a memory twice as large": (
        lambda model: model.decoder_blocks[0].cross_attention.register_forward_pre_hook(lambda module, args: (args[0], 2 * args[1])),
        "taps/decoder_blocks.0.cross_attention.key:input",
        "scale: ours is 0.5 (1/√4) times theirs",
    ),
}


@pytest.mark.parametrize("fault", [None, "a memory twice as large", *(pytest.param(name, marks=pytest.mark.slow) for name in list(FAULTS)[:2])])
def test_the_taps_name_the_first_value_that_differs(fault, monkeypatch):
    change, first, told = FAULTS.get(fault, (lambda model: None, None, None))
    sound = oracle.torch_model

    def changed(case, dtype="float32"):
        model = sound(case, dtype)
        change(model)
        return model

    monkeypatch.setattr(oracle, "torch_model", changed)
    report = oracle.check(oracle.Case(PRE, oracle.new_weights(PRE), batch()), dtypes=(), tapped=True)
    if fault is None:
        assert report.ok, report.failures()
        names = {row.name for row in report.rows}
        assert {"taps/:source_embedding", "taps/:target_embedding", "taps/:head", "cotangents/encoder_norm"} <= names
        assert {f"taps/decoder_blocks.0.cross_attention:{value}" for value in ("q", "k", "v", "scores", "map")} <= names
    else:
        assert (report.first_divergence.name, report.first_divergence.diagnosis) == (first, told)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_decoder_block_is_torchs_decoder_layer(placement):
    """torch.nn.TransformerDecoderLayer, padding on both sides."""
    config = dataclasses.replace(POST, norm_placement=placement)
    draws = np.random.default_rng(1)
    x, memory = draws.normal(size=(2, 5, 16)), draws.normal(size=(2, 7, 16))
    lengths, memory_lengths = torch.tensor([5, 3]), torch.tensor([4, 7])
    torch.manual_seed(0)
    start = torch_ref.nn.block.DecoderBlock(config, "block").state_dict()

    def both(dtype: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        kind = getattr(torch, dtype)
        ours = torch_ref.nn.block.DecoderBlock(dataclasses.replace(config, dtype=dtype, param_dtype=dtype), "block").to(kind)
        ours.load_state_dict(start)
        theirs = torch.nn.TransformerDecoderLayer(16, 4, 24, 0.0, "relu", batch_first=True, norm_first=placement == "pre", dtype=kind)
        with torch.no_grad():
            for attention, own in ((theirs.self_attn, ours.attention), (theirs.multihead_attn, ours.cross_attention)):
                parts = own.query, own.key, own.value
                attention.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
                attention.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
                attention.out_proj.load_state_dict(own.output.state_dict())
            for name in ("norm1", "norm2", "norm3"):
                getattr(theirs, name).load_state_dict(getattr(ours, name).state_dict())
            for name in ("linear1", "linear2"):
                getattr(theirs, name).load_state_dict(getattr(ours.feed_forward, name).state_dict())
        a, b = torch.tensor(x, dtype=kind), torch.tensor(memory, dtype=kind)
        real = torch.arange(5) < lengths[:, None]
        own, *_ = ours(a, b, lengths=lengths, memory_lengths=memory_lengths)
        hidden = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=kind) == -torch.inf
        masks = dict(tgt_key_padding_mask=~real, memory_key_padding_mask=torch.arange(7) >= memory_lengths[:, None])
        other = theirs(a, b, tgt_mask=hidden, **masks)
        return {"out": own[real].detach().numpy()}, {"out": other[real].detach().numpy()}

    report = compare.check_programs(lambda dtype: both(dtype)[1], lambda dtype: both(dtype)[0])
    assert report.ok, report.failures()


@pytest.mark.parametrize("config", [dataclasses.replace(PRE, num_layers=2), ROPE], ids=["pre", "rope"])
def test_the_cache_gives_the_logits_of_the_whole_target(config):
    """Two tokens at once, then one by one; the keys and values of the memory are computed once and stay."""
    case = oracle.Case(config, oracle.new_weights(config), batch())
    pairs = case.batch

    def cached(dtype: str) -> dict[str, np.ndarray]:
        model = oracle.flax_model(case, dtype)
        with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
            memory, _ = model.encode(jnp.asarray(pairs.source), jnp.asarray(pairs.source_lengths))
            first = cache = model.start(memory, jnp.asarray(pairs.source_lengths), init_cache(model.config, 4))
            graph, state = nnx.split(model)
            step = jax.jit(lambda tokens, cache: nnx.merge(graph, state).step(tokens, cache))
            logits = []
            for begin, end in [(0, 2), *((i, i + 1) for i in range(2, 9))]:
                piece, cache = step(jnp.asarray(pairs.target[:, begin:end]), cache)
                logits.append(piece)
            for a, b in zip(first.memory_keys + first.memory_values, cache.memory_keys + cache.memory_values, strict=True):
                np.testing.assert_array_equal(a, b)
            return {"logits": np.concatenate(logits, axis=1)}

    def whole(dtype: str) -> dict[str, np.ndarray]:
        tensors = torch.from_numpy(pairs.source), torch.from_numpy(pairs.target)
        logits, _ = oracle.torch_model(case, dtype)(*tensors, source_lengths=torch.from_numpy(pairs.source_lengths))
        return {"logits": logits.detach().numpy()}

    report = compare.check_programs(cached, whole)
    assert report.ok, report.failures()


def test_padding_is_what_lies_beyond_the_length_and_nothing_else():
    """Whatever stands in the padding, loss and gradients keep every bit; the id of pad inside a length counts."""
    case = oracle.Case(PRE, oracle.new_weights(PRE), batch())
    graph, params, rest = nnx.split(oracle.flax_model(case), nnx.Param, ...)
    value = jax.jit(jax.value_and_grad(lambda params, pairs: pair_loss(nnx.merge(graph, params, rest, copy=True), pairs)))
    clean = value(params, case.batch)
    beyond = lambda lengths: np.arange(9) >= lengths[:, None]
    dirty = case.batch._replace(
        source=np.where(beyond(case.batch.source_lengths), 10, case.batch.source).astype(np.int32),
        target=np.where(beyond(case.batch.target_lengths), 3, case.batch.target).astype(np.int32),
        labels=np.where(beyond(case.batch.target_lengths), 5, case.batch.labels).astype(np.int32),
    )
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(value(params, dirty)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all()
    other = case.batch.labels.copy()
    assert other[0, 0] == PRE.pad
    other[0, 0] = 4
    assert value(params, case.batch._replace(labels=other))[0] != clean[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_label_smoothing_is_torchs(smoothing):
    draws = np.random.default_rng(2)
    logits, targets, weights = draws.normal(0, 3, (3, 4, 6)).astype(np.float32), draws.integers(0, 6, (3, 4)), np.ones((3, 4), np.float32)
    weights[1, 2:], targets[1, 2:] = 0, -100

    def ours(dtype: str) -> dict[str, np.ndarray]:
        with jax.enable_x64(dtype == "float64"):
            loss = lambda x: cross_entropy(x, jnp.asarray(targets), jnp.asarray(weights), label_smoothing=smoothing)
            return dict(zip(("loss", "gradient"), map(np.asarray, jax.value_and_grad(loss)(jnp.asarray(logits.astype(dtype)))), strict=True))

    def torchs(dtype: str) -> dict[str, np.ndarray]:
        x = torch.tensor(logits.astype(dtype), requires_grad=True)
        loss = torch.nn.functional.cross_entropy(x.flatten(0, 1), torch.tensor(targets).flatten(), ignore_index=-100, label_smoothing=smoothing)
        loss.backward()
        return {"loss": loss.detach().numpy(), "gradient": x.grad.numpy()}

    def mirrored(dtype: str) -> dict[str, np.ndarray]:
        x = torch.tensor(logits.astype(dtype), requires_grad=True)
        loss = torch_ref.training.loss.cross_entropy(x, torch.tensor(targets), torch.tensor(weights), label_smoothing=smoothing)
        loss.backward()
        return {"loss": loss.detach().numpy(), "gradient": x.grad.numpy()}

    for program in (ours, mirrored):
        report = compare.check_programs(program, torchs)
        assert report.ok, report.failures()


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, float("nan")])
def test_a_smoothing_outside_its_range_is_refused(smoothing):
    with pytest.raises(InputError, match="label_smoothing"):
        cross_entropy(jnp.zeros((1, 3)), np.zeros(1, int), label_smoothing=smoothing)
    with pytest.raises(InputError, match="label_smoothing"):
        torch_ref.training.loss.cross_entropy(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), label_smoothing=smoothing)


# Pairs


@pytest.mark.parametrize(
    ("content", "place", "limit"),
    [
        (b"a\tb\nno tab\n", ", line 2", "has no tab"),
        (b"a\tb\tc\n", ", line 1", "has 2 tabs"),
        (b"a\tb\n\nc\td\n", ", line 2", "has no tab"),
        (b"a\tb\n\tb\n", ", line 2", "has an empty source"),
        (b"a\tb\na\t\r\n", ", line 2", "has an empty target"),
        (b"a\tb\nc\tx\xff\n", ", line 2", "is not UTF-8: byte 0xff at byte 3 of the line"),
        (b"a\tb\nc\tx\0\n", ", line 2", "holds a NUL at byte 3 of the line"),
        ("a\tb\n".encode("utf-16-le"), ", line 1", "holds a NUL at byte 1 of the line"),
        (b"", "", "holds no line"),
    ],
)
def test_a_bad_line_is_named(content, place, limit, tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_table(path)
    assert refused.value.value == f"{path}{place}"
    assert limit in refused.value.limit


def test_files_are_read_whatever_their_line_ends_and_mark(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes("\ufeff一\t1\r\n二 \t2".encode())
    assert read_table(path).rows == (("一", "1"), ("二 ", "2"))
    with pytest.raises(InputError, match="cannot be read"):
        read_table(tmp_path / "none.tsv")
    with pytest.raises(InputError, match="cannot be read"):
        read_table("shipped:none.tsv")


@given(
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=3), st.text("cd", min_size=1, max_size=3)), min_size=1, max_size=40), st.floats(0.05, 0.9)
)
def test_the_held_out_rows_share_nothing_with_training(rows, share):
    whole = table(*rows)
    try:
        train_rows, held_out = split_rows(whole, share)
    except InputError:
        return
    assert sorted(train_rows.lines + held_out.lines) == list(whole.lines)
    assert len(held_out) <= share * len(rows)
    for side in (0, 1):
        assert not {row[side] for row in train_rows.rows} & {row[side] for row in held_out.rows}
    again, _ = split_rows(table(*rows[::-1]), share)
    assert sorted(again.rows) == sorted(train_rows.rows)  # the order of the file does not matter


def test_the_split_refuses_to_leave_a_side_empty():
    with pytest.raises(InputError, match="held_out"):
        split_rows(table(("a", "x"), ("b", "x"), ("c", "x")), 0.5)


def test_batches_are_a_function_of_seed_and_step_and_cover_each_epoch():
    rows = [("ab" * (1 + i % 9), "cd"[: 1 + i % 2]) for i in range(10)]
    tokenizer = PairTokenizer(CharTokenizer("ab"), CharTokenizer("cd"))
    pairs = encode_pairs(table(*rows), tokenizer, 32)
    batches = Shuffled(10, lambda chosen: pairs.batch(chosen, 4, 32), batch_size=4, seed=3)
    assert batches.steps_per_epoch == 3
    found = []
    for step in range(3, 6):
        one, again = batches[step], batches[step]
        for a, b in zip(one, again, strict=True):
            np.testing.assert_array_equal(a, b)
        assert one.source.shape[1] in (16, 32)
        assert one.target.shape == (4, 16)
        for i in range(4):
            n, m = one.source_lengths[i], one.target_lengths[i]
            assert (n > 0) == (m > 0)
            assert one.weights[i].sum() == m
            if n:
                assert one.target[i, 0] == 1
                np.testing.assert_array_equal(one.target[i, 1:m], one.labels[i, : m - 1])
                assert one.labels[i, m - 1] == EOS
                found.append(("".join("ab"[t - 3] for t in one.source[i, :n]), tokenizer.decode_target(one.labels[i, :m])))
    assert sorted(found) == sorted(rows)


@pytest.mark.parametrize(
    ("rows", "limit"),
    [
        ([("ab", "c"), ("ax", "c")], "holds 'x' in its source"),
        ([("a" * 9, "c")], "has a source of 9 tokens"),
        ([("a", "c" * 8)], "has a target of 8 tokens"),
    ],
)
def test_pairs_that_do_not_fit_are_named(rows, limit):
    with pytest.raises(InputError) as refused:
        encode_pairs(table(*rows), PairTokenizer(CharTokenizer("ab"), CharTokenizer("c")), 8)
    assert limit in refused.value.limit
    assert refused.value.value == f"test, line {len(rows)}"


def test_the_shipped_files_are_what_their_scripts_write():
    for name, lines in [("dates.tsv", make_dates.lines())] + [(name, make_majority.lines(*sizes)) for name, sizes in make_majority.FILES.items()]:
        found = read_table(f"shipped:{name}", names=("source", "target"))
        assert ["\t".join(row) for row in found.rows] == lines


# Runs

TRAIN = TrainConfig(
    batch_size=8, steps=40, held_out=0.2, log_interval=5, eval_interval=20, checkpoint_interval=20, optimizer=OptimizerConfig(lr=1e-2)
)
MODEL = dict(d_model=16, num_heads=2, num_layers=1, max_len=8, dropout=0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Words and their letters in reverse, in capitals."""
    folder = tmp_path_factory.mktemp("translation")
    words = ["".join(x) for x in np.random.default_rng(0).choice(list("abc"), (60, 3))]
    (folder / "pairs.tsv").write_text("".join(f"{word}\t{word[::-1].upper()}\n" for word in words), encoding="utf-8")
    return train(MODEL, TRAIN, folder / "pairs.tsv", folder / "run", kind="encoder-decoder", progress=False, picture=False)


def test_a_run_is_resumed_to_the_bit(run, tmp_path):
    shutil.copytree(run.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "40")
    again = train(None, None, None, tmp_path / "run", resume=True, progress=False, picture=False)
    assert (again.step, again.kind) == (40, "encoder-decoder")
    for a, b in zip(jax.tree.leaves(nnx.state(run.model, nnx.Param)), jax.tree.leaves(nnx.state(again.model, nnx.Param)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() != ""


def test_a_run_is_loaded_evaluated_and_translates(run):
    loaded = load_run(run.folder)
    assert loaded.tokenizer == run.tokenizer
    found = evaluate(loaded, None)
    losses = [line for line in map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines()) if "held_out_loss" in line]
    assert found["loss"] == losses[-1]["held_out_loss"]
    assert losses[-1]["held_out_loss"] < losses[0]["held_out_loss"]
    assert 0 <= found["exact_match"] <= 1
    three = translate(loaded, ["abc", "c"], beams=3, n_best=3)
    assert [len(hypotheses) for hypotheses in three] == [3, 3]
    assert all(a.score >= b.score for hypotheses in three for a, b in itertools.pairwise(hypotheses))
    for text, limit in (("", "at least one character"), ("abd", "not among"), ("abcabcabc", "at most max_len = 8")):
        with pytest.raises(InputError, match=limit):
            translate(loaded, [text])
    for sources, limit in ((["abc", b"abc"], "^source = b'abc': must be a string"), ("abc", "^sources = 'abc': must be a list"), ([], "^sources = ")):
        with pytest.raises(InputError, match=limit):
            translate(loaded, sources)


def test_a_trained_run_computes_the_same_in_torch(run):
    report = run_parity.run(run.folder)
    assert report.ok, report.failures()
    assert report.rows[-1].name == "translations (4 beams, 2 best)"


def test_cross_attention_is_drawn(run, tmp_path):
    paths = cross_attention.draw(run, "abca", tmp_path, target="ACB")
    assert [path.name for path in paths] == ["cross-attention-layers.png", "cross-attention-heads.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    maps = cross_attention.cross_maps(run.model, run.tokenizer.encode_source("abca"), np.array([1, 3, 4]))
    assert [m.shape for m in maps] == [(2, 3, 4)]
    assert cross_attention.draw(run, "abca", tmp_path, target="ACB", layer=1, head=2) == [tmp_path / "cross-attention-layer-1-head-2.png"]
    assert attention.draw(run, "abca", tmp_path, layer=1) == [tmp_path / "attention-layer-1.png"]  # the encoder's
    _, encoder_maps = run.model.encode(run.tokenizer.encode_source("abca")[None], return_attention=True)
    for found, wanted in zip(attention.attention_maps(run.model, run.tokenizer.encode_source("abca")), encoder_maps, strict=True):
        np.testing.assert_array_equal(found, wanted[0])
    for target, options, argument in (("ABCABCABC", {}, "target"), (1, {}, "target"), ("A", dict(layer=2), "layer"), ("A", dict(head=1), "head")):
        with pytest.raises(InputError, match=f"^{argument} = "):
            cross_attention.draw(run, "abca", tmp_path, target=target, **options)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (dict(kind="translator"), "kind"),
        (dict(config={"vocab_size": 9}), "vocab_size"),
        (dict(config={"eos": 4}), "eos"),
        (dict(train_config=dataclasses.replace(TRAIN, window=4)), "window"),
        (dict(config={"max_len": 3}), "data"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_written(run, change, argument, tmp_path):
    values = dict(config=MODEL, train_config=TRAIN, kind="encoder-decoder") | change
    values["config"] = MODEL | values["config"]
    with pytest.raises(InputError) as refused:
        train(values["config"], values["train_config"], run.data["source"], tmp_path / "new", kind=values["kind"], progress=False)
    assert refused.value.argument == argument
    assert not (tmp_path / "new").exists()


def test_a_resume_as_another_kind_is_refused(run, tmp_path):
    with pytest.raises(InputError, match="holds a run of the kind 'encoder-decoder', not 'gpt'"):
        train(None, None, None, run.folder, kind="gpt", resume=True, progress=False)


@pytest.mark.slow
def test_dates_are_learned(tmp_path: Path):
    """The preset of the shipped task: over 95% of unseen dates to the character."""
    from flax_gpt.config import ENCODER_DECODER_PRESETS

    found = train(ENCODER_DECODER_PRESETS["dates"], TrainConfig.preset("dates"), None, tmp_path / "run", kind="encoder-decoder", progress=False)
    assert evaluate(found, None)["exact_match"] > 0.95
