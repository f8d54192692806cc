"""Training on several devices, checked in a process that has made four of the processor.

`JAX_NUM_CPU_DEVICES=4 python -m parity_tests.sharded steps` (or `runs`) prints {check: what failed, a list of lines} as its last line.
"""

import contextlib
import dataclasses
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from flax_gpt.config import GPTConfig, OptimizerConfig, TrainConfig
from flax_gpt.errors import InputError
from flax_gpt.nn.dropout import dropout
from flax_gpt.training import checkpoint
from flax_gpt.training.data import Batch, Windows
from flax_gpt.training.loop import train
from flax_gpt.training.optimizer import make_optimizer
from flax_gpt.training.sharding import data_mesh
from flax_gpt.training.state import from_arrays, make_evaluation, make_step, new_model, new_state, split_model, to_arrays
from parity_tests import training_parity
from parity_tests.report import Report
from parity_tests.training_parity import Course, flax_course

SMALL = dict(d_model=16, num_layers=1, d_ff=24, max_len=12)
GPT = GPTConfig(vocab_size=9, d_model=8, num_heads=2, num_layers=1, d_ff=8, max_len=12, dropout=0.1)
ROWS = TrainConfig(batch_size=8)
COUNTS = (4, 0, 1, 3, 5, 3, 0, 0)
"""Real targets of each row: powers of two on each of 4 devices, and of 2 in two parts, so that means are exact; none at all on one of the 4."""


def course(steps: int) -> Course:
    """8 rows a batch but for the second and last of an epoch, of 3: of four devices one has half of its rows then and two have none."""
    whole = Course.shipped((1, steps), **SMALL)
    return dataclasses.replace(whole, corpus=dataclasses.replace(whole.corpus, tokens=whole.corpus.tokens[:23]))


def in_float64(ours: Any, theirs: Any) -> list[str]:
    report = Report()
    report.rows += [training_parity.in_float64(name, ours, value) for name, value in theirs.items()]
    return [] if report.ok else report.failures().splitlines()


# Steps


def float64() -> list[str]:
    """Weights, moments and losses after 1 and 4 steps, two of them of padded batches."""
    one = course(4)
    assert [one.batches[step].weights.any(axis=1).sum() for step in range(4)] == [8, 3, 8, 3]
    wanted = flax_course(one, "float64")
    halves = dataclasses.replace(one, train_config=dataclasses.replace(one.train_config, accumulate=2))
    found = {"4 devices": flax_course(one, "float64", devices=4), "2 devices, 2 parts": flax_course(halves, "float64", devices=2)}
    return [f"{name}: {line}" for name, values in found.items() for line in in_float64(values, wanted)]


def kept(model: Any, batch: Batch) -> jax.Array:
    """A loss that is a count: of the kept elements, each times its column, its row's number and how many targets of it are real."""
    elements = dropout(jnp.ones((len(batch.tokens), 8)), 0.5, model.dropout.draw(), "kept")
    numbers = elements * jnp.arange(8) * batch.tokens[:, :1] * jnp.sum(batch.weights, axis=1, keepdims=True)
    return jnp.sum(numbers) / jnp.maximum(jnp.sum(batch.weights), 1) + 0 * jnp.sum(model.final_norm.scale[...])


def numbered() -> Batch:
    """Each row of tokens is its number; as many targets of it are real as COUNTS says."""
    tokens = np.repeat(np.arange(8, dtype=np.int32)[:, None], 12, axis=1)
    return Batch(tokens, tokens, (np.arange(12) < np.array(COUNTS)[:, None]).astype(np.float32))


def draws() -> list[str]:
    """The dropped elements of a batch, to the bit, through a loss that is exact; and one compilation for all steps, a restored state's too."""
    optimizer = make_optimizer(OptimizerConfig(), 9)
    graph, params, rest = split_model(new_model(GPT, 0))
    failures, found = [], {}
    for devices, parts in ((1, 1), (4, 1), (2, 2)):
        mesh, traces = data_mesh(devices, ROWS), []
        state = new_state(params, rest, optimizer, mesh)
        step = make_step(graph, optimizer, lambda completed, traces=traces: (traces.append(1), completed == 0)[1], kept, parts, mesh)
        losses = []
        for _ in range(2):
            state = step(state, numbered())
            losses += [float(x) for x in (state.loss, state.line_loss, state.line_tokens)]
        state = from_arrays({name: np.asarray(array) for name, array in to_arrays(state).items()}, state)
        state = step(state, numbered())
        found[devices, parts] = [*losses, float(state.loss)]
        if mesh is not None:
            queued = 0
            for _ in range(20):
                state = step(state, numbered())
                queued += not state.step.is_ready()
            if queued:  # see sharding.one_at_a_time
                failures.append(f"{devices} devices: {queued} of 20 steps were left to run behind the host")
        if len(traces) != 1:
            failures.append(f"{devices} devices: the step was compiled {len(traces)} times")
        if any(not leaf.sharding.is_fully_replicated or len(leaf.devices()) != devices for leaf in jax.tree.leaves(state)):
            failures.append(f"{devices} devices: the state is not whole on each")
    one = found[1, 1]
    if not 0 < one[0] != one[3] > 0:
        failures.append(f"the loss draws nothing: {one}")
    return failures + [f"{key}: {values} instead of {one}" for key, values in found.items() if values != one]


