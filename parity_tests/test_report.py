"""What a row says beside its verdict, and the forms in which a report leaves the process."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from flax_gpt.errors import InputError
from parity_tests import compare, metrics
from parity_tests.report import DTYPES, KINDS, SCHEMA, Report, Row

RNG = np.random.default_rng(0)
TRUTH = {"logits": RNG.standard_normal((4, 3, 11)), "grads/head.kernel": RNG.standard_normal((5, 2)), "step1/weights/head.kernel": np.ones((5, 2))}
NOISE = {name: RNG.standard_normal((8, *value.shape)) * 2.0**-24 for name, value in TRUTH.items()}
ALLOWED = {"logits": np.array([0.0, np.inf, np.nan, -np.inf])}


def judged(programs, truth=TRUTH, dtype="float32", **options):
    report = Report("a title")
    noise = {name: np.zeros((8, *value.shape)) + 2.0**-24 for name, value in truth.items()} if truth is not TRUTH else NOISE
    compare.judge(report, dtype, programs, truth, noise, **options)
    return report


def spoiled(name, place, factor):
    values = {key: value.copy() for key, value in TRUTH.items()}
    values[name][place] *= factor
    return judged({"flax": values, "torch": TRUTH})


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "float64"])
def test_units_in_the_last_place(dtype):
    """The distance to the next number, as the formats themselves have it."""
    spacing = lambda x: np.spacing(np.asarray(x, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)).astype(float)
    for x in (1.0, 1.5, 2.0, 65000.0, 0.0078125, 6.2e-5, 0.0):
        assert metrics.ulp(x, dtype) == spacing(x), x


def test_the_worst_element_is_found_and_measured():
    row = spoiled("logits", (2, 1, 7), 1 + 2.0**-20).rows[0]
    expected = TRUTH["logits"][2, 1, 7]
    assert row.worst["flax"].index == (2, 1, 7)
    assert row.worst["flax"].expected == expected
    assert row.errors["flax"] == abs(row.worst["flax"].value - expected) / np.abs(TRUTH["logits"]).max()
    assert row.ulps["torch"] == 0
    assert 0 < 1 - row.cosines["flax"] < 1e-12
    assert row.cosines["torch"] == 1


def test_logits_are_compared_as_distributions():
    """Exchanging the two most likely tokens keeps the five most likely; a constant added to all changes nothing."""
    logits = TRUTH["logits"]
    swapped = logits.copy()
    order = np.argsort(logits, axis=-1)
    for index in np.ndindex(logits.shape[:2]):
        first, second = order[index][-1], order[index][-2]
        swapped[index][[first, second]] = logits[index][[second, first]]
    assert metrics.top_k(swapped, logits) == 1
    assert metrics.top_k(swapped, logits, k=1) == 0
    assert metrics.top_k(-logits, logits, k=3) == 0
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (logits, swapped))
    exact = (p * np.log(p / q)).sum(-1).mean()
    assert abs(metrics.divergence(swapped, logits) / exact - 1) < 2.0**-40
    assert abs(metrics.divergence(logits + 100, logits)) < 2.0**-40


def test_only_logits_are_read_as_distributions():
    rows = judged({"flax": TRUTH, "torch": TRUTH}).rows
    assert [(row.name, set(row.top_k), set(row.divergences)) for row in rows] == [
        ("logits", {"flax", "torch"}, {"flax", "torch"}),
        ("grads/head.kernel", set(), set()),
        ("step1/weights/head.kernel", set(), set()),
    ]
    assert rows[0].divergences == {"flax": 0.0, "torch": 0.0}
    assert [(row.kind, row.component) for row in rows] == [("output", ""), ("gradient", "head"), ("step", "head")]


def test_what_vanishes_in_theory_is_measured_by_what_cancelled():
    truth = {"x": np.full(6, 1e-20)}
    row = judged({"flax": {"x": np.full(6, 3e-8)}}, truth).rows[0]
    assert row.ok
    assert row.errors["flax"] < 2.0**-23  # over terms of size 1
    assert row.ulps["flax"] < 1
    assert row.cosines == {}


@pytest.mark.parametrize(
    ("ours", "theirs", "allowed", "note"),
    [
        (ALLOWED["logits"], ALLOWED["logits"], ("log*",), ""),
        (ALLOWED["logits"], ALLOWED["logits"], (), "inf at [1] of the float64 value, where the case expects a number"),
        (np.array([0.0, np.inf, np.nan, np.inf]), ALLOWED["logits"], ("logits",), "inf at [1] of the float64 value, not the same in all programs"),
        (ALLOWED["logits"], np.array([0.0, np.nan, np.nan, -np.inf]), ("logits",), "inf at [1] of the float64 value, not the same in all programs"),
    ],
)
def test_what_is_not_finite_must_be_expected_and_the_same(ours, theirs, allowed, note):
    row = judged({"flax": {"logits": ours}, "torch": {"logits": theirs}}, ALLOWED, nonfinite=allowed).rows[0]
    assert row.note == note
    assert row.ok == (not note)
    assert row.nonfinite == (0 if note else 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_fails_where_it_may_be_but_is_not(bad):
    truth = {"logits": np.zeros(4)}
    row = judged({"flax": {"logits": np.array([0, 0, bad, 0])}}, truth, nonfinite=("logits",)).rows[0]
    assert not row.ok
    assert row.worst["flax"].index == (2,)


@pytest.mark.parametrize("shape", [(4, 1), (4,), (1, 1, 4)])
def test_the_same_numbers_in_another_shape_fail(shape):
    """These shapes broadcast, so that a difference could be taken."""
    zeros = {"logits": np.zeros((1, 4))}
    row = judged({"flax": {"logits": np.zeros(shape)}, "torch": zeros}, zeros).rows[0]
    assert row.note == f"flax has the shape {list(shape)}, not [1, 4]"
    assert not row.ok


def test_first_is_what_comes_first_in_the_computation():
    row = lambda name, dtype, kind, note="bad": Row(name, dtype, {}, {}, {}, 0.0, note, kind)
    rows = [
        row("narrow output", "float32", "output"),
        row("tokens", "exact", "tokens"),
        row("gradient", "float64", "gradient"),
        row("clean tap", "float64", "tap", ""),
        row("loss", "float64", "loss"),
        row("narrow tap", "float32", "tap"),
        row("tap", "float64", "tap"),
        row("weights", "exact", "weights"),
    ]
    report, found = Report(), []
    report.rows = rows
    while (first := report.first_divergence) is not None:
        found.append(first.name)
        report.rows = [one for one in report.rows if one is not first]
    assert found == ["weights", "tap", "loss", "gradient", "tokens", "narrow tap", "narrow output"]


def test_json_comes_back_whole(tmp_path):
    zeros = {"logits": np.zeros(4)}
    report = judged({"flax": {"logits": np.array([0, np.inf, 0, 0]), "extra": np.zeros(1)}, "torch": zeros}, zeros)
    report.rows += spoiled("logits", (0, 0, 0), 2.0).rows
    report.rows[1] = dataclasses.replace(report.rows[1], diagnosis="a cause")
    report.environment["jax"] = "0"
    report.save(tmp_path / "report.json")
    fields = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert fields["schema"] == SCHEMA
    assert fields["ok"] is False
    assert fields["rows"][fields["first_divergence"]]["name"] == report.first_divergence.name
    assert fields["rows"][0]["worst"]["flax"]["value"] == "Infinity"
    back = Report.from_json((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert back.rows == report.rows
    assert (back.title, back.environment, back.summary()) == (report.title, report.environment, report.summary())
    assert {row.dtype for row in back.rows} <= set(DTYPES)
    assert {row.kind for row in back.rows} <= set(KINDS)
    with pytest.raises(InputError, match="schema"):
        Report.from_json(json.dumps(fields | {"schema": SCHEMA + 1}))
    with pytest.raises(InputError, match="folder that exists"):
        report.save(tmp_path / "absent" / "report.json")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
