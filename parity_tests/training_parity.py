"""Whole trainings side by side: both packages start from one key and nothing else, and their weights and losses are compared as they go.

`python -m parity_tests.training_parity --out PICTURE.png` runs the long form and draws how the difference grows.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import Progress, TaskID

import flax_gpt.training.optimizer
import flax_gpt.training.state
import torch_ref.training.optimizer
import torch_ref.training.state
import torch_ref.weights.tree
from flax_gpt.config import GPTConfig, OptimizerConfig, TrainConfig
from flax_gpt.figures import style
from flax_gpt.training.data import Corpus, load_corpus
from flax_gpt.training.sharding import data_mesh
from flax_gpt.training.tasks import LanguageTask
from flax_gpt.weights import tree
from parity_tests import compare, oracle, tolerances
from parity_tests.report import Report, Row
from parity_tests.tolerances import COURSE_AGREEMENT

Values = dict[str, np.ndarray]

LONG = tuple(range(1, 10)) + tuple(range(10, 201, 10))
"""Steps after which the long form compares."""


@dataclasses.dataclass(frozen=True)
class Course:
    """A training: everything that decides its numbers but the arithmetic."""

    config: GPTConfig
    train_config: TrainConfig
    corpus: Corpus
    steps: Sequence[int]
    """After how many updates weights are kept; the last is the length of the training."""

    @classmethod
    def shipped(cls, steps: Sequence[int], *, seed: int = 0, accumulate: int = 1, optimizer: OptimizerConfig | None = None, **sizes: Any) -> "Course":
        """A small GPT with dropout 0.1 in every place, attention included, on the corpus that the package ships; `sizes` replace fields of it."""
        corpus = load_corpus()
        fields: dict[str, Any] = dict(d_model=32, num_heads=2, num_layers=1, d_ff=64, max_len=24, dropout=0.1, attention_dropout=0.1)
        config = GPTConfig(vocab_size=corpus.tokenizer.vocab_size, **(fields | sizes))
        optimizer = OptimizerConfig(lr=1e-3, warmup_steps=max(1, steps[-1] // 10)) if optimizer is None else optimizer
        train_config = TrainConfig(seed=seed, batch_size=8, accumulate=accumulate, steps=steps[-1], held_out=0.0, optimizer=optimizer)
        return cls(config, train_config, corpus, steps)

    @property
    def batches(self) -> Any:
        return LanguageTask().prepare(self.corpus, self.config, self.train_config).batches

    def in_dtype(self, dtype: str) -> GPTConfig:
        return dataclasses.replace(self.config, dtype=dtype, param_dtype=dtype)


def flax_course(course: Course, dtype: str, advance: Callable[[], None] = lambda: None, devices: int = 1) -> Values:
    """losses (steps,), each before its update and with its dropout, and stepN/{weights, moments}/NAME, from `flax_gpt`'s own step in `dtype`.

    `devices` share each batch; the losses are one device's all the same, computed from the weights that these leave.
    """
    mesh = data_mesh(devices, course.train_config)
    batches, length = course.batches, course.steps[-1]
    optimizer = flax_gpt.training.optimizer.make_optimizer(course.train_config.optimizer, length)
    losses: list[np.ndarray] = []
    found: Values = {}
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        model = flax_gpt.training.state.new_model(course.in_dtype(dtype), course.train_config.seed)
        graph, params, rest = flax_gpt.training.state.split_model(model)
        state = flax_gpt.training.state.new_state(params, rest, optimizer, mesh)
        starts_line = lambda completed: completed == 0
        step = flax_gpt.training.state.make_step(graph, optimizer, starts_line, accumulate=course.train_config.accumulate, mesh=mesh)

        @jax.jit
        def loss_of(params: Any, rest: Any, completed: Any, batch: Any) -> Any:  # the state keeps its loss in float32
            model = nnx.merge(graph, params, rest, copy=True)
            model.dropout.step[...] = completed.astype(jnp.uint32)
            return flax_gpt.training.state.language_loss(model, batch)

        for number in range(1, length + 1):
            batch = batches[number - 1]
            losses.append(np.asarray(loss_of(state.params, state.rest, state.step, batch)))
            state = step(state, batch)
            if number in course.steps:
                for group, values in {"weights": state.params, **oracle.moments(state.optimizer)}.items():
                    found |= _named(number, group, tree.torch_weights(model, values))
            advance()
    return {"losses": np.stack(losses)} | found


def torch_course(course: Course, dtype: str, drawn: str | None = None, advance: Callable[[], None] = lambda: None) -> Values:
    """The same from `torch_ref`. `drawn`: the dtype in which the initial weights are drawn, which are then widened to `dtype`; None: `dtype`."""
    model = torch_ref.training.state.new_model(course.in_dtype(drawn or dtype), course.train_config.seed)
    if drawn not in (None, dtype):
        wide = torch_ref.training.state.MODELS[GPTConfig](course.in_dtype(dtype))
        torch_ref.weights.tree.load_weights(wide, torch_ref.weights.tree.torch_weights(model))
        wide.dropout.seed_key = model.dropout.seed_key
        model = wide
    batches, length = course.batches, course.steps[-1]
    optimizer = torch_ref.training.optimizer.make_optimizer(model, course.train_config.optimizer, length)
    losses: list[np.ndarray] = []
    found: Values = {}
    model.train()
    for number in range(1, length + 1):
        batch = [torch.from_numpy(array.copy()) for array in batches[number - 1]]
        model.dropout.step = number - 1
        optimizer.zero_grad()
        loss = torch_ref.training.state.backward(model, *batch, accumulate=course.train_config.accumulate)
        losses.append(loss.numpy().copy())
        optimizer.step()
        if number in course.steps:
            for group, values in {"weights": dict(model.named_parameters()), **oracle.torch_moments(model, optimizer)}.items():
                found |= _named(number, group, torch_ref.weights.tree.torch_weights(model, values))
        advance()
    return {"losses": np.stack(losses)} | found


def _named(number: int, group: str, values: Values) -> Values:
    return {f"step{number}/{group}/{name}": value for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Result:
    """The four trainings, what they are held to, and the verdict."""

    course: Course
    ours: dict[str, Values]
    """flax_gpt's, by dtype."""
    theirs: dict[str, Values]
    """torch_ref's, by dtype."""
    truth: Values
    """torch_ref's in float64 from the weights that are drawn in float32: what the float32 trainings would be without rounding."""
    deviations: Values
    """Scatter (runs, …) of the truth under rounding to float32."""
    report: Report


