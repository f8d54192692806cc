"""Every tolerance of the project, derived from a float64 run and from the arithmetic of the dtype under test.

The question is never "how close?" but "is this error one that rounding explains?". Three steps answer it.

1. One operation. A result in floating point is fl(x) = x (1 + d) + e with |d| ≤ u, the unit roundoff, and |e| at most the smallest normal number,
   because small results may be flushed to zero (Higham 2002, "Accuracy and Stability of Numerical Algorithms", equations 2.4 and 2.8); an error of
   a few such numbers (`TINY`) is none. Elementary functions (exp, erf, …) are allowed `ELEMENTARY` times u. A sum S of n terms t_k, added one after
   another in random order with independent errors of standard deviation u / √3, has partial sums whose squares add up to n (S² / 3 + Σ t_k² / 6) on
   average; its error has the variance

       u² / 3 · n · (S² / 3 + Σ t_k² / 6).

   Relative to S it grows with √n for terms of one sign (Higham & Mary 2019, "A new approach to probabilistic rounding error analysis"), and when
   terms cancel it stays in proportion to them: a gradient that is zero in theory is judged by the size of what was added up. Sums in blocks or trees
   do better. Equal terms that follow each other round alike, so that their errors are not independent (Connolly, Higham & Mary 2021, "Stochastic
   rounding and its probabilistic backward error analysis", section 1): runs of r equal terms multiply the variance by r.

2. The whole program. It is run in float64 with every operation disturbed at random as step 1 allows: Monte Carlo arithmetic (Vignes 1993; Parker
   1997). The `RUNS` results scatter about the undisturbed one as those of a sound program in the smaller dtype would, with each amplification by a
   norm, a softmax or Adam's division in its place; nothing about the model has to be known. To first order the scatter is in proportion to u, so one
   set of runs serves every dtype.

3. The verdict (`Budget`). Two numbers describe an error: its root mean square over that of the scatter, and its worst element over the scatter of
   that element. Each disturbed run is described in the same way against the others; the worst of them is the unit, so the number of elements and
   their dependence on each other are accounted for. An error of grade 1 is as bad as the worst of the simulated runs. The reference may reach
   1 + `FACTOR`; ours may reach 1 + `FACTOR` times the grade of the reference, and never more than the reference may.

   A reference can have next to no error by luck, a scalar easily, while one sound run more is worse than the worst of 8 in one case of fifteen, of
   vectors in one of seven. What ours may always reach is therefore the upper end of a one-sided prediction interval for one run more (Hahn &
   Meeker 1991, "Statistical Intervals", section 4.3), taken from m and s, mean and standard deviation, of each of the two numbers over the n runs:

       m + t(1 - `MISSED`; n - 1) · s · √(1 + 1 / n).

   For a scalar it is three to four times the worst run. Where many elements err the runs are alike, s is small, and the reference has so typical an
   error that 1 + `FACTOR` times its grade is more than this floor.
"""

import collections
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from scipy.special import stdtrit
from torch._decomp import get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

AGREEMENT = 1e-9
"""How far two float64 programs that are one may be apart, over the size of the terms that were added up: see `agreement_limit`."""

COURSE_AGREEMENT = 1e-8
"""How far two float64 trainings of one program may be apart after 200 steps, over the largest element of the tensor.

It is demanded, not derived: a different program is further off after its first step, and rounding reaches it only where differences grow by 10^8, in
a training too unstable to tell anything.
"""

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff: half the distance from 1 to the next number."""

TINY = {"float64": 64 * 2.0**-126, "float32": 64 * 2.0**-126, "bfloat16": 64 * 2.0**-126, "float16": 64 * 2.0**-24}
"""An error that is none: 64 results below the smallest normal number of float32 and bfloat16, flushed to zero. float16, which reaches less far down,
is computed in float32 and keeps its subnormal numbers, which are 2^-24 apart."""

ELEMENTARY = 4.0
"""Error allowed to an elementary function, in unit roundoffs: 2 units in the last place, what both frameworks' vectorised forms keep to."""

RUNS = 8
"""Disturbed runs behind each verdict."""

FACTOR = 3.0
"""How much worse than the reference a result may be, beyond the worst simulated run."""

MISSED = 1e-5
"""Nominal chance that one sound run more is outside its prediction interval.

The interval is exact where the two numbers are normally distributed; they have longer tails, so that beside a reference without error up to 6e-4 of
sound results fail: 8e-5 of scalars, 4e-4 of vectors of 16 independent elements. Beside a reference that errs as ours does 6e-5 of scalars fail and
1e-5 of those vectors: of the thousands of rows that a run of the suite judges, less than one. With 1e-4 four times as many scalars would fail; with
1e-6 the floor of most would be past `reference_limit`, and nothing were gained.
"""

