"""Whether both sides compute the same, by the parity instrument, before a time counts: `python -m benchmarks.agreement FOLDER`.

The outputs come from the programs that are timed. The truth is a float64 run: of `parity_tests.attention_oracle` for attention, of torch and
`torch_ref` under simulated rounding for the rest (see `parity_tests.tolerances`). It covers the rows, heads and elements that `inputs` names.

A training step with dropout draws different numbers in the two frameworks by itself. JAX's step is compared with a float64 step of `torch_ref` that
repeats its draws bit for bit, torch's step with one that drops nothing.
"""

import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import cases, inputs, worker
from benchmarks.cases import (
    KINDS,
    OPTIMIZER,
    SIZES,
    Attention,
    Beam,
    Case,
    Checkpoint,
    Copy,
    Data,
    Forward,
    Generate,
    Matmul,
    ModelCase,
    Piece,
    Start,
    Train,
)
from flax_gpt.config import GPTConfig
from parity_tests import attention_oracle, compare, oracle, tolerances
from parity_tests.report import Report, Row
from parity_tests.run_parity import grade_of_the_gap

Values = Mapping[str, np.ndarray]
Outputs = Mapping[str, Values]
"""{program, such as "jax jit" or "torch eager": its results}."""


REFERENCE = "torch eager"
"""Whose error decides, with the simulated rounding, how far ours may be off."""


def judge(case: Case, outputs: Outputs) -> Report:
    """The verdict on every program's results. The first is ours."""
    report = Report(case.name)
    for program, values in outputs.items():
        for name, value in values.items():
            if not np.isfinite(value).all():
                report.rows.append(Row(name, case.dtype, {}, {}, {}, 0.0, note=f"{program} is not finite"))
    if report.ok or not report.rows:
        JUDGES[case.kind](report, case, outputs)
    return report


def matmul(report: Report, case: Matmul, outputs: Outputs) -> None:
    a, b = (torch.from_numpy(inputs.rounded(inputs.normal((case.size, case.size), n), case.dtype)).double() for n in range(2))
    by_rounding(report, case.dtype, outputs, lambda: {"product": inputs.thin((a[: inputs.PRODUCT_ROWS] @ b).numpy())})


def copy(report: Report, case: Copy, outputs: Outputs) -> None:
    truth = {"copy": inputs.thin(inputs.normal((case.size,), 0))}
    for values in outputs.values():
        compare.exact(report, "copy", values, truth)


ATTENTION_SCORES = 3 * 2**20
"""Scores that the float64 truth of attention computes at most, in whole key/value heads, one at the least."""


