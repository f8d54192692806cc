"""The classifier's task: the original's recipe, texts of different lengths, and what is refused."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from flax_gpt.config import ENCODER_PRESETS, EncoderConfig, TrainConfig
from flax_gpt.errors import InputError
from flax_gpt.models.encoder import TinyTransformer
from flax_gpt.training.labels import LabelTokenizer, encode_labelled, label_loss
from flax_gpt.training.loop import evaluate, load_run, train
from flax_gpt.training.table import Table, read_table, split_rows
from flax_gpt.training.tokenizer import CharTokenizer
from parity_tests import run_parity

BITS = LabelTokenizer(CharTokenizer("01"), ["0", "1"])


def accuracies(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["held_out_accuracy"] for line in lines if "held_out_accuracy" in line}


def table(*rows: tuple[str, str]) -> Table:
    return Table(tuple(rows), tuple(range(1, len(rows) + 1)), "test", "0")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The original's recipe but for its 12 epochs; the schedule is constant, so three of them are the first three."""
    folder = tmp_path_factory.mktemp("majority") / "run"
    return train(
        ENCODER_PRESETS["majority"], TrainConfig.preset("majority", epochs=3), None, folder, kind="classifier", progress=False, picture=False
    )


def test_the_originals_recipe_is_right_on_every_unseen_string_by_epoch_three(original):
    """2,000 strings of 16 to train on, 500 others to evaluate, 32 steps an epoch."""
    assert (original.config.init, original.train_config.batch_size, original.train_config.optimizer.optimizer) == ("torch", 64, "adam")
    found = accuracies(original.folder)
    assert list(found) == [32, 64, 96]
    assert found[96] == 1.0
    kept, unseen = split_rows(read_table("shipped:majority.tsv"), original.train_config.held_out, shared=(0,))
    assert (len(kept), len(unseen)) == (2000, 500)
    assert not {text for text, _ in kept.rows} & {text for text, _ in unseen.rows}
    assert all(label == str(int(text.count("1") > 8)) for text, label in kept.rows + unseen.rows)
    loaded = load_run(original.folder)
    assert loaded.kind == "classifier"
    assert evaluate(loaded, None) == evaluate(original, None)
    assert evaluate(loaded, None) | {"loss": 0} == {"loss": 0, "accuracy": 1.0, "texts": 500}


def test_a_trained_run_computes_the_same_in_torch(original):
    report = run_parity.run(original.folder)
    assert report.ok, report.failures()


def test_strings_of_different_lengths_are_learned(tmp_path):
    training = TrainConfig.preset("majority", epochs=8, eval_interval=100)
    run = train(
        ENCODER_PRESETS["majority"], training, "shipped:majority_lengths.tsv", tmp_path / "run", kind="classifier", progress=False, picture=False
    )
    assert accuracies(run.folder)[run.step] > 0.99
    known = read_table("shipped:majority_lengths.tsv")
    assert {len(text) for text, _ in known.rows} == set(range(4, 17))


def test_what_lies_beyond_a_length_changes_no_bit():
    config = EncoderConfig(max_len=16, init="torch")
    model = TinyTransformer(config, rngs=nnx.Rngs(0))
    labelled = encode_labelled(table(("0110", "0"), ("1" * 16, "1"), ("101", "1")), BITS, 16)
    batch = labelled.batch(range(3), 4, 16)
    assert batch.lengths.tolist() == [4, 16, 3, 0]
    assert batch.weights.tolist() == [1, 1, 1, 0]
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    value = jax.jit(jax.value_and_grad(lambda params, batch: label_loss(nnx.merge(graph, params, rest, copy=True), batch)))
    dirty = batch._replace(tokens=np.where(np.arange(16) >= batch.lengths[:, None], 1, batch.tokens).astype(np.int32))
    for a, b in zip(jax.tree.leaves(value(params, batch)), jax.tree.leaves(value(params, dirty)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all()


@pytest.mark.parametrize(
    ("rows", "limit"),
    [
        ([("01", "1"), ("02", "1")], "holds '2'"),
        ([("01", "2")], "has the label '2', which is none of 0, 1"),
        ([("0" * 17, "1")], "has 17 tokens, more than max_len = 16"),
    ],
)
def test_texts_that_do_not_fit_are_named(rows, limit):
    with pytest.raises(InputError) as refused:
        encode_labelled(table(*rows), BITS, 16)
    assert refused.value.value == f"test, line {len(rows)}"
    assert limit in refused.value.limit


@pytest.mark.parametrize(("change", "argument"), [({"num_classes": 3}, "num_classes"), ({"vocab_size": 3}, "vocab_size"), ({"max_len": 15}, "data")])
def test_sizes_that_are_not_the_datas_are_refused(change, argument, tmp_path):
    with pytest.raises(InputError) as refused:
        train(ENCODER_PRESETS["majority"] | change, TrainConfig.preset("majority"), None, tmp_path / "run", kind="classifier", progress=False)
    assert refused.value.argument == argument
    assert not (tmp_path / "run").exists()


def test_data_of_another_kind_are_refused(original, tmp_path):
    (tmp_path / "pairs.tsv").write_text("0110 1\n", encoding="utf-8")
    with pytest.raises(InputError, match="has no tab"):
        evaluate(original, tmp_path / "pairs.tsv")