_aten = torch.ops.aten
_COMPOSITE = get_decompositions(
    [
        *(_aten.native_layer_norm, _aten.native_layer_norm_backward, _aten.gelu, _aten.gelu_backward, _aten.logsumexp),
        *(_aten._softmax, _aten._softmax_backward_data, _aten._log_softmax, _aten._log_softmax_backward_data),
        *(_aten.nll_loss_forward, _aten.nll_loss_backward, _aten.native_group_norm, _aten.native_group_norm_backward),
        *(_aten.native_batch_norm, _aten.native_batch_norm_backward, _aten._native_batch_norm_legit_no_training, _aten._native_batch_norm_legit),
    ]
)
_ELEMENTARY = {*"exp expm1 exp2 log log1p log2 erf erfc tanh sin cos sigmoid pow rsqrt".split()}
_EXACT = {
    *"abs alias amax amin arange argmax argmin bernoulli cat clamp clamp_max clamp_min clone constant_pad_nd copy detach embedding".split(),
    *"empty empty_like fill flip floor full full_like gather index index_select lift_fresh masked_fill max max_pool2d_with_indices".split(),
    *"maximum min minimum neg new_empty new_full new_zeros ones ones_like relu repeat roll round scalar_tensor scatter".split(),
    *"select_backward select_scatter sign slice_backward slice_scatter sort stack threshold_backward topk tril triu where zero".split(),
    *"zeros zeros_like _to_copy _unsafe_view".split(),
}


class Rounding(TorchDispatchMode):
    """Disturbs the float64 results of every torch operation as rounding to `dtype` may; differs from seed to seed.

    Results of float16 below its normal numbers are rounded to multiples of 2^-24: half of that is added as an absolute error to what is not 0.
    """

    composing = False
    """Whether an operation is being computed in parts, so that functions called meanwhile are not the program's own."""

    def __init__(self, dtype: str, seed: int):
        super().__init__()
        self.unit = UNIT[dtype]
        self.absolute = 2.0**-25 if dtype == "float16" else 0.0
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parts = _parts(func)
        if parts is not None:
            outer, Rounding.composing = Rounding.composing, True
            try:
                with self:
                    return parts(*args, **kwargs)
            finally:
                Rounding.composing = outer
        name = func.overloadpacket.__name__
        if func.is_view or name.rstrip("_") in _EXACT:
            return func(*args, **kwargs)
        terms = _SUMS.get(name) if any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in args) or name == "_foreach_norm" else None
        counted = terms(func, *args, **kwargs) if terms else None
        out = func(*map(self._constant, args), **{key: self._constant(value) for key, value in kwargs.items()})
        written = args[0] if name.startswith("_foreach") and name.endswith("_") else out
        for place, result in enumerate(written if isinstance(written, tuple | list) else (written,)):
            if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                if counted is None:
                    result.mul_(1 + self._noise(result) * (ELEMENTARY if name.rstrip("_") in _ELEMENTARY else 1.0))
                else:
                    result.add_(_sum_error(result, *counted[place]).nan_to_num_(0.0, 0.0, 0.0).mul_(self._noise(result)))
                if self.absolute:
                    result.add_((result != 0) * self._noise(result) * (self.absolute / self.unit))
        return out

    def _noise(self, result: torch.Tensor) -> torch.Tensor:
        """Uniform within ±unit, of the shape of `result`."""
        return torch.rand(result.shape, dtype=result.dtype, generator=self.generator).mul_(2 * self.unit).sub_(self.unit)

    def _constant(self, value: Any) -> Any:
        """A Python number that float32 cannot hold, rounded at random: one error that all elements share."""
        if not isinstance(value, float) or not math.isfinite(value) or abs(value) > 1e38 or value == float(np.float32(value)):
            return value
        return value * (1 + self.unit * float(torch.rand((), generator=self.generator) * 2 - 1))


@functools.cache
def _parts(func: Any) -> Callable[..., Any] | None:
    """The program of simpler operations that `func` stands for, if any."""
    if func in _COMPOSITE:
        return _COMPOSITE[func]
    return func.decompose if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd) else None


