"""What kind of fault the first difference looks like: each known one is tried on the numbers, and told only when it explains them.

A hypothesis is confirmed when it brings one side to the other, or reproduces both sides, to the agreement that two float64 runs of one program must
reach. Names of modules decide nothing. Where no known fault explains the numbers, nothing is told.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from parity_tests import tolerances
from parity_tests.adapters import kind_of
from parity_tests.taps import path_of
from parity_tests.tolerances import AGREEMENT, agrees

Values = Mapping[str, np.ndarray]


def weights(mine: np.ndarray, name: str, sources: Mapping[str, Any], theirs: Values) -> str:
    """Why a weight differs from the one that it stands for."""
    with np.errstate(all="ignore"):
        return _weights(mine, name, sources, theirs)


def _weights(mine: np.ndarray, name: str, sources: Mapping[str, Any], theirs: Values) -> str:
    other = sources[name].of(theirs)
    if mine.ndim == 2 and mine.shape == mine.shape[::-1] and np.array_equal(mine, other.T.astype(mine.dtype)):
        return "transposed kernel: ours holds the transpose"
    for another, source in sources.items():
        if another != name and source.shape == mine.shape and mine.any() and np.array_equal(mine, source.of(theirs).astype(mine.dtype)):
            return f"exchanged: ours holds what {another} should, {source} of theirs"
    for dtype in ("bfloat16", "float16"):
        if np.array_equal(mine, other.astype(dtype).astype(mine.dtype)):
            return f"rounded: ours went through {dtype}"
    if (factor := _ratio(mine.astype(np.float64), other.astype(np.float64), "float32")) is not None:
        return f"scale: ours is {_number(factor, mine.shape)} times theirs"
    if mine.ndim and np.array_equal(np.sort(mine, axis=None), np.sort(other.astype(mine.dtype), axis=None)):
        return "reordered: ours holds the same numbers in another order"
    return ""


def explain(look: Any, tap: str | None, rows: list[Any]) -> str:
    """The known fault that explains the first tap that differs, or, where every tap agrees, the gradients that do; "" for none.

    look: a `ports.Inside` in float64.
    """
    if tap is None:
        return _untied(look, rows)
    with np.errstate(all="ignore"):  # NaN and infinity are among what is looked at
        return next(filter(None, (hypothesis(look, tap) for hypothesis in HYPOTHESES)), "")


def _sides(look: Any, tap: str) -> tuple[np.ndarray, np.ndarray]:
    return look.ours[tap], look.truth[tap]


def _before(look: Any, tap: str) -> Iterator[tuple[str, np.ndarray]]:
    """The taps of ours before this one, all of which agree with theirs, the nearest first."""
    names = list(look.ours)
    yield from ((name, look.ours[name]) for name in reversed(names[: names.index(tap)]))


def _same_size(look: Any, tap: str) -> Iterator[tuple[str, np.ndarray]]:
    shape = look.ours[tap].shape
    yield from ((name, value.reshape(shape)) for name, value in _before(look, tap) if value.size == look.ours[tap].size and np.isfinite(value).all())


def _narrow(look: Any, tap: str) -> str:
    """All elements of one side are numbers of a narrower dtype, and as far from the other as its rounding."""
    ours, theirs = _sides(look, tap)
    for side, value, other in (("ours", ours, theirs), ("theirs", theirs, ours)):
        for dtype in ("bfloat16", "float16", "float32"):
            narrow, wide = (np.array_equal(x, x.astype(dtype).astype(np.float64), equal_nan=True) for x in (value, other))
            if narrow and not wide and agrees(value, other, dtype):
                return f"narrow arithmetic: {side} is rounded to {dtype} here, though all is asked in float64"
    return ""


def _rounded(look: Any, tap: str) -> str:
    """What float32's rounding makes of this value explains the difference of two float64 runs."""
    ours, theirs = _sides(look, tap)
    finite = np.isfinite(ours) & np.isfinite(theirs)
    noise = np.where(np.isfinite(look.scattered[tap]), look.scattered[tap], 0.0)
    grade = tolerances.grade(np.where(finite, ours, 0.0) - np.where(finite, theirs, 0.0), noise, "float32")
    told = "narrow arithmetic: the difference is what rounding to float32 makes: one side computes a part, or a constant, in float32"
    return told if grade <= tolerances.reference_limit() else ""