def attention(report: Report, case: Attention, outputs: Outputs) -> None:
    """Key/value heads of several rows, spread over the batch: no other row or head has a part in their results."""
    q, k, v, d_out = inputs.attention(case)
    group = case.heads // case.kv_heads
    count = max(1, min(case.batch * case.kv_heads, ATTENTION_SCORES // (group * case.length**2)))
    for place in np.linspace(case.batch * case.kv_heads - 1, 0, count).astype(int):
        b, kv = divmod(int(place), case.kv_heads)
        rows, queries, keys = slice(b, b + 1), slice(kv * group, (kv + 1) * group), slice(kv, kv + 1)
        part = lambda x, heads, rows=rows: x[rows, :, heads]
        arrays = (part(q, queries), part(k, keys), part(v, keys), part(d_out, queries))
        problem = attention_oracle.Problem(*arrays, d_lse=np.zeros((1, case.length, group), np.float32), causal=case.causal)
        answers = attention_oracle.solve(problem, case.dtype)
        for name, heads in {"out": queries, "dq": queries, "dk": keys, "dv": keys}.items():
            if name != "out" and not case.backward:
                continue
            excess = {program: answers[name].excess(part(values[name], heads)) for program, values in outputs.items()}
            # torch's bfloat16 backward pass rounds partial sums, which the bound for a float32 accumulator does not know: a reference may.
            limits = {program: 1.0 if program.startswith("jax") else tolerances.reference_limit() for program in excess}
            report.rows.append(Row(f"{name}[{b}, :, {kv}]", case.dtype, excess, excess, limits, 1.0))


def piece(report: Report, case: Piece, outputs: Outputs) -> None:
    if case.layer == "dropout":
        for program, values in outputs.items():
            report.rows.append(dropout_row(program, case, values))
        return
    x, d_out = (torch.from_numpy(inputs.normal((case.rows, case.width), n)).double() for n in range(2))
    targets = torch.from_numpy(inputs.classes(case.rows, case.width)).long()
    weight, bias = torch.ones(case.width, dtype=torch.float64), torch.zeros(case.width, dtype=torch.float64)
    leaves = [t.requires_grad_(True) for t in ((x, weight, bias) if case.layer == "layer_norm" else (x,))]

    def run() -> Values:
        if case.layer == "cross_entropy":
            out = F.cross_entropy(x, targets)
            found: tuple[torch.Tensor, ...] = (out, *torch.autograd.grad(out, leaves))
            names: tuple[str, ...] = ("loss", "dx")
        else:
            out = F.gelu(x) if case.layer == "gelu" else F.layer_norm(x, (case.width,), weight, bias, 1e-5)
            found = (out, *torch.autograd.grad(out, leaves, d_out))
            names = ("out", "dx", "dweight", "dbias")
        return {name: inputs.thin(value.detach().numpy()) for name, value in zip(names, found, strict=False)}

    by_rounding(report, case.dtype, outputs, run)


def dropout_row(program: str, case: Piece, values: Values) -> Row:
    """Kept elements are x / (1 - rate) up to rounding, in the gradient where in the output, and their number is one that chance explains."""
    x, d_out = (inputs.thin(inputs.normal((case.rows, case.width), n)).astype(np.float64) for n in range(2))
    kept = values["out"] != 0
    scale, unit = 1 / 0.9, tolerances.UNIT["float32"]
    note = ""
    for name, whole in (("out", x), ("dx", d_out)):
        error = np.abs(values[name] - np.where(kept, whole * scale, 0.0))
        if (error > 2 * unit * np.abs(whole * scale)).any():
            note = f"{program}: {name} is not what dropout makes of its input"
    dropped, spread = np.count_nonzero(~kept), math.sqrt(kept.size * 0.1 * 0.9)
    if abs(dropped - 0.1 * kept.size) > 6 * spread:
        note = f"{program} dropped {dropped} of {kept.size} elements at a rate of 0.1"
    return Row(f"dropout, {program}", case.dtype, {}, {}, {}, 0.0, note=note)


def forward(report: Report, case: Forward, outputs: Outputs) -> None:
    size = case.model
    rows = inputs.counted_rows(size.batch, size.length)
    tokens = torch.from_numpy(inputs.tokens(case)[0][:rows])
    model = double(size.config, case)

    def run() -> Values:
        with torch.no_grad():
            return {"logits": inputs.thin(model(tokens)[0].numpy())}

    by_rounding(report, case.dtype, outputs, run)


def train(report: Report, case: Train, outputs: Outputs) -> None:
    ours = {program: values for program, values in outputs.items() if program.startswith("jax")}
    theirs = {program: values for program, values in outputs.items() if program not in ours}
    for programs, rate in [(ours, case.dropout), (theirs, 0.0)] if case.dropout else [(outputs, 0.0)]:
        if programs:
            compare.judge(
                report,
                case.dtype,
                programs,
                *one_step(dataclasses.replace(case, dropout=rate, devices=1)),
                reference=REFERENCE if REFERENCE in programs else "",
            )


@functools.cache
def one_step(case: Train) -> tuple[Values, Values]:
    """The float64 values of a training step on the rows that count, and their scatter."""
    size, model = case.model, double(case.config, case)
    tokens, targets = inputs.tokens(case)
    rows = inputs.counted_rows(size.batch, size.length)
    batch = oracle.Batch(tokens[:rows], targets[:rows], dropout_key=inputs.DROPOUT_KEY if case.dropout else None)

    def run() -> Values:
        found = oracle.torch_steps(model, batch, OPTIMIZER, (1,))
        return {name: value if value.ndim == 1 else inputs.thin(value) for name, value in found.items() if compared(name)}

    return run(), tolerances.scatter(run)


def compared(name: str) -> bool:
    """Both sides' workers give these of a step's results: losses, gradient norms, weights and first moments."""
    return "exp_avg_sq" not in name and not name.endswith((".pe", "causal_mask", "lm_head.weight"))


TIES = 8
"""Rows whose tokens part from the float64 choice that are looked into at most; more of them are no ties."""


def generate(report: Report, case: Generate, outputs: Outputs) -> None:
    """Each token is the float64 model's choice after the tokens before it, or one of two whose logits rounding cannot tell apart."""
    model = double(case.config, case)
    for program, values in outputs.items():
        tokens = values["tokens"].astype(np.int64)
        notes = [] if tokens.shape == (case.batch, case.prompt + case.new) else [f"{program} wrote {tokens.shape}"]
        if not np.array_equal(tokens[:, : case.prompt], inputs.prompts(case)):
            notes.append(f"{program} changed the prompt")
        if not notes:
            with torch.no_grad():
                chosen = model(torch.from_numpy(tokens[:, :-1]))[0].argmax(-1).numpy()
            wrong = np.argwhere((chosen != tokens[:, 1:])[:, case.prompt - 1 :]) + np.array([0, case.prompt])
            for b, place in wrong[:TIES]:
                one, other = int(tokens[b, place]), int(chosen[b, place - 1])
                if grade_of_the_gap(model, tokens[b, :place], one, other) > tolerances.reference_limit():
                    notes.append(f"{program}, row {b}: token {place} is {one}, not {other}")
            notes += [f"{program} parts from the float64 choice in {len(wrong)} places"] * (len(wrong) > TIES)
        report.rows.append(Row(f"tokens, {program}", "exact", {}, {}, {}, 0.0, note="; ".join(notes)))


def double(config: GPTConfig, case: ModelCase) -> torch.nn.Module:
    """`torch_ref`'s model of the case's weights in float64, in eval mode."""
    return oracle.torch_model(config, inputs.model_weights(case), dtype="float64").eval()


def beam(report: Report, case: Beam, outputs: Outputs) -> None:
    """The same tokens, and their log probability as float64 has it."""
    tokens = next(iter(outputs.values()))["tokens"].astype(np.int64)
    for program, values in outputs.items():
        same = np.array_equal(tokens, values["tokens"])
        report.rows.append(Row(f"tokens, {program}", "exact", {}, {}, {}, 0.0, note="" if same else f"{program} found other tokens"))
    if not report.ok:
        return
    text = torch.from_numpy(np.concatenate([inputs.prompts(case), tokens], axis=1))
    model = double(case.config, case)

    def run() -> Values:
        with torch.no_grad():
            logits = model(text[:, :-1])[0][:, case.prompt - 1 :]
            found = torch.log_softmax(logits, dim=-1).gather(-1, text[:, case.prompt :, None])
        return {"log_probs": found.sum((1, 2)).numpy()}

    by_rounding(report, case.dtype, {program: {"log_probs": values["log_probs"]} for program, values in outputs.items()}, run)


def start(report: Report, case: Start, outputs: Outputs) -> None:
    step = Train(size=case.size, dropout=0.0)
    batch, model = oracle.Batch(*inputs.tokens(step)), double(step.config, step)
    by_rounding(report, case.dtype, outputs, lambda: {"losses": oracle.torch_steps(model, batch, OPTIMIZER, (1,))["losses"]})


def checkpoint(report: Report, case: Checkpoint, outputs: Outputs) -> None:
    truth = {name: inputs.thin(array) for name, array in inputs.weights(SIZES[case.size].config).items()}
    for program, values in outputs.items():
        compare.exact(report, f"weights, {program}", values, truth)


def data(report: Report, case: Data, outputs: Outputs) -> None:
    """Every window once an epoch, each with the tokens that follow its own."""
    truth = {"starts": np.arange(case.tokens - SIZES[case.size].length), "whole": np.array([True])}
    for program, values in outputs.items():
        compare.exact(report, f"windows, {program}", values, truth)


def by_rounding(report: Report, dtype: str, outputs: Outputs, run: Callable[[], Values]) -> None:
    """Holds the outputs against `run`, a program in torch and float64, and against its scatter under simulated rounding."""
    if outputs:
        compare.judge(report, dtype, outputs, run(), tolerances.scatter(run), reference=REFERENCE if REFERENCE in outputs else "")


LARGE = 1e12
"""FLOPs of a case from which its comparison takes all threads."""

JUDGES: dict[str, Callable[..., None]] = {kind: globals()[kind] for kind in KINDS}


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What stands in agreement/CASE.json."""

    ok: bool
    summary: str
    seconds: float
    """What the comparison took."""


def read_outputs(folder: Path, case: Case) -> dict[str, Values]:
    """{program: results} of the first pass, JAX's first."""
    found: dict[str, Values] = {}
    for side in ("jax", "torch"):
        for path in sorted((folder / "outputs" / side / case.name).glob("*.npz")):
            with np.load(path) as arrays:
                found[f"{side} {path.stem}"] = dict(arrays)
    return found


def decide(case: Case, outputs: Outputs) -> Agreement:
    """Both sides must have an output, and every program's must be right."""
    start = time.perf_counter()
    verdict = lambda ok, summary: Agreement(ok, summary, time.perf_counter() - start)
    missing = [side for side in ("jax", "torch") if not any(program.startswith(side) for program in outputs)]
    if missing:
        return verdict(False, f"no output of {' and '.join(missing)} to compare")
    try:
        report = judge(case, outputs)
    except Exception as error:
        return verdict(False, f"the comparison failed: {worker.reason(error)}")
    return verdict(report.ok, report.summary())


def main(folder: Path) -> None:
    threads = torch.get_num_threads()
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    place = folder / "agreement"
    place.mkdir(exist_ok=True)
    for values in plan["cases"]:
        case = cases.read(values)
        path = place / f"{case.name}.json"
        if not path.exists():
            print(f"start {case.name}", flush=True)
            # Of small operations there are thousands, for which a second thread would mostly wait.
            torch.set_num_threads(threads if (case.flops or 0.0) > LARGE else 1)
            worker.write_json(path, dataclasses.asdict(decide(case, read_outputs(folder, case))))
            print(f"done {case.name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