class RoundedPower(float):
    """A number whose powers carry a random error of one float32 unit roundoff.

    torch takes Adam's 1 - β^t in Python, in double precision whatever the dtype of the tensors: the cancellation costs u / (1 - β^t), which counts
    when the tensors are float64 and which no tensor operation shows.
    """

    generator: np.random.Generator

    def __pow__(self, exponent: Any, modulo: Any = None) -> float:
        return float(self) ** float(exponent) * (1 + UNIT["float32"] * self.generator.uniform(-1, 1))

    @classmethod
    def of(cls, value: float, generator: np.random.Generator) -> "RoundedPower":
        power = cls(value)
        power.generator = generator
        return power


def _sum_error(total: torch.Tensor, count: Any, squares: torch.Tensor) -> torch.Tensor:
    return (count * (total.square() / 3 + squares / 6)).sqrt_()


# For each operation that adds up: [(number of terms, sum of their squares)] for each result.


def _matmul(func: Any, a: torch.Tensor, b: torch.Tensor) -> list[Any]:
    return [(a.shape[-1], func(a.square(), b.square()))]


def _affine(func: Any, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float = 1, alpha: float = 1) -> list[Any]:
    return [(a.shape[-1] + 1, func(bias.square(), a.square(), b.square(), beta=beta**2, alpha=alpha**2))]


def _sum(func: Any, x: torch.Tensor, dims: Any = None, *args: Any, **kwargs: Any) -> list[Any]:
    squares = func(x.square(), *(() if dims is None else (dims,)), *args, **kwargs)
    last = -1 if not dims else max(d % x.ndim for d in dims)
    return [(x.numel() / max(squares.numel(), 1) * _run_length(x, last), squares)]


def _run_length(x: torch.Tensor, dim: int) -> float:
    """Mean length of the runs of equal terms along `dim`; disturbed copies of one number, 16 unit roundoffs apart at most, count as equal."""
    if x.ndim == 0 or x.shape[dim] < 2:
        return 1.0
    size = x.shape[dim]
    before, after = x.narrow(dim, 0, size - 1), x.narrow(dim, 1, size - 1)
    alike = (after - before).abs_() < after.abs() * (16 * UNIT["float32"])
    return 1 / (1 - float(alike.double().mean()) * (1 - 1 / size))