def _dropped(look: Any, tap: str) -> str:
    """Some elements are 0 and all others larger by one factor."""
    ours, theirs = _sides(look, tap)
    for side, value, other in (("ours", ours, theirs), ("theirs", theirs, ours)):
        lost = (value == 0) & (other != 0)
        kept = (value != 0) & (other != 0)
        if lost.any() and kept.any():
            factor = _ratio(value[kept], other[kept])
            if factor is not None and factor > 1 and not np.any((value != 0) & (other == 0)):
                return f"dropout active in {side}: {lost.mean():.0%} of the elements are 0, the others divided by {1 / factor:.4g}"
    return ""


def _scaled(look: Any, tap: str) -> str:
    ours, theirs = _sides(look, tap)
    factor = _ratio(ours, theirs)
    return "" if factor is None else f"scale: ours is {_number(factor, _sizes(look))} times theirs"


def _sizes(look: Any) -> tuple[int, ...]:
    """Lengths of axes in the program, which known scales are made of."""
    return tuple(sorted({size for value in look.ours.values() for size in value.shape}))


def _transposed(look: Any, tap: str) -> str:
    """A linear map that used the transpose of its matrix."""
    path = path_of(tap)
    module = look.case.ours.modules.get(path)
    given, kernel = look.ours.get(f"{path}:input"), look.case.values.get(f"{path}.kernel")
    if module is None or kind_of(module) != "linear" or given is None or kernel is None or kernel.ndim != 2 or kernel.shape != kernel.shape[::-1]:
        return ""
    ours, theirs = _sides(look, tap)
    bias = look.case.values.get(f"{path}.bias", np.zeros(()))
    given, kernel, bias = (np.asarray(x, np.float64) for x in (given, kernel, bias))
    right, turned = given @ kernel + bias, given @ kernel.T + bias
    for side, value, other in (("ours", ours, theirs), ("theirs", theirs, ours)):
        if agrees(value, turned) and agrees(other, right):
            return f"transposed kernel: {side} multiplies by the transpose"
    return ""


def _bias(look: Any, tap: str) -> str:
    """The difference is a bias of the module, once for every row."""
    path = path_of(tap)
    bias = look.case.values.get(f"{path}.bias")
    ours, theirs = _sides(look, tap)
    if bias is None or not ours.ndim or bias.size != ours.shape[-1]:
        return ""
    spread = np.broadcast_to(np.asarray(bias, np.float64).reshape(-1), ours.shape)
    if agrees(ours + spread, theirs):
        return "bias: ours does not add it"
    return "bias: theirs does not add it" if agrees(theirs + spread, ours) else ""


def _normalised(look: Any, tap: str) -> str:
    """A norm with another epsilon, another variance, or another kind of norm: solved from its input and its outputs."""
    path = path_of(tap)
    module = look.case.ours.modules.get(path)
    given = look.ours.get(f"{path}:input")
    if module is None or kind_of(module) != "norm" or given is None or given.shape != look.ours[tap].shape or "BatchNorm" in type(module).__name__:
        return ""
    scale = np.asarray(look.case.values.get(f"{path}.scale", 1.0), np.float64)
    bias = np.asarray(look.case.values.get(f"{path}.bias", 0.0), np.float64)
    forms = [_norm_form(given, (value - bias) / scale) for value in _sides(look, tap)]
    if None in forms or forms[0] == forms[1]:
        return ""
    return f"{'epsilon' if forms[0][0] == forms[1][0] else 'norm'}: ours {_told(forms[0])}, theirs {_told(forms[1])}"


def _norm_form(x: np.ndarray, y: np.ndarray) -> tuple[str, float] | None:
    """(kind, epsilon) of y as a norm of x over the last axis."""
    size = x.shape[-1]
    centred = x - x.mean(-1, keepdims=True)
    for kind, top, variance in (
        ("layer norm", centred, np.square(centred).mean(-1, keepdims=True)),
        ("RMS norm", x, np.square(x).mean(-1, keepdims=True)),
        ("layer norm with the unbiased variance", centred, np.square(centred).sum(-1, keepdims=True) / max(size - 1, 1)),
    ):
        squares = (y * y).sum(-1, keepdims=True)
        if not squares.all():
            continue
        found = (top * top).sum(-1, keepdims=True) / squares - variance  # from y² (variance + epsilon) = top²
        epsilon = float(np.median(found))
        epsilon = 0.0 if abs(epsilon) <= AGREEMENT * float(variance.max()) else float(f"{epsilon:.6g}")
        if epsilon >= 0 and np.all(variance + epsilon > 0) and agrees(y, top / np.sqrt(variance + epsilon)):
            return kind, epsilon
    return None


