"""Pictures: what they show is what was computed, their labels can be read, and a reader never sees half a file."""

import json
import logging
import types
import warnings

import matplotlib
import numpy as np
import pytest
from matplotlib.font_manager import fontManager
from matplotlib.image import imread

from flax_gpt.config import EncoderConfig, GPTConfig
from flax_gpt.errors import InputError
from flax_gpt.figures import attention, cross_attention, loss_curve, style
from flax_gpt.generation.translate import translate
from flax_gpt.training.labels import LabelTokenizer
from flax_gpt.training.tokenizer import CharTokenizer
from parity_tests import oracle

TEXT = "春天 a$\n"
BASE_ONLY = [entry for entry in fontManager.ttflist if entry.name == style.BASE_FONT]


@pytest.fixture(scope="module")
def run():
    tokenizer = CharTokenizer.from_text(TEXT)
    config = GPTConfig(tokenizer.vocab_size, d_model=16, num_heads=2, num_layers=3, max_len=8, dropout=0.5, attention_dropout=0.5)
    return types.SimpleNamespace(model=oracle.flax_model(config), tokenizer=tokenizer)


def texts(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_attention_maps_are_the_model_s_own_and_leave_its_mode(run):
    ids = run.tokenizer.encode(TEXT)
    _, want = run.model(np.asarray(ids, np.int32)[None], return_attention=True)
    run.model.train()
    try:
        maps = attention.attention_maps(run.model, ids)
        assert not run.model.dropout.deterministic
        assert int(run.model.dropout.step[...]) == 0
    finally:
        run.model.eval()
    assert len(maps) == 3
    for layer, expected in zip(maps, want, strict=True):
        np.testing.assert_array_equal(layer, np.asarray(expected[0]))


def test_panels_show_the_maps_with_tokens_on_both_axes():
    maps = [np.tril(np.full((4, 4), 0.1 * i)) for i in (1, 2, 3)]
    figure = attention.panels(maps, ["one", "two", "three"], ["a", "␣", "b", "⏎"], "Everything")
    *shown, bar = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == ["one", "two", "three"]
    for axes, weights in zip(shown, maps, strict=True):
        (image,) = axes.get_images()
        np.testing.assert_array_equal(image.get_array(), weights)
        assert image.get_clim() == (0.0, maps[-1].max())  # one scale for all
        assert texts(axes.xaxis) == texts(axes.yaxis) == ["a", "␣", "b", "⏎"]
        assert axes.get_xlabel() == "key (looked at)"
        assert axes.get_ylabel() == "query (looking)"
    assert bar.get_ylabel() == "attention weight (colours by its square root)"
    assert figure.get_suptitle() == "Everything"


def test_pictures_grow_with_the_text():
    sizes = []
    for T in (8, 32, 128):
        figure = attention.panels([np.eye(T)], ["one"], ["a"] * T, "T")
        sizes.append(figure.get_size_inches()[0])
        label = figure.axes[0].yaxis.get_ticklabels()[0]
        assert label.get_fontsize() / 72 < (figure.get_size_inches()[1] - 1) / T  # labels do not run into each other
    assert sizes == sorted(sizes)
    for count, T, shape in ((4, 8, (1, 4)), (4, 24, (2, 2)), (3, 24, (1, 3)), (12, 8, (3, 4)), (1, 128, (1, 1))):
        figure = attention.panels([np.eye(T)] * count, ["one"] * count, ["a"] * T, "T")
        assert figure.axes[0].get_gridspec().get_geometry() == shape
    assert sizes[2] > 4 * sizes[0]


def test_draw_writes_two_pictures_of_one_pass(run, tmp_path, monkeypatch):
    calls = []
    compute = attention.attention_maps
    monkeypatch.setattr(attention, "attention_maps", lambda *arguments: calls.append(1) or compute(*arguments))
    _, missing = style.choose_fonts(TEXT.strip())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        paths = attention.draw(run, TEXT, tmp_path / "new" / "folder")
    assert len(calls) == 1
    assert [path.name for path in paths] == ["attention-layers.png", "attention-heads.png"]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(path.name for path in paths)  # no temporary file stays
    assert len(caught) == (1 if missing else 0)  # one for all labels where no font has the glyphs, and none from matplotlib
    for path in paths:
        picture = imread(path)
        assert min(picture.shape[:2]) > 200
        assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 50


@pytest.fixture(scope="module")
def classifier():
    """Two layers of four heads that see both ways, over Chinese texts."""
    tokenizer = LabelTokenizer(CharTokenizer("".join(sorted(set("村子在河的东边，。")))), ["否", "是"])
    config = EncoderConfig(tokenizer.vocab_size, init="torch")
    return types.SimpleNamespace(model=oracle.flax_model(config, oracle.torch_weights(oracle.torch_model(config, seed=0))), tokenizer=tokenizer)


@pytest.mark.parametrize(("layer", "head", "name"), [(1, 3, "layer-1-head-3"), (2, None, "layer-2")])
def test_any_layer_and_head_of_an_encoder_is_drawn_with_its_tokens(classifier, layer, head, name, tmp_path, monkeypatch):
    text, drawn = "村子在河的东边。", []
    panels = attention.panels
    monkeypatch.setattr(attention, "panels", lambda *arguments, **options: drawn.append(panels(*arguments, **options)) or drawn[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # where no font has Chinese, the labels are escapes
        assert attention.draw(classifier, text, tmp_path, layer=layer, head=head) == [tmp_path / f"attention-{name}.png"]
    _, maps = classifier.model(np.asarray(classifier.tokenizer.encode(text))[None], return_attention=True)
    assert (np.asarray(maps[0]) > 0).all()  # nothing is masked
    heads = [3] if head else [1, 2, 3, 4]
    *shown, _ = [axes for axes in drawn[0].axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == [f"head {h}" for h in heads]
    _, missing = style.choose_fonts(text)
    for axes, h in zip(shown, heads, strict=True):
        np.testing.assert_array_equal(axes.get_images()[0].get_array(), np.asarray(maps[layer - 1][0, h - 1], np.float64))
        assert texts(axes.xaxis) == texts(axes.yaxis) == [style.escape(c) if c in missing else c for c in text]


@pytest.mark.parametrize(
    ("layer", "head", "argument"), [(0, None, "layer"), (3, 1, "layer"), (1, 5, "head"), (1, 0, "head"), (None, 1, "head"), (True, 1, "layer")]
)
def test_layers_and_heads_that_are_none_are_refused(classifier, layer, head, argument, tmp_path):
    with pytest.raises(InputError, match=f"^{argument} = "):
        attention.draw(classifier, "村子", tmp_path, layer=layer, head=head)


def test_what_translates_nothing_has_no_cross_attention(run, classifier, tmp_path):
    for other, name in ((classifier, "TinyTransformer"), (run, "MiniGPT"), (None, "NoneType")):
        with pytest.raises(InputError, match=f"^run = '{name}': must be a run of the kind 'encoder-decoder'"):
            cross_attention.draw(other, "村子", tmp_path)
        with pytest.raises(InputError, match=f"^run = '{name}': "):
            translate(other, ["村子"])
    assert list(tmp_path.iterdir()) == []


def test_draw_refuses_what_the_model_cannot_read(run, tmp_path):
    for text, message in (
        ("", "text = ''"),
        (b"abc", "must be a string"),
        (None, "must be a string"),
        ("春" * 9, "at most max_len = 8"),
        ("é", "text = 'é'"),
    ):
        with pytest.raises(InputError, match=message):
            attention.draw(run, text, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_characters_that_nobody_sees_are_made_visible():
    assert style.visible("a b\n\t") == "a␣b⏎⇥"
    assert style.visible("\x00\r\u3000\u200b\ufeff") == "\\u0000\\u000D\\u3000\\u200B\\uFEFF"
    assert style.visible("e\u0301") == "e◌\u0301"
    assert style.escape("😀") == "\\U0001F600"


def test_without_a_font_labels_are_escaped_and_one_warning_names_them():
    def draw():
        with style.labels("春天春 a", BASE_ONLY) as label:
            assert [label(c) for c in "春天 a"] == ["\\u6625", "\\u5929", "␣", "a"]
            figure = attention.panels([np.eye(2)], ["one"], [label("春"), label("天")], "T")
            figure.canvas.draw()  # a glyph that is missing would warn here

    with pytest.warns(UserWarning, match=r"no installed font has 2 of the characters to draw \(\\u5929 \\u6625\)") as caught:
        draw()
    assert len(caught) == 1


def test_a_font_with_the_glyphs_is_found_where_there_is_one(run, tmp_path, caplog):
    families, missing = style.choose_fonts("春天a")
    known = {entry.name for entry in style.installed()}
    assert families[0] == style.BASE_FONT
    assert not missing or not known & set(style.CJK_FONTS)
    if not missing:
        assert set(families[1:]) <= known
        with style.labels("春天") as label, caplog.at_level(logging.WARNING):
            assert (label("春"), label("天")) == ("春", "天")
            figure = attention.panels([np.eye(2)], ["one"], ["春", "天"], "T")
            figure.canvas.draw()
            assert not matplotlib.rcParams["axes.unicode_minus"]
        assert caplog.records == []


def test_settings_do_not_outlast_a_picture(run, tmp_path):
    before = dict(matplotlib.rcParams)
    attention.draw(run, "a$", tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_an_interrupted_save_leaves_the_old_picture(tmp_path):
    path = tmp_path / "picture.png"
    style.save(matplotlib.figure.Figure(), path)
    old = path.read_bytes()

    class Broken(matplotlib.figure.Figure):
        def savefig(self, name, **options):
            super().savefig(name, **options)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        style.save(Broken(figsize=(1, 1)), path)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["picture.png"]


def metrics(path, rows, tail=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail, encoding="utf-8")
    return path


def test_loss_curve_shows_both_losses(tmp_path):
    rows = [{"step": s, "train_loss": 5 / s, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 9.0} for s in range(1, 6)]
    rows += [{"step": 5, "held_out_loss": 1.25}]
    path = metrics(tmp_path / "metrics.jsonl", rows, '{"step": 6, "train_')
    assert loss_curve.read_metrics(path) == {"train_loss": [(s, 5 / s) for s in range(1, 6)], "held_out_loss": [(5, 1.25)]}
    axes = loss_curve.plot(loss_curve.read_metrics(path)).axes[0]
    train, held_out = axes.get_lines()
    np.testing.assert_array_equal(train.get_xydata(), [(s, 5 / s) for s in range(1, 6)])
    np.testing.assert_array_equal(held_out.get_xydata(), [(5, 1.25)])
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["train (last 1.000)", "held out (lowest 1.250 at step 5)"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step (optimizer updates)", "cross-entropy (nats a token)")
    assert axes.get_yscale() == "linear"
    assert imread(loss_curve.draw(path, tmp_path / "loss.png")).shape[1] > 600


def test_loss_curve_is_logarithmic_over_a_wide_range():
    axes = loss_curve.plot({"train_loss": [(1, 28.0), (2, float("nan")), (3, 0.08)], "held_out_loss": []}).axes[0]
    assert axes.get_yscale() == "log"
    assert len(axes.get_lines()) == 1


def test_loss_curve_refuses_what_holds_no_loss(tmp_path):
    whole = [{"step": 1, "train_loss": 2.0}]
    cases = [
        (tmp_path / "missing.jsonl", "cannot be read"),
        (metrics(tmp_path / "empty.jsonl", []), "holds no loss"),
        (metrics(tmp_path / "nan.jsonl", [{"step": 1, "train_loss": float("nan")}]), "holds no loss"),
        (metrics(tmp_path / "torn.jsonl", whole, "{\n" + json.dumps(whole[0]) + "\n"), "line 2 must be a JSON object"),
        (metrics(tmp_path / "list.jsonl", [[1]], ""), "line 1 must be a JSON object"),
        (metrics(tmp_path / "step.jsonl", [{"train_loss": 1.0}]), "line 1 must be a JSON object"),
    ]
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\n")
    for path, message in [*cases, (tmp_path / "bytes.jsonl", "cannot be read")]:
        with pytest.raises(InputError, match=message) as caught:
            loss_curve.draw(path, tmp_path / "loss.png")
        assert str(caught.value).startswith(f"metrics = '{path}'")
    assert not (tmp_path / "loss.png").exists()