def _mean(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> list[Any]:
    squares = func(x.square(), *args, **kwargs)
    count = x.numel() / max(squares.numel(), 1)
    return [(count, squares / count)]


def _var(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> list[Any]:
    """Two passes: the variance adds up squares of differences from the mean."""
    var = func(x, *args, **kwargs)
    count = x.numel() / max((var[0] if isinstance(var, tuple) else var).numel(), 1)
    if not isinstance(var, tuple):
        return [(count, 3 * var.square() / count)]
    return [(count, 3 * var[0].square() / count), (count, (var[0] + var[1].square()) / count)]


def _norm(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> list[Any]:
    """√Σx²: half the relative error of the sum, whose terms have one sign.

    Small terms are not only rounded but lost, all of them, once the sum has grown: float32 vectors keep it in 16 parts, so that terms below u / 16 of
    the whole leave no trace. In the gradient of a large embedding, where few rows are in use, they add up.
    """
    norm = func(x, *args, **kwargs)
    count = x.numel() / max(norm.numel(), 1)
    small = torch.where(x.abs() < x.norm() * math.sqrt(UNIT["float32"] / 16), x, 0.0)
    lost = func(small, *args, **kwargs).square() / (norm + TINY["float32"]) / (2 * UNIT["float32"])
    return [(count / 4, norm.square() + lost.square() * 24 / count)]


def _norms(func: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> list[Any]:
    return [_norm(torch.linalg.vector_norm, x)[0] for x in tensors]


def _svd(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> list[Any]:
    """Backward stable: every singular value of an n-column matrix is off by a modest multiple of u times the largest (Golub & Van Loan 2013, 8.6.1).

    The multiple is √n / √18, that of a sum of n terms whose squares add up to n times the largest. Vectors are not judged.
    """
    values = torch.linalg.svdvals(x)
    count, nothing = float(x.shape[-1]), torch.zeros((), dtype=x.dtype)
    return [(0.0, nothing), (count, values[..., :1].square().expand_as(values)), (0.0, nothing)]


def _convolution(func: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> list[Any]:
    count = weight[0].numel() if not rest[3] else weight.shape[0] * math.prod(weight.shape[2:])
    return [(count + (bias is not None), func(x.square(), weight.square(), None if bias is None else bias.square(), *rest))]


def _convolution_backward(func: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> list[Any]:
    squares = func(grad.square(), x.square(), weight.square(), *rest)
    outputs = grad.numel() / grad.shape[1]
    counts = (weight.numel() / weight.shape[1], outputs, outputs)
    return [(count, torch.zeros(()) if part is None else part) for count, part in zip(counts, squares, strict=True)]


def _running(func: Any, x: torch.Tensor, dim: int, *args: Any, **kwargs: Any) -> list[Any]:
    return [(x.shape[dim], func(x.square(), dim, *args, **kwargs))]


def _pooled(func: Any, x: torch.Tensor, kernel: Any, *args: Any, **kwargs: Any) -> list[Any]:
    count = math.prod(kernel) if len(kernel) > 1 else kernel[0] ** (x.ndim - 2)
    return [(count, func(x.square(), kernel, *args, **kwargs) / count)]


def _added(func: Any, x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> list[Any]:
    return [(1 + func(torch.zeros_like(x), dim, index, torch.ones_like(source)), func(x.square(), dim, index, source.square()))]


def _rows(func: Any, grad: torch.Tensor, indices: torch.Tensor, *args: Any) -> list[Any]:
    return [(func(torch.ones_like(grad), indices, *args), func(grad.square(), indices, *args))]


_SUMS: dict[str, Callable[..., list[Any]]] = {
    **dict(mm=_matmul, bmm=_matmul, mv=_matmul, dot=_matmul, addmm=_affine, baddbmm=_affine, sum=_sum, mean=_mean),
    **dict(var=_var, var_mean=_var, linalg_vector_norm=_norm, _foreach_norm=_norms, embedding_dense_backward=_rows, _linalg_svd=_svd),
    **dict(convolution=_convolution, convolution_backward=_convolution_backward, cumsum=_running, avg_pool1d=_pooled, avg_pool2d=_pooled),
    **dict(scatter_add=_added, index_add=_added),
}

Values = Mapping[str, np.ndarray]


def scatter(run: Callable[..., Values], runs: int = RUNS, *, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Deviations (runs, …) of each named result of `run()`, a program in torch and float64, under rounding to `dtype`.

    They are given per unit roundoff of float32, as `grade` takes them: float32's serve float64 too, while in half precision they no longer are in
    proportion to it and the runs are made for the dtype.
    """

    def disturbed(seed: int) -> Values:
        with Rounding(dtype, seed):
            return run()

    with sdpa_kernel(SDPBackend.MATH):
        found = _deviations(run(), map(disturbed, range(runs)))
    return found if dtype == "float32" else {name: value * (UNIT["float32"] / UNIT[dtype]) for name, value in found.items()}


def scatter_powers(run: Callable[[np.random.Generator | None], Values], runs: int = RUNS) -> dict[str, np.ndarray]:
    """The same for a program that takes a generator for its `RoundedPower`s: what they alone contribute, per float32 unit roundoff."""
    return _deviations(run(None), map(run, map(np.random.default_rng, range(runs))))


def _deviations(exact: Values, disturbed: Iterable[Values]) -> dict[str, np.ndarray]:
    found = collections.defaultdict(list)
    for values in disturbed:
        for name, value in values.items():
            with np.errstate(invalid="ignore"):  # infinity, where a case expects it
                found[name].append(value - exact[name])
    return {name: np.stack(values) for name, values in found.items()}


class Budget:
    """What the simulated `deviations` (runs, …), made for float32, say of an error of the same shape (…)."""

    def __init__(self, deviations: np.ndarray):
        self.deviations = np.asarray(deviations, np.float64)

    @functools.cached_property
    def expected(self) -> np.ndarray:
        """The two numbers of each run against the others, (runs, 2)."""
        return np.stack([_describe(one, np.delete(self.deviations, run, axis=0)) for run, one in enumerate(self.deviations)])

    def grade(self, error: np.ndarray, dtype: str) -> float:
        """How bad `error` in `dtype` is in units of the worst run."""
        error = np.where(np.abs(error) <= TINY[dtype], 0.0, np.asarray(error, np.float64))
        if error.size == 0 or not error.any():
            return 0.0
        if not np.isfinite(error).all():
            return float("inf")
        error = error * (UNIT["float32"] / UNIT[dtype])
        return float(np.max(_over(_describe(error, self.deviations), np.max(self.expected, axis=0))))

    @property
    def floor(self) -> float:
        """The grade that one sound run more stays below, but for a chance of `MISSED`; at least 1."""
        unit = np.max(self.expected, axis=0) if self.deviations.size else np.zeros(2)
        told = np.isfinite(unit) & (unit > 0)
        if not told.any():
            return 1.0
        relative, runs = self.expected[:, told] / unit[told], len(self.deviations)
        spread = float(stdtrit(runs - 1, 1 - MISSED)) * np.std(relative, axis=0, ddof=1) * math.sqrt(1 + 1 / runs)
        return max(1.0, float(np.max(np.mean(relative, axis=0) + spread)))


def grade(error: np.ndarray, deviations: np.ndarray, dtype: str) -> float:
    """How bad `error` (…) in `dtype` is in units of the worst of the simulated `deviations` (runs, …), made for float32."""
    return Budget(deviations).grade(error, dtype)


def _describe(error: np.ndarray, deviations: np.ndarray) -> np.ndarray:
    """Root mean square over that of the deviations, and worst element over the deviation of that element."""
    spread = np.sqrt(np.mean(np.square(deviations), axis=0))
    return np.array([_over(_rms(error), _rms(spread)), np.max(_over(np.abs(error), spread))])


def _over(a: Any, b: Any) -> Any:
    """a / b where 0 / 0 is 0: what must be exact, and is, is no error."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(a == 0, 0.0, np.divide(a, b))


def _rms(x: np.ndarray) -> float:
    """Root mean square without underflow."""
    largest = float(np.max(np.abs(x)))
    return largest * float(np.sqrt(np.mean(np.square(x / largest)))) if largest > 0 else 0.0


def reference_limit() -> float:
    """The grade that the reference, or any program judged alone, may reach."""
    return 1.0 + FACTOR


def our_limit(reference: float, floor: float) -> float:
    """The grade that ours may reach beside a reference of this grade, where one sound run more may be as bad as `floor`: see `Budget.floor`."""
    return min(max(1.0 + FACTOR * reference, floor), reference_limit())


def agreement_limit() -> float:
    """The grade at which a float64 result is off by `AGREEMENT` of the size of the terms that were added up.

    The worst simulated deviation over the unit roundoff is that size, with every amplification on the way; grades count such deviations.
    """
    return AGREEMENT / UNIT["float64"]


def agrees(found: Any, expected: Any, dtype: str = "float64") -> bool:
    """Whether a hypothesis about a fault brings one array to the other: to `AGREEMENT` of the largest element, or to a narrower dtype's rounding."""
    bound = AGREEMENT if dtype == "float64" else reference_limit() * UNIT[dtype]
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape or not np.array_equal(np.isfinite(found), np.isfinite(expected)):
        return False
    finite = np.isfinite(expected)
    size = float(np.max(np.abs(expected[finite]), initial=0.0))
    return bool(size > 0 and np.max(np.abs(found[finite] - expected[finite]), initial=0.0) <= bound * size)


def mass_error(count: int, dtype: str = "float32") -> float:
    """Bound on the error of sums of up to `count` probabilities: each an exponential over a sum of as many (Higham 2002, equation 3.5)."""
    return (2 * count + ELEMENTARY) * UNIT[dtype]


def noise_limits(dtype: str = "float32") -> dict[str, float]:
    """rtol and atol of Gumbel noise g = −log(−log u) against its exact value.

    The outer logarithm errs by `ELEMENTARY` unit roundoffs of g; an inner one that errs by as many of itself moves g by as many, whatever g.
    """
    return {"rtol": ELEMENTARY * UNIT[dtype], "atol": ELEMENTARY * UNIT[dtype]}


def drawn_limits(dtype: str, *, same_x: bool = False) -> dict[str, float]:
    """rtol and atol of two libraries' normal or uniform numbers c √2 erf⁻¹(x), c at most 1, from equal bits, of which x = b w + a is made.

    Relative: each erf⁻¹ errs by `ELEMENTARY` unit roundoffs, and each program rounds two products. Absolute: near x = 0 the product b w, about 1, is
    rounded in one program and fused in the other, or rounded in both, once each; there √2 erf⁻¹ has the slope √(π / 2).
    same_x: both round b w + a alike, as they do where neither fuses, which leaves the relative part.
    """
    return {"rtol": (2 * ELEMENTARY + 4) * UNIT[dtype], "atol": 0.0 if same_x else 2 * math.sqrt(math.pi / 2) * UNIT[dtype]}


def library_ulps() -> float:
    """Units in the last place that may lie between an elementary function of two libraries: each errs by half as many, a unit being two roundoffs."""
    return ELEMENTARY