def _told(form: tuple[str, float]) -> str:
    return f"is a {form[0]} with epsilon {form[1]:g}"


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


FORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the exact (erf) GELU": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "the tanh approximation of GELU": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "the sigmoid approximation of GELU": lambda x: x * _sigmoid(1.702 * x),
    "ReLU": lambda x: np.maximum(x, 0),
    "SiLU": lambda x: x * _sigmoid(x),
    "tanh": np.tanh,
    "the sigmoid": _sigmoid,
    "softplus": lambda x: np.logaddexp(0, x),
    "ELU": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "leaky ReLU of slope 0.01": lambda x: np.where(x > 0, x, 0.01 * x),
    "leaky ReLU of slope 0.2": lambda x: np.where(x > 0, x, 0.2 * x),
    "ReLU squared": lambda x: np.square(np.maximum(x, 0)),
    "nothing": lambda x: x,
}


def _activated(look: Any, tap: str) -> str:
    """Both sides are activations of one earlier value, and not the same one."""
    ours, theirs = _sides(look, tap)
    for _, value in _same_size(look, tap):
        with np.errstate(over="ignore"):
            forms = [next((name for name, form in FORMS.items() if agrees(side, form(value))), None) for side in (ours, theirs)]
        if None not in forms and forms[0] != forms[1]:
            return f"activation: ours is {forms[0]}, theirs {forms[1]}"
    return ""


def _masked(look: Any, tap: str) -> str:
    """What is hidden, 0 in a map and −∞ in scores, on one side and not on the other."""
    ours, theirs = _sides(look, tap)
    if ours.ndim < 2:
        return ""
    if ":map" in tap:
        seen = [value != 0 for value in (ours, theirs)]
    elif ":scores" in tap:
        seen = [np.isfinite(value) for value in (ours, theirs)]
    else:
        return ""
    if np.array_equal(*seen):
        if ":map" in tap and ours.shape[-1] == ours.shape[-2]:
            sums = [np.abs(value.sum(-2) - 1).max() for value in (ours, theirs)]
            for side, off, other in (("ours", sums[0], sums[1]), ("theirs", sums[1], sums[0])):
                if off <= AGREEMENT < other:
                    return f"softmax axis: {side} is normalised over the queries"
        return ""
    if np.array_equal(seen[0], ~seen[1]):
        return "mask polarity: ours attends to exactly what theirs hides"
    for side, one, other in (("ours", *seen), ("theirs", *reversed(seen))):
        if one.all():
            return f"mask: {side} hides nothing"
        if np.array_equal(one, np.swapaxes(other, -1, -2)) if one.shape[-1] == one.shape[-2] else False:
            return "mask: queries and keys are exchanged"
        if np.array_equal(one[..., :, 1:], other[..., :, :-1]) and not np.array_equal(one[..., :-1, :], other[..., 1:, :]):
            return f"mask: that of {side} is shifted by one key"
        if np.array_equal(one[..., :-1, :], other[..., 1:, :]) or np.array_equal(one[..., :, 1:], other[..., :, :-1]):
            return f"mask off by one: {side} sees one position more"
        if (one & ~other).any() and not (other & ~one).any():
            return f"mask: {side} sees more, {one.sum() - other.sum()} of {one.size} places"
    return "mask: the two hide different places"


def _unchanged(look: Any, tap: str) -> str:
    ours, theirs = _sides(look, tap)
    for name, value in _same_size(look, tap):
        for side, one in (("ours", ours), ("theirs", theirs)):
            if agrees(one, value):
                return f"left out: {side} is still the value of {name}, unchanged"
    return ""


