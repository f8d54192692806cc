"""A trained run timed in both frameworks, its training step and its generation: the last part of `flax-gpt demo`."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks import charts, report, results, runner, worker
from benchmarks.cases import Case, Generate, Train
from flax_gpt.weights import tree


def measure(model: Any, batch: int, tokens: np.ndarray, out: Path) -> dict[str, Any]:
    """Times a MiniGPT that was trained on `tokens` (n,) in batches of `batch` rows, and draws the result: the document, of which `out` keeps all.

    The outputs are compared first. Half of the model's context is prompt, half is written.
    """
    config = model.config
    folder = out / "model"
    folder.mkdir(parents=True)
    names = {"lm_head.weight", "pos_encoding.pe", "causal_mask"}
    save_file({name: array for name, array in tree.torch_weights(model).items() if name not in names}, folder / "weights.safetensors")
    np.save(folder / "tokens.npy", tokens)
    worker.write_json(folder / "model.json", {"config": config.to_dict(), "batch": batch, "length": config.max_len})
    where: dict[str, Any] = dict(size="trained", trained=str(folder.absolute()))
    prompt = config.max_len // 2
    selected: list[Case] = [
        Train(**where, dropout=config.dropout),
        Generate(**where, batch=1, prompt=prompt, new=config.max_len - prompt, max_len=config.max_len),
    ]
    settings = runner.SETTINGS["demo"]
    runner.prepare(selected, settings, out / "timing")
    runner.run(selected, settings, out / "timing")
    document = report.write(out / "timing")
    charts.trained(document, out / "speed.png")
    return document


def sentences(document: dict[str, Any]) -> list[str]:
    """What was found, a line a case."""
    lines = []
    for row, what in zip(document["rows"], ("a training step", "writing"), strict=True):
        if row["error"]:
            lines.append(f"{what}: {row['error']}")
            continue
        jax, torch = (row[side][row["best"][side]]["ms"] for side in ("jax", "torch"))
        lines.append(
            f"{what}, {row['amount']:.0f} tokens: JAX {report.milliseconds(jax)} ms, torch {report.milliseconds(torch)} ms, "
            f"ratio {row['ratio']:.2f} ({results.interval(row['low'], row['high'])})"
        )
    return lines


def differing(document: dict[str, Any]) -> list[str]:
    """The comparisons that failed."""
    return [row["agreement"]["summary"] for row in document["rows"] if row["agreement"] is not None and not row["agreement"]["ok"]]