def evaluation() -> list[str]:
    """The held-out totals of a batch that is half empty; no dropout, although the model is in train mode."""
    one = course(1)
    with jax.enable_x64(True):
        graph, params, rest = split_model(new_model(one.in_dtype("float64"), 0))
        totals = {}
        for devices in (1, 4):
            batch = one.batches[1]._replace(weights=numbered().weights)
            totals[devices] = make_evaluation(graph, mesh=data_mesh(devices, ROWS))(params, rest, batch)
        found, wanted = ({name: np.asarray(value) for name, value in totals[devices].items()} for devices in (4, 1))
    wrong = [] if found["count"] == wanted["count"] == sum(COUNTS) else [f"count: {found['count']}"]
    return wrong + in_float64(found, wanted)


# Runs


@contextlib.contextmanager
def watched() -> Iterator[list[int]]:
    """The steps at which the host waited for a device while it is open."""
    waits: list[int] = []
    done = [0]
    array = type(jnp.zeros(()))
    value, fetch = array._value, Windows.__getitem__  # `_value`: what every way from a device array to a number on the host reads
    reading = mock.patch.object(array, "_value", property(lambda self: (waits.append(done[0]), value.fget(self))[1]))
    fetching = mock.patch.object(Windows, "__getitem__", lambda self, step: (done.__setitem__(0, step), fetch(self, step))[1])
    with reading, fetching:
        yield waits


def arrays(folder: Path) -> dict[str, np.ndarray]:
    found = checkpoint.newest_whole(folder)
    assert found is not None
    target = {name: np.empty(shape, dtype) for name, (shape, dtype) in found.arrays.items()}
    restored = checkpoint.restore(found, target)
    return {name: array for name, array in restored.items() if name.startswith(("params", "optimizer")) and array.dtype == np.float64}


def resume() -> list[str]:
    """A run of 8 steps on one device, and runs that had 2 devices before the fourth or after it: one training, in float64."""
    text = "to be or not to be, that is the question. " * 3
    settings: dict[str, Any] = dict(batch_size=8, steps=8, log_interval=4, eval_interval=4, checkpoint_interval=4, held_out=0.1, keep_last=2)
    config = GPTConfig(len(set(text)), **SMALL, num_heads=2, dropout=0.1, dtype="float64", param_dtype="float64")
    failures = []
    with tempfile.TemporaryDirectory() as name, jax.enable_x64(True):
        folder = Path(name)
        (folder / "text.txt").write_text(text, encoding="utf-8")
        quiet = dict(progress=False, picture=False)
        go = lambda to, devices, **more: train(config, TrainConfig(**settings), folder / "text.txt", folder / to, devices=devices, **quiet, **more)
        go("one", 1)
        with watched() as waits:
            run = go("two", 2)
        if not {step for step in waits if step > 0} <= {3, 7}:
            failures.append(f"the host waited at the steps {sorted(set(waits))}")
        if any(len(leaf.devices()) != 1 for leaf in jax.tree.leaves(split_model(run.model)[1:])):
            failures.append("the model that is returned lies on more than one device")
        for start, devices in (("one", 2), ("two", 1)):
            again = f"{start}, then {devices}"
            shutil.copytree(folder / start, folder / again)
            checkpoint.prune(folder / again, [4])
            go(again, devices, resume=True)
            if (folder / again / "run.json").read_bytes() != (folder / start / "run.json").read_bytes():
                failures.append(f"{again}: run.json differs")
        wanted = arrays(folder / "one") | held_out(folder / "one")
        for other in ("two", "one, then 2", "two, then 1"):
            failures += [f"{other}: {line}" for line in in_float64(arrays(folder / other) | held_out(folder / other), wanted)]
    return failures


def held_out(folder: Path) -> dict[str, np.ndarray]:
    lines = checkpoint.read_lines(folder / "metrics.jsonl")
    return {"held-out losses": np.array([line["held_out_loss"] for line in lines if "held_out_loss" in line])}


def refusals() -> list[str]:
    failures = []
    for devices, config, wanted in (
        (5, ROWS, "devices = 5: must be at most 4, the devices that jax sees; JAX_NUM_CPU_DEVICES=5"),
        (3, ROWS, "devices = 3: must divide batch_size = 8"),
        (4, dataclasses.replace(ROWS, accumulate=4), "devices = 4: must divide the 2 rows of each of the 4 parts of a batch"),
    ):
        try:
            data_mesh(devices, config)
            failures.append(f"{devices} devices were not refused")
        except InputError as error:
            failures += [] if str(error).startswith(wanted) else [str(error)]
    return failures


CHECKS: dict[str, dict[str, Callable[[], list[str]]]] = {
    "steps": {check.__name__: check for check in (float64, refusals)},
    "runs": {check.__name__: check for check in (draws, evaluation, resume)},
}


def main(part: str) -> None:
    warnings.simplefilter("error")
    jax.config.update("jax_default_matmul_precision", "highest")
    print(json.dumps({name: check() for name, check in CHECKS[part].items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