def _added(look: Any, tap: str) -> str:
    """The difference is an earlier value: a residual or positions that one side does not add."""
    ours, theirs = _sides(look, tap)
    with np.errstate(invalid="ignore"):
        difference = theirs - ours
    if not np.isfinite(difference).all():
        return ""
    for name, value in _same_size(look, tap):
        if agrees(difference, value):
            return f"addition: ours does not add {name}"
        if agrees(-difference, value):
            return f"addition: ours adds {name} and theirs does not"
        if (factor := _ratio(difference, value)) is not None:
            return f"scale: {name} enters theirs {_number(1 + factor, _sizes(look))} times as large as ours"
    if ours.ndim >= 3 and ours.shape[0] > 1 and agrees(difference, np.broadcast_to(difference[:1], difference.shape)):
        for name, value in look.case.values.items():
            if value.size >= difference[0].size and value.shape[-1:] == difference.shape[-1:]:
                table = np.asarray(value, np.float64).reshape(-1, value.shape[-1])[: difference.shape[1]]
                for sign, told in ((1, f"ours does not add {name}"), (-1, f"ours adds {name} and theirs does not")):
                    if agrees(sign * difference[0], table):
                        return f"addition: {told}"
        return "addition: the difference is the same for every row of the batch, as of positions or a bias"
    return ""


def _rotary(look: Any, tap: str) -> str:
    """A rotation keeps the length of each pair: which pairs kept theirs tells the layout."""
    ours, theirs = _sides(look, tap)
    if ours.ndim < 3 or ours.shape[-1] % 2:
        return ""
    for _, value in _same_size(look, tap):
        layouts = [_layout(side, value) for side in (ours, theirs)]
        if None not in layouts and layouts[0] != layouts[1]:
            return f"RoPE layout: ours turns {layouts[0]}, theirs {layouts[1]}"
        if None not in layouts:
            return "RoPE angles: both turn the same pairs, by different angles"
    return ""


def _layout(turned: np.ndarray, value: np.ndarray) -> str | None:
    if agrees(turned, value):
        return None
    half, pairs = (lambda x: np.split(x, 2, -1)), (lambda x: (x[..., 0::2], x[..., 1::2]))
    for name, split in (("halves", half), ("neighbours", pairs)):
        if agrees(np.hypot(*split(turned)), np.hypot(*split(value))):
            return name
    return None


def _heads(look: Any, tap: str) -> str:
    """Slices along one axis that agree with others of theirs: heads in another order, or keys and values of another group."""
    ours, theirs = _sides(look, tap)
    told = _grouping(look, tap)
    if told:
        return told
    for axis in range(1, ours.ndim):
        if 2 <= ours.shape[axis] <= 64 and ours.ndim >= 3:
            mine, others = np.moveaxis(ours, axis, 0), np.moveaxis(theirs, axis, 0)
            order = [next((j for j, other in enumerate(others) if agrees(one, other)), None) for one in mine]
            if None not in order and sorted(order) == list(range(len(order))):
                shift = {(i - j) for i, j in enumerate(order)}
                which = "heads" if ours.ndim == 4 else "positions or columns"
                told = f"ours holds {order} of theirs" if len(order) <= 16 else "ours holds those of theirs in another order"
                return f"order of {which}: along axis {axis} {told}" if len(shift) > 1 or ours.ndim == 4 else ""
    return ""


