"""What describes an error beside its grade: its worst element, units in the last place, direction, and what it does to a distribution over tokens."""

from typing import NamedTuple

import numpy as np

from parity_tests import tolerances

TOP = 5
"""How many of the most likely tokens `top_k` compares, or all where there are fewer."""

_LOWEST = {"float64": -1021, "float32": -125, "bfloat16": -125, "float16": -13}
"""Exponents, as frexp counts them, of the smallest normal numbers: below them the units in the last place stay as they are."""


class Worst(NamedTuple):
    """The element with the largest error."""

    index: tuple[int, ...]
    value: float
    expected: float
    """Its float64 value."""


def worst(value: np.ndarray, truth: np.ndarray) -> Worst | None:
    """The element that is furthest off, the first one of those that are not finite on one side alone; None for empty arrays."""
    if not truth.size:
        return None
    value = np.asarray(value, np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.where(same(value, truth), 0.0, np.abs(value - truth))
    index = np.unravel_index(int(np.argmax(np.where(np.isnan(distance), np.inf, distance))), truth.shape)
    return Worst(tuple(map(int, index)), float(value[index]), float(truth[index]))


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where both are the same number, or the same kind of none."""
    return (a == b) | (np.isnan(a) & np.isnan(b))


def ulp(x: float, dtype: str) -> float:
    """The unit in the last place of x: the distance between the numbers of `dtype` around it."""
    exponent = int(np.frexp(abs(x))[1]) if x else _LOWEST[dtype]
    return float(np.ldexp(tolerances.UNIT[dtype], max(exponent, _LOWEST[dtype])))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of the angle between two arrays read as vectors; 1 when both are zero, 0 when one is."""
    a, b = _scaled(a), _scaled(b)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    if lengths == 0:
        return float(not a.any() and not b.any())
    return float(np.clip(np.vdot(a, b) / lengths, -1, 1))


def divergence(logits: np.ndarray, truth: np.ndarray) -> float:
    """Mean over rows of KL(softmax(truth) ‖ softmax(logits)) in nats, over the last axis (Kullback & Leibler 1951)."""
    expected, found = _log_softmax(truth), _log_softmax(logits)
    with np.errstate(invalid="ignore"):
        terms = np.where(np.exp(expected) > 0, np.exp(expected) * (expected - found), 0.0)
    return float(np.mean(terms.sum(-1)))


def top_k(logits: np.ndarray, truth: np.ndarray, k: int = TOP) -> float:
    """Mean over rows of the share of the k largest elements of `truth`, along the last axis, that are also among the k largest of `logits`."""
    k = min(k, truth.shape[-1])
    found, expected = (np.sort(np.argsort(-x, axis=-1, kind="stable")[..., :k], axis=-1) for x in (np.asarray(logits, np.float64), truth))
    return float(np.mean((found[..., :, None] == expected[..., None, :]).any(-1)))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _scaled(x: np.ndarray) -> np.ndarray:
    """As float64 with a largest element of 1, so that squares do not underflow."""
    x = np.ravel(np.asarray(x, np.float64))
    largest = float(np.max(np.abs(x), initial=0.0))
    return x / largest if largest > 0 else x
