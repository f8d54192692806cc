"""Trainings of both packages that share a seed and nothing else: equal in float64, within the budget of rounding in float32, dropout on."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

import torch_ref.training.state
from flax_gpt.config import OptimizerConfig, TrainConfig
from flax_gpt.errors import InputError
from flax_gpt.training import checkpoint
from flax_gpt.training.loop import train
from parity_tests import training_parity
from parity_tests.report import Report
from parity_tests.training_parity import Course, compare_courses, flax_course, torch_course

SMALL = dict(d_model=16, num_layers=1, d_ff=24, max_len=12)
SGD = OptimizerConfig(optimizer="sgd", lr=0.5, warmup_steps=2, nesterov=True, weight_decay=0.01)


def in_float64(ours, theirs):
    report = Report()
    report.rows += [training_parity.in_float64(name, ours, value) for name, value in theirs.items()]
    return report


def test_ten_steps():
    result = compare_courses(Course.shipped((1, 4, 10), optimizer=OptimizerConfig(lr=3e-3, warmup_steps=1), **SMALL))
    assert result.report.ok, result.report.failures()
    losses = result.theirs["float32"]["losses"]
    assert losses[-3:].mean() < losses[:3].mean() - 0.1  # it learns


@pytest.mark.slow
def test_two_hundred_steps(tmp_path):
    """The long form: weights compared after 29 of the steps, and its picture."""
    result = compare_courses(Course.shipped(training_parity.LONG))
    assert result.report.ok, result.report.failures()
    assert training_parity.draw(result, tmp_path / "growth.png").stat().st_size > 10_000


def test_parts_of_a_batch_add_up():
    """SGD over batches in 4 parts, in 2 and whole, the last of an epoch padded: one training, whoever cuts it."""
    course = Course.shipped((1, 4), optimizer=SGD, **SMALL)
    course = dataclasses.replace(course, corpus=dataclasses.replace(course.corpus, tokens=course.corpus.tokens[:35]))
    assert course.batches.steps_per_epoch == 3
    assert course.batches[2].weights.sum() < course.batches[1].weights.sum()
    cut = lambda parts: dataclasses.replace(course, train_config=dataclasses.replace(course.train_config, accumulate=parts))
    whole = torch_course(course, "float64")
    for other in (flax_course(course, "float64"), flax_course(cut(4), "float64"), torch_course(cut(2), "float64")):
        report = in_float64(other, whole)
        assert report.ok, report.failures()


def test_a_hundred_steps_in_parts():
    """AdamW, warm-up and cosine, clip, batches in 4 parts and in 2, dropout on: weights and both moments after 1, 10 and 100 steps."""
    course = Course.shipped((1, 10, 100), accumulate=4, **SMALL)
    other = dataclasses.replace(course, train_config=dataclasses.replace(course.train_config, accumulate=2))
    theirs = torch_course(other, "float64")
    report = in_float64(flax_course(course, "float64"), theirs)
    assert report.ok, report.failures()
    assert {"/".join(name.split("/")[:2]) for name in theirs} == {
        "losses",
        *(f"step{number}/{group}" for number in course.steps for group in ("weights", "exp_avg", "exp_avg_sq")),
    }


def late_dropout(model, *batch, **options):
    model.dropout.step += 1
    return BACKWARD(model, *batch, **options)


def other_rows(model, *batch, **options):
    model.dropout.first_row += 1
    return BACKWARD(model, *batch, **options)


BACKWARD = torch_ref.training.state.backward


@pytest.mark.parametrize("fault", [late_dropout, other_rows])
def test_a_fault_fails(fault):
    course = Course.shipped((1,), **SMALL)
    ours = flax_course(course, "float64")
    assert in_float64(ours, torch_course(course, "float64")).ok
    with mock.patch.object(torch_ref.training.state, "backward", fault):
        assert not in_float64(ours, torch_course(course, "float64")).ok


def test_a_run_in_parts_resumes_bitwise(tmp_path):
    """SGD's velocity is in the checkpoint; a field that a run of an older version lacks has its default."""
    course = Course.shipped((6,), **SMALL)
    config = TrainConfig(batch_size=8, accumulate=2, steps=6, held_out=0.0, checkpoint_interval=3, keep_last=2, optimizer=SGD)
    train(course.config, config, course.corpus, tmp_path / "whole", progress=False, picture=False)
    train(course.config, config, course.corpus, tmp_path / "again", progress=False, picture=False)
    wanted = arrays(tmp_path / "whole")
    checkpoint.prune(tmp_path / "again", [3])
    record = checkpoint.unseal((tmp_path / "again" / "run.json").read_bytes())
    assert record["train"]["optimizer"].pop("momentum") == OptimizerConfig().momentum
    checkpoint.write_file(tmp_path / "again" / "run.json", checkpoint.seal(record))
    train(None, None, None, tmp_path / "again", resume=True, progress=False, picture=False)
    found = arrays(tmp_path / "again")
    assert set(found) == set(wanted)
    assert any("trace" in name for name in wanted)
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def arrays(folder):
    found = checkpoint.newest_whole(folder)
    return checkpoint.restore(found, {name: np.empty(shape, dtype) for name, (shape, dtype) in found.arrays.items()})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig(batch_size=8, accumulate=3), "accumulate = 3: must divide batch_size = 8"),
        (lambda: TrainConfig(accumulate=0), "accumulate = 0"),
        (lambda: OptimizerConfig(optimizer="sgd", momentum=1.0), "momentum = 1.0"),
        (lambda: OptimizerConfig(optimizer="sgd", momentum=0.0, nesterov=True), "nesterov = True: needs a momentum"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(InputError, match=message):
        make()