def compare_courses(course: Course, advance: Callable[[], None] = lambda: None) -> Result:
    """Trains with both packages in float64 and in float32 and judges every kept tensor.

    float64: each package draws in float64; equal to `COURSE_AGREEMENT`. float32: each draws in float32, and both are held to the budget that the
    float64 training from those same weights gives. `advance` is called `amount` times, for a progress bar.
    """
    ours = {dtype: flax_course(course, dtype, advance) for dtype in ("float64", "float32")}
    theirs = {dtype: torch_course(course, dtype, advance=advance) for dtype in ("float64", "float32")}
    run = lambda: torch_course(course, "float64", "float32", advance)
    truth, deviations = run(), tolerances.scatter(run)
    report = Report("training from one key: flax_gpt against torch_ref")
    for name, value in theirs["float64"].items():
        report.rows.append(in_float64(name, ours["float64"], value))
    compare.judge(report, "float32", {"flax": ours["float32"], "torch": theirs["float32"]}, truth, deviations)
    return Result(course, ours, theirs, truth, deviations, report)


def amount(course: Course) -> int:
    """How many updates `compare_courses` makes."""
    return (4 + 2 + tolerances.RUNS) * course.steps[-1]


def in_float64(name: str, ours: Values, theirs: np.ndarray) -> Row:
    """Whether the tensor `name` of two float64 trainings is equal to `COURSE_AGREEMENT`."""
    if name not in ours:
        return Row(name, "float64", {}, {}, {}, 0.0, note="missing from flax")
    error = float(np.max(np.abs(ours[name] - theirs)) / np.max(np.abs(theirs)))
    return Row(name, "float64", {"flax": error}, {"flax": error / COURSE_AGREEMENT}, {"flax": 1.0}, COURSE_AGREEMENT)


