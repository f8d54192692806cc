"""The suite finds what it should: each fault below, put into an implementation, drives some result past its limit.

A fault is a change of one expression in the source. The changed module is loaded under a name of its own, so that no compiled program is shared; a
source that no longer holds the expression fails here, so that the list keeps up with the code.
"""

import functools
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flax_gpt.kernels
from flax_gpt.kernels import api
from parity_tests.attention_cases import WHOLE, build, run_jax, worst
from parity_tests.attention_oracle import Answer, Problem, solve

HOME = Path(flax_gpt.kernels.__file__).parent

CAUSAL = dict(queries=150, keys=150, limits="causal", width=16)
LONG = dict(queries=40, keys=300, width=16)

FAULTS = {
    "dense": [
        ("scale", "* case.scale", "* (case.scale * 1.001)", {}),
        ("mask flipped", "seen & given.mask", "seen & ~given.mask", dict(mask="whole")),
        ("h % K", "q.reshape(case.batch, case.queries, case.kv_heads, case.group, case.width)",
         "q.reshape(case.batch, case.queries, case.group, case.kv_heads, case.width).swapaxes(2, 3)", {}),
        ("dropped tail", "seen = jnp.ones((1, 1, 1, case.keys), bool)", "seen = (jnp.arange(case.keys) < case.keys - 1).reshape(1, 1, 1, -1)", {}),
        ("dropout unscaled", "weights / (1.0 - case.dropout_rate)", "weights", dict(dropout=0.3)),
        ("dropout by tile", "columns = jnp.arange(case.keys, dtype=jnp.int32)",
         "columns = 1 + jnp.arange(case.keys, dtype=jnp.int32)", dict(dropout=0.3)),
        ("lse without its gradient", "peak + jnp.log(", "peak + (lambda x: jax.lax.stop_gradient(jnp.log(x)))(", {}),
        ("bias without its gradient", "given.bias.astype(dtype)", "jax.lax.stop_gradient(given.bias.astype(dtype))", dict(bias="whole")),
    ],
    "blocked": [
        ("scale", "return q * case.scale if", "return q * (case.scale * 1.001) if", {}),
        ("scale of 16 bits", "scores = scores * self.case.scale", "scores = scores * (self.case.scale * 1.1)", dict(dtype="bfloat16")),
        ("tile off by one", "end = longest if self.right is None else jnp.minimum(longest, last + high + self.right + 1)",
         "end = longest if self.right is None else jnp.minimum(longest, last + high + self.right - 127)", CAUSAL),
        ("whole tiles one too many", "first + low + self.right + 1)\n        whole", "first + low + self.right + 200)\n        whole", CAUSAL),
        ("mask flipped", "seen = self._map(self.mask, at, t, s)", "seen = ~self._map(self.mask, at, t, s)", dict(mask="whole")),
        ("h % K", "x.reshape(case.batch, case.queries, case.kv_heads, case.group, -1).transpose(0, 2, 3, 1, 4)",
         "x.reshape(case.batch, case.queries, case.group, case.kv_heads, -1).transpose(0, 3, 2, 1, 4)", {}),
        ("keys turned wrongly", "k_tile.swapaxes(2, 3), masked", "k_tile.swapaxes(2, 3)[..., ::-1], masked", {}),
        ("missing rescale", "acc * rescale + new", "acc + new", LONG),
        ("total not rescaled", "total = total * rescale + ", "total = total + ", LONG),
        ("dropped tail", "def _tiles_up(length: Any, size: int) -> Any:\n    return (length + size - 1) // size",
         "def _tiles_up(length: Any, size: int) -> Any:\n    return length // size", LONG),
        ("tail counted twice", "fresh=(0, j * cut.keys)", "fresh=(0, 0)", LONG),
        ("causal turned round", "seen &= distance <= self.right", "seen &= distance >= self.right", CAUSAL),
        ("window one short", "seen &= distance >= -self.left", "seen &= distance > -self.left", dict(limits="window")),
        ("lengths one too many", "seen &= columns < self._of_rows", "seen &= columns <= self._of_rows", dict(lengths=True)),
        ("no row sum in the gradient", "weights * (d_weights - view.take(through_rows, at, t=first))", "weights * d_weights", {}),
        ("no lse in the gradient", "_split(case, through_rows - d_lse[..., None])", "_split(case, through_rows)", {}),
        ("dq unscaled", "_merge(case, d_queries * case.scale)", "_merge(case, d_queries)", {}),
        ("dk of the last tile only", "view.add(d_keys, d_k, at, s=begin)", "_write(d_keys, d_k, (*at, begin, 0))", LONG),
        ("dv before dropout", "kept = jnp.where(keep, weights * share, 0.0)", "kept = weights", dict(dropout=0.3)),
        ("bias of a broadcast", "jnp.sum(tile, axis=shared, keepdims=True)", "jnp.max(tile, axis=shared, keepdims=True)", dict(bias="shared")),
        ("offset of the first row for all", "return self._of_rows(self.given.query_offset, at).reshape(-1, 1, 1, 1, 1)",
         "return self.given.query_offset[0].reshape(-1, 1, 1, 1, 1)", dict(limits="causal", offset="rows", keys=30)),
        ("hidden values in the product", "values = _finite(v).transpose", "values = v.transpose", "nan"),
        ("hidden keys in the gradient", "for x in (k, v))\n    d_outs",
         "for x in (jnp.where(False, k, k), v))\n    keys = k.transpose(0, 2, 1, 3)\n    d_outs", "nan"),
    ],
    "pallas_tpu": [
        ("scale", "* case.scale\n        shape", "* (case.scale * 1.01)\n        shape", {}),
        ("tile off by one", "(i + 1) * self.queries + offset + self.right)", "i * self.queries + offset + self.right)", CAUSAL),
        ("h % K", "return b, head, _down(head, case.group), i, j", "return b, head, lax.rem(head, jnp.int32(case.kv_heads)), i, j", {}),
        ("missing rescale", "acc[...] * rescale + _dot", "acc[...] + _dot", dict(queries=20, keys=700)),
        ("dropped tail", "seen = columns < self.length", "seen = columns < plan.columns", {}),
        ("sum over the group missing", '(ids["g"] == 0) & (self.i == 0)', "self.i == 0", {}),
        ("no row sum in the gradient", "weights * (d_weights - _column(self.inputs[6][0, 0]))", "weights * d_weights", {}),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("implementation", "fault"),
    [(name, fault) for name, faults in FAULTS.items() for fault in faults],
    ids=lambda x: x[0] if isinstance(x, tuple) else x,
)
def test_a_fault_is_found(implementation: str, fault: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    name, right, wrong, changes = fault
    source = (HOME / f"{implementation}.py").read_text(encoding="utf-8")
    assert right in source, f"the source of {implementation} changed: {right!r} is gone"
    alias = f"{implementation} with {name}"
    mutant = types.ModuleType(alias)
    monkeypatch.setitem(sys.modules, alias, mutant)
    monkeypatch.setitem(api.HOMES, alias, alias)
    exec(compile(source.replace(right, wrong), alias, "exec"), mutant.__dict__)

    problem, answers = _problem(changes if isinstance(changes, str) else tuple(changes.items()))
    assert _excess(problem, answers, alias) > 1


@functools.cache
def _problem(changes: Any) -> tuple[Problem, dict[str, Answer]]:
    problem = build(WHOLE | (dict(lengths=True) if changes == "nan" else dict(changes)), 11)
    if changes == "nan":
        problem.v[0, -1, 0, 0] = np.nan
        problem.k[0, -2, 1, 1] = np.inf
    return problem, solve(problem, str(problem.q.dtype))


def _excess(problem: Problem, answers: dict[str, Answer], implementation: str) -> float:
    """The largest error over its limit; a bad number has no gradient of its own."""
    found = run_jax(problem, implementation)
    for name, values in (("dk", problem.k), ("dv", problem.v)):
        found[name] = np.where(np.isfinite(values.astype(np.float32)), found[name], answers[name].value)
    return max(worst(problem, found, answers).values())


RIGHT = {(name, fault[3] if isinstance(fault[3], str) else tuple(fault[3].items())) for name, faults in FAULTS.items() for fault in faults}


@pytest.mark.parametrize(("implementation", "changes"), sorted(RIGHT, key=str), ids=str)
def test_without_a_fault_nothing_is_found(implementation: str, changes: Any) -> None:
    assert _excess(*_problem(changes), implementation) <= 1
