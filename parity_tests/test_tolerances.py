"""The budget itself: real float32 programs stay within it, programs a little worse do not."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from parity_tests import tolerances

LIMIT = tolerances.reference_limit()


def graded(run, inputs, spoil=lambda values: values, seeds=range(12)):
    """Grades of `run` in float32 against float64, over random inputs from `inputs(rng)`; `spoil` worsens the float32 results."""
    found = []
    for seed in seeds:
        narrow = [x.astype(np.float32) for x in inputs(np.random.default_rng(seed))]
        wide = [torch.from_numpy(x).double() for x in narrow]
        deviations = tolerances.scatter(lambda wide=wide: {"y": run(*wide).numpy()})["y"]
        result = spoil(run(*map(torch.from_numpy, narrow)).numpy().astype(np.float64))
        found.append(tolerances.grade(result - run(*wide).numpy(), deviations, "float32"))
    return found


PROGRAMS = {
    "product": (lambda a, b: a @ b, lambda rng: (rng.standard_normal((16, 300)), rng.standard_normal((300, 16)))),
    "product of one sign": (lambda a, b: a @ b, lambda rng: (rng.random((16, 2000)), rng.random((2000, 4)))),
    "cancelling sum": (lambda a: (a - a.mean(0)).sum(0), lambda rng: (rng.standard_normal((500, 8)) + 5,)),
    "sum of equal terms": (lambda a: a.expand(1000, 8).sum(0), lambda rng: (rng.random((1, 8)),)),
    "softmax": (lambda a: torch.softmax(a, -1), lambda rng: (rng.standard_normal((8, 64)) * 20,)),
    "log softmax": (lambda a: F.log_softmax(a, -1), lambda rng: (rng.standard_normal((8, 64)) * 5,)),
    "norm": (lambda a: torch.linalg.vector_norm(a), lambda rng: (rng.standard_normal((300, 300)) * np.exp(3 * rng.standard_normal((300, 1))),)),
    "layer norm": (lambda a: F.layer_norm(a, (64,)), lambda rng: (rng.standard_normal((8, 64)) + 10,)),
    "gelu": (lambda a: F.gelu(a), lambda rng: (rng.standard_normal((8, 200)) * 3,)),
    "underflow": (lambda a: torch.exp(-torch.abs(a)), lambda rng: (rng.standard_normal((8, 64)) * 60,)),
    "one number": (lambda a: a.logsumexp(0), lambda rng: (rng.standard_normal(50),)),
    "affine": (
        lambda a, b, c: torch.addmm(c, a, b),
        lambda rng: (rng.standard_normal((9, 40)), rng.standard_normal((40, 7)), rng.standard_normal(7) * 50),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_float32_stays_within_its_budget(name):
    grades = graded(*PROGRAMS[name])
    assert max(grades) <= LIMIT, grades


@pytest.mark.parametrize("name", ["product", "softmax", "log softmax", "layer norm", "gelu", "affine"])
def test_an_error_of_sixteen_bits_leaves_it(name):
    """Results good to 2^-16 of their largest element, where float32 has 24 bits."""
    noise = np.random.default_rng(99)
    spoil = lambda y: y + np.abs(y).max() * 2.0**-16 * noise.choice([-1, 1], y.shape)
    grades = graded(*PROGRAMS[name], spoil=spoil)
    assert min(grades) > LIMIT, grades


def test_a_single_wrong_element_is_seen():
    """One small element of many, off by a thousandth of itself, in a tensor of much larger ones."""
    run = lambda a, b: a @ b
    inputs = lambda rng: (np.vstack([rng.standard_normal((63, 30)), 1e-4 * rng.standard_normal((1, 30))]), rng.standard_normal((30, 64)))

    def spoil(y):
        y = y.copy()
        y[63, 5] *= 1 + 2.0**-10
        return y

    assert min(graded(run, inputs, spoil)) > LIMIT


def test_bfloat16_results_fail_as_float32_and_pass_as_bfloat16():
    a, b = (np.random.default_rng(seed).standard_normal((20, 20)).astype(np.float32) for seed in (0, 1))
    wide = torch.from_numpy(a).double(), torch.from_numpy(b).double()
    deviations = tolerances.scatter(lambda: {"y": (wide[0] @ wide[1]).numpy()})["y"]
    error = (torch.from_numpy(a) @ torch.from_numpy(b)).bfloat16().double() - wide[0] @ wide[1]
    assert tolerances.grade(error.numpy(), deviations, "float32") > 1000
    assert tolerances.grade(error.numpy(), deviations, "bfloat16") <= LIMIT


@given(st.sampled_from([np.nan, np.inf, -np.inf]), st.integers(0, 3))
def test_what_is_not_finite_fails(bad, place):
    error = np.zeros(4)
    error[place] = bad
    assert tolerances.grade(error, np.ones((8, 4)), "float32") == np.inf


def test_what_must_be_exact_must_be_exact():
    deviations = np.random.default_rng(0).standard_normal((8, 5)) * 1e-8
    deviations[:, 2] = 0
    error = np.full(5, 1e-9)
    assert tolerances.grade(error, deviations, "float32") == np.inf
    error[2] = 0
    assert tolerances.grade(error, deviations, "float32") < 1
    assert tolerances.grade(np.zeros(5), np.zeros((8, 5)), "float32") == 0
    assert tolerances.grade(np.zeros(0), np.zeros((8, 0)), "float32") == 0


@given(st.floats(0.01, 100))
def test_grades_grow_with_the_error(factor):
    deviations = np.random.default_rng(1).standard_normal((8, 50))
    error = np.random.default_rng(2).standard_normal(50)
    ratio = tolerances.grade(error * factor, deviations, "float32") / tolerances.grade(error, deviations, "float32")
    assert abs(ratio / factor - 1) < 2.0**-40


def test_ours_is_held_to_the_reference():
    assert tolerances.our_limit(0.0, 1.5) == 1.5
    assert tolerances.our_limit(0.5, 1.5) == 1 + tolerances.FACTOR / 2
    assert tolerances.our_limit(100.0, 1.5) == tolerances.reference_limit()
    assert tolerances.our_limit(0.0, 100.0) == tolerances.reference_limit()


def sound_results(size, count):
    """`count` of (budget, errors of two sound programs): independent elements, drawn as those of the simulated runs are."""
    rng = np.random.default_rng(size)
    for _ in range(count):
        yield tolerances.Budget(rng.standard_normal((tolerances.RUNS, size))), *rng.standard_normal((2, size))


@pytest.mark.parametrize("size", [1, 3, 16])
def test_sound_results_beside_an_exact_reference_pass(size):
    """At most one in a thousand is beyond its limit; held to the worst simulated run, one in fifteen is, or more."""
    count = 1000
    grades = [(budget.grade(error, "float32"), budget.floor) for budget, error, _ in sound_results(size, count)]
    assert sum(grade > tolerances.our_limit(0.0, floor) for grade, floor in grades) <= count / 1000
    assert sum(grade > tolerances.our_limit(0.0, 1.0) for grade, _ in grades) > count / 20


def test_a_large_tensor_is_held_to_the_reference_alone():
    """One sound program beside another: the floor, far below what the reference alone may reach, decides nothing."""
    for budget, error, reference in sound_results(20_000, 10):
        grade = budget.grade(reference, "float32")
        assert budget.floor < 0.75 * tolerances.reference_limit()
        assert budget.grade(error, "float32") < tolerances.our_limit(grade, budget.floor) == tolerances.our_limit(grade, 1.0)


def test_the_floor_of_runs_that_are_alike_is_their_error():
    """Where every element errs as much in every run, where none does, and where only one run errs at all."""
    assert tolerances.Budget(np.random.default_rng(4).choice([-1, 1], (8, 50)) * 1e-8).floor == 1
    assert tolerances.Budget(np.zeros((8, 5))).floor == tolerances.Budget(np.zeros((8, 0))).floor == 1
    assert tolerances.Budget(np.eye(8)[:, :1]).floor == 1


def test_programs_that_are_one_agree_to_nine_digits():
    """Of the largest element, and of the terms that were added up, here of size 1: half of 1e-9 is agreement, twice as much is not."""
    x = np.linspace(-1, 1, 50)
    assert tolerances.agrees(x + 0.5e-9, x)
    assert not tolerances.agrees(x + 2e-9, x)
    deviations = np.random.default_rng(3).choice([-1, 1], (8, 50)) * tolerances.UNIT["float32"]
    assert tolerances.grade(np.full(50, 0.5e-9), deviations, "float64") <= tolerances.agreement_limit()
    assert tolerances.grade(np.full(50, 2e-9), deviations, "float64") > tolerances.agreement_limit()


def test_the_disturbance_follows_every_way_of_writing_a_result():
    """In place, into lists and through composite operations; integers, booleans and copies stay exact."""
    x = torch.linspace(0.1, 1, 50, dtype=torch.float64)

    def run():
        y = x.clone()
        y.mul_(1 / 3)
        parts = torch._foreach_mul([x, x], 1 / 3)
        torch._foreach_mul_(parts, 1 / 7)
        return {
            "in place": y,
            "list": parts[1],
            "composite": F.layer_norm(x, (50,)),
            "copied": x.clone().reshape(5, 10).T,
            "integers": (torch.arange(5) * 3).double(),
            "chosen": torch.where(x > 0.5, x, 0.0),
        }

    numbers = lambda: {name: value.numpy() for name, value in run().items()}
    found = tolerances.scatter(numbers)
    moved = {name for name, deviations in found.items() if deviations.any()}
    assert moved == {"in place", "list", "composite"}
    assert np.array_equal(found["list"], tolerances.scatter(numbers)["list"])