def distance(values: Values, other: Values, number: int) -> float:
    """2-norm of the difference of all weights after `number` updates, over that of `other`."""
    pairs = [(values[name], other[name]) for name in other if name.startswith(f"step{number}/weights/")]
    difference = sum(float(np.sum(np.square(a.astype(np.float64) - b))) for a, b in pairs)
    return float(np.sqrt(difference / sum(float(np.sum(np.square(b.astype(np.float64)))) for _, b in pairs)))


def draw(result: Result, out_path: str | os.PathLike[str]) -> Path:
    """The losses over the steps, and how far the weights of two trainings part, on a logarithmic scale with the budget."""
    steps = list(result.course.steps)
    config = result.course.config
    scattered = [
        [distance({name: result.truth[name] + values[run] for name, values in result.deviations.items()}, result.truth, n) for n in steps]
        for run in range(tolerances.RUNS)
    ]
    budget = np.max(scattered, axis=0) * tolerances.reference_limit()
    lines = {
        "float32: flax_gpt from the exact training": (result.ours["float32"], result.truth, "#d95f02", "-"),
        "float32: torch_ref from the exact training": (result.theirs["float32"], result.truth, "#7570b3", "--"),
        "float64: flax_gpt from torch_ref": (result.ours["float64"], result.theirs["float64"], "#1b9e77", "-"),
    }
    with style.labels(""):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        counts = np.arange(1, len(result.theirs["float32"]["losses"]) + 1)
        left.plot(counts, result.ours["float32"]["losses"], color="#d95f02", linewidth=1.2, label="flax_gpt, float32")
        left.plot(counts, result.theirs["float32"]["losses"], color="#7570b3", linewidth=2.2, linestyle=":", label="torch_ref, float32")
        left.set(xlabel="step", ylabel="training loss (nats a token), dropout on", title="Two trainings from one key")
        left.legend(frameon=False)
        right.fill_between(steps, np.min(scattered, axis=0), budget, color="#cccccc", label="float32: simulated rounding, up to the limit")
        for label, (values, other, color, dash) in lines.items():
            right.plot(steps, [distance(values, other, n) for n in steps], dash, color=color, linewidth=1.6, label=label)
        right.axhline(COURSE_AGREEMENT, color="#1b9e77", linewidth=1, linestyle=":", label=f"limit in float64: {COURSE_AGREEMENT:g}")
        right.set(yscale="log", xlabel="step", ylabel="distance of all weights, relative", title="How the difference grows", ylim=(1e-17, 1e-3))
        right.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
        right.legend(frameon=False, loc="center right", fontsize=8.5)
        figure.suptitle(
            f"{len(counts)} steps on the shipped text: N {config.num_layers}, D {config.d_model}, dropout {config.dropout:g}, "
            f"{result.course.train_config.optimizer.optimizer}; nothing but the seed is shared"
        )
        return style.save(figure, out_path)


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    with Progress() as progress:
        task: TaskID = progress.add_task("training", total=total)
        yield lambda: progress.advance(task)


def main(out: Path = Path("docs/images/training_parity.png"), steps: int = 200) -> None:
    """Compares `steps` updates of both packages from one key, prints the verdict and draws `out`."""
    torch.set_num_threads(1)
    course = Course.shipped([number for number in LONG if number < steps] + [steps])
    with _bar(amount(course)) as advance:
        result = compare_courses(course, advance)
    for number in course.steps:
        pairs = [(result.ours["float64"], result.theirs["float64"]), (result.ours["float32"], result.truth), (result.theirs["float32"], result.truth)]
        print(f"step {number}: " + "  ".join(f"{distance(a, b, number):.2e}" for a, b in pairs))
    print(result.report.summary())
    print(draw(result, out))


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