def _grouping(look: Any, tap: str) -> str:
    """Scores of grouped queries, computed again from the queries and keys before them in both groupings (Ainslie et al. 2023)."""
    ours, theirs = _sides(look, tap)
    if ":scores" not in tap or ours.ndim != 4:
        return ""
    B, H, T, S = ours.shape
    queries = [x for _, x in _before(look, tap) if x.ndim == 4 and x.shape[:3] == (B, T, H)]
    keys = [x for _, x in _before(look, tap) if x.ndim == 4 and x.shape[:2] == (B, S) and 1 < x.shape[2] < H and H % x.shape[2] == 0]
    for q in queries[:1]:
        for k in keys[:2]:
            K = k.shape[2]
            if q.shape[-1] != k.shape[-1]:
                continue
            scores = {
                "h // (H / K)": np.einsum("bthd,bshd->bhts", q, np.repeat(k, H // K, 2)),
                "h % K": np.einsum("bthd,bshd->bhts", q, np.tile(k, (1, 1, H // K, 1))),
            }
            read = lambda side, scores=scores: next((name for name, value in scores.items() if _ratio(side, value) is not None), None)
            found = read(ours), read(theirs)
            if None not in found and found[0] != found[1]:
                return f"head grouping: query head h reads key head {found[0]} in ours, {found[1]} in theirs"
    return ""


def _split_heads(look: Any, tap: str) -> str:
    """The last axis split as (Dh, H) where the other side splits it as (H, Dh), or the like for two neighbouring axes."""
    ours, theirs = _sides(look, tap)
    for axis in range(1, ours.ndim):
        size = ours.shape[axis]
        for heads in (n for n in range(2, size) if size % n == 0):
            cut = (*theirs.shape[:axis], heads, size // heads, *theirs.shape[axis + 1 :])
            if agrees(ours, np.swapaxes(theirs.reshape(cut), axis, axis + 1).reshape(ours.shape)):
                return (
                    f"head split: axis {axis} is read as {size // heads} × {heads} in ours and as {heads} × {size // heads} in theirs, or the reverse"
                )
    if ours.ndim >= 2 and ours.shape[-1] == ours.shape[-2] and agrees(ours, np.swapaxes(theirs, -1, -2)):
        return "transposed: the last two axes are exchanged"
    return ""


def _shifted(look: Any, tap: str) -> str:
    ours, theirs = _sides(look, tap)
    if ours.ndim >= 3 and ours.shape[1] > 2:
        if agrees(ours[:, 1:], theirs[:, :-1]):
            return "shift: position t of ours is position t - 1 of theirs"
        if agrees(ours[:, :-1], theirs[:, 1:]):
            return "shift: position t of ours is position t + 1 of theirs"
    return ""


def _at_the_border(look: Any, tap: str) -> str:
    """A convolution whose inner places agree."""
    ours, theirs = _sides(look, tap)
    if ours.ndim == 4 and min(ours.shape[1:3]) > 2:
        inner = (slice(None), slice(1, -1), slice(1, -1))
        if agrees(ours[inner], theirs[inner]):
            return "padding: only the outermost places differ"
    return ""


def _reordered(look: Any, tap: str) -> str:
    ours, theirs = _sides(look, tap)
    if ours.ndim and ours.shape and np.ptp(ours) > 0 and agrees(np.sort(ours, axis=None), np.sort(theirs, axis=None)):
        return "reordered: the same numbers in another order, as after a reshape that should have been a transpose"
    return ""


HYPOTHESES = (
    *(_masked, _dropped, _narrow, _scaled, _transposed, _bias, _normalised, _activated, _rotary, _heads, _split_heads, _added),
    *(_unchanged, _shifted, _at_the_border, _reordered, _rounded),
)


def _untied(look: Any, rows: list[Any]) -> str:
    """Leaves of ours that are one parameter of theirs: their gradients add up to its gradient."""
    case = look.case
    groups: dict[str, list[str]] = {}
    for name, source in case.sources.items():
        if len(source.parts) == 1:
            part = source.parts[0].name
            groups.setdefault(case.theirs.aliases.get(part, part), []).append(name)
    failed = {row.name for row in rows if not row.ok}
    for name, leaves in groups.items():
        if len(leaves) > 1 and all(f"grads/{leaf}" in failed for leaf in leaves):
            ours, theirs = case.our_results("float64"), case.their_results("float64")
            axes = {leaf: np.argsort(case.sources[leaf].axes) for leaf in leaves}
            total = sum(ours[f"grads/{leaf}"].transpose(axes[leaf]) for leaf in leaves)
            if agrees(total, theirs[f"grads/{leaves[0]}"].transpose(axes[leaves[0]])):
                return f"untied weights: {' and '.join(leaves)} are one parameter of theirs, {name}; their gradients add up to its gradient"
    return ""


def _ratio(a: np.ndarray, b: np.ndarray, dtype: str = "float64") -> float | None:
    """The constant c ≠ 1 with a = c · b wherever b is finite, or None."""
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return None
    finite = np.isfinite(b)
    x, y = a[finite], b[finite]
    norm = float(np.vdot(y, y))
    if not x.size or norm == 0:
        return None
    factor = float(np.vdot(x, y)) / norm
    if factor == 0 or agrees(x, y, dtype):
        return None
    return factor if agrees(x, factor * y, dtype) else None


def _number(factor: float, sizes: tuple[int, ...]) -> str:
    """The factor, also as a root or a power of a length that occurs, where it is one."""
    lengths = sorted({n for n in sizes if n > 1})
    roots = [form for n in lengths for form in ((f"√{n}", math.sqrt(n)), (f"1/√{n}", 1 / math.sqrt(n)))]
    for text, value in [*roots, *((f"1/{n}", 1 / n) for n in lengths)]:
        if math.isclose(factor, value, rel_tol=AGREEMENT):
            return f"{factor:.6g} ({text})"
    return f"{factor:.6g}"
