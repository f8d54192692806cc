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
TALL = dict(queries=300, keys=20, width=16)

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
        ("scale of 16 bits", "products * self.case.scale", "products * (self.case.scale * 1.1)", dict(dtype="bfloat16")),
        ("strip off by one", "end = min(end, t[0] + t[1] + self.case.offset + self.right)",
         "end = min(end, t[0] + t[1] - 1 + self.case.offset + self.right)", CAUSAL),
        ("strip begins one late", "begin = max(begin, t[0] + self.case.offset - self.left)",
         "begin = max(begin, t[0] + 1 + self.case.offset - self.left)", CAUSAL | dict(limits="causal_window")),
        ("whole tiles one too many", "known and most <= self.right", "known and most <= self.right + 200", CAUSAL),
        ("mask flipped", "flat(self._map(self.mask, at, t, s))", "~flat(self._map(self.mask, at, t, s))", dict(mask="whole")),
        ("h % K", "x.reshape(case.batch, case.queries, case.kv_heads, case.group, -1).transpose(0, 2, 3, 1, 4)",
         "x.reshape(case.batch, case.queries, case.group, case.kv_heads, -1).transpose(0, 3, 2, 1, 4)", {}),
        ("keys turned wrongly", "finite_keys.swapaxes(2, 3))", "finite_keys.swapaxes(2, 3)[..., ::-1])", {}),
        ("no peak", "powers = jnp.exp(scores - peak)", "powers = jnp.exp(scores)", LONG),
        ("dropped tail", "state, parts = body((first + length - rest, rest), state)\n",
         "parts = tuple(0 * x for x in body((first + length - rest, rest), state)[1])\n", TALL),
        ("dropped tail in the gradient", "state, parts = body((first + length - rest, rest), state)\n",
         "parts = body((first + length - rest, rest), state)[1]\n", TALL),
        ("tiles of a strip mixed up", "jnp.moveaxis(x, 0, 3)", "jnp.moveaxis(x[::-1], 0, 3)", TALL),
        ("causal turned round", "<= self.right\n        if", ">= self.right\n        if", CAUSAL),
        ("window one short", "self._offsets(at)[..., 0] >= -self.left", "self._offsets(at)[..., 0] > -self.left", dict(limits="window")),
        ("lengths one too many", "columns < self._of_rows", "columns <= self._of_rows", dict(lengths=True)),
        ("no row sum in the gradient", "powers * (d_powers - on_rows(through))", "powers * d_powers", {}),
        ("no lse in the gradient", "through_rows = -d_lse[..., None]", "through_rows = 0.0 * d_lse[..., None]", {}),
        ("dq unscaled", "_merge(case, d_q * case.scale)", "_merge(case, d_q)", {}),
        ("dk of the last tile only", "_write(x, _part(x, axis, span) + part,", "_write(x, part,", TALL),
        ("dk of the last strip only", "_write(x, _part(x, axis, span) + part,", "_write(x, part,", CAUSAL),
        ("another total in the gradient", "total = total[:, :, 0]", "total = 1.001 * total[:, :, 0]", {}),
        ("a kept total of another tile", "_part(x, 3, t))[..., 0] for x in softmax", "_part(x, 3, (0, t[1])))[..., 0] for x in softmax",
         dict(queries=600, keys=600, limits="causal", width=16)),
        ("finite, hidden keys seen", "jnp.where(seen, 0.0 if bias is None else bias, -jnp.inf)",
         "jnp.where(seen, 0.0 if bias is None else bias, -2.0)", CAUSAL | dict(assume_finite=True)),
        ("finite, bias left out", "0.0 if bias is None else bias", "0.0", dict(bias="whole", mask="whole", assume_finite=True)),
        ("finite, strip off by one", "end = min(end, t[0] + t[1] + self.case.offset + self.right)",
         "end = min(end, t[0] + t[1] - 1 + self.case.offset + self.right)", CAUSAL | dict(assume_finite=True)),
        ("finite, another total in the gradient", "powers / _spread(case, total, powers.shape)",
         "powers / _spread(case, 1.001 * total, powers.shape)", dict(assume_finite=True)),
        ("finite, no row sum in the gradient", "through += jnp.sum(powers * d_powers, axis=2)", "through += 0.0", dict(assume_finite=True)),
        ("finite, row sum without its dropout", "through += jnp.sum(powers * d_powers, axis=2)",
         "through += jnp.sum(kept * d_powers, axis=2)", dict(dropout=0.3, assume_finite=True)),
        ("finite, one hidden key", " or x.shape[axis] == 1:", ":", dict(keys=1, lengths=True, assume_finite=True)),
        ("finite, nothing dropped", "return x * keep.astype(x.dtype) if _joined(case)", "return x if _joined(case)",
         dict(dropout=0.3, assume_finite=True)),
        ("dv before dropout", "_kept(case, powers * share, keep)", "powers", dict(dropout=0.3)),
        ("bias of a broadcast", "jnp.sum(tile, axis=shared, keepdims=True)", "jnp.max(tile, axis=shared, keepdims=True)", dict(bias="shared")),
        ("offset of the first row for all", "return self._of_rows(self.given.query_offset, at).reshape(-1, 1, 1, 1, 1)",
         "return self.given.query_offset[0].reshape(-1, 1, 1, 1, 1)", dict(limits="causal", offset="rows", keys=30)),
        ("hidden values in the product", "_turn_heads(_finite(case, v))\n\n    def", "_turn_heads(v)\n\n    def", "nan"),
        ("hidden keys in the gradient", "_turn_heads(_finite(case, k))", "_turn_heads(k)", "nan"),
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

    assert _excess(changes, alias) > 1


@functools.cache
def _problem(changes: Any) -> tuple[Problem, dict[str, Answer]]:
    problem = build(WHOLE | (dict(lengths=True) if changes == "nan" else dict(changes)), 11)
    if changes == "nan":
        problem.v[0, -1, 0, 0] = np.nan
        problem.k[0, -2, 1, 1] = np.inf
    return problem, solve(problem, str(problem.q.dtype))


def _excess(changes: dict[str, Any] | str, implementation: str) -> float:
    """The largest error over its limit; a bad number has no gradient of its own."""
    assume_finite = "assume_finite" in changes
    rest = changes if isinstance(changes, str) else tuple((name, value) for name, value in changes.items() if name != "assume_finite")
    problem, answers = _problem(rest)
    found = run_jax(problem, implementation, assume_finite=assume_finite)
    for name, values in (("dk", problem.k), ("dv", problem.v)):
        found[name] = np.where(np.isfinite(values.astype(np.float32)), found[name], answers[name].value)
    return max(worst(problem, found, answers).values())


RIGHT = {(name, fault[3] if isinstance(fault[3], str) else tuple(fault[3].items())) for name, faults in FAULTS.items() for fault in faults}


@pytest.mark.slow  # test_kernels.py holds many more problems right
@pytest.mark.parametrize(("implementation", "changes"), sorted(RIGHT, key=str), ids=str)
def test_without_a_fault_nothing_is_found(implementation: str, changes: Any) -> None:
    assert _excess(changes if isinstance(changes, str) else dict(changes), implementation) <= 1
