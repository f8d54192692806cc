"""`train`, `load_run` and `evaluate`: what the commands of the same names call, usable without them."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import math
import os
import platform
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from flax_gpt import __version__
from flax_gpt.config import TrainConfig, TransformerConfig
from flax_gpt.errors import InputError, RunError, require
from flax_gpt.nn.linear import dtypes_of
from flax_gpt.training import checkpoint
from flax_gpt.training.allocation import keep_memory
from flax_gpt.training.compilation import use_compilation_cache
from flax_gpt.training.data import OnBadFile
from flax_gpt.training.memory import check_memory
from flax_gpt.training.optimizer import learning_rate, make_optimizer
from flax_gpt.training.progress import Display
from flax_gpt.training.sharding import data_mesh
from flax_gpt.training.state import TrainState, failed, from_arrays, make_evaluation, make_step, new_model, new_state, split_model, to_arrays
from flax_gpt.training.tasks import TASKS, LanguageTask, Prepared, Task, mean_totals, task_of, window_of

FORMAT = 1
DEFAULT_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model and what it was trained with; the model is in eval mode."""

    model: Any
    tokenizer: Any
    config: Any
    train_config: TrainConfig
    step: int
    """Completed updates."""
    folder: Path
    kind: str = "gpt"
    """Of the model: a key of `tasks.TASKS`."""
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Where the data came from, as run.json has it."""


class Stopped(RunError):
    """A run that a signal ended, saved; `resume` goes on from there."""


def train(
    config: TransformerConfig | Mapping[str, Any] | None,
    train_config: TrainConfig | None,
    data: Any,
    out: str | Path,
    *,
    kind: str | None = None,
    glob: str = "*.txt",
    on_bad_file: OnBadFile = "error",
    resume: bool = False,
    devices: int = 1,
    progress: bool = True,
    picture: bool = True,
) -> Run:
    """Trains a model of characters on a text, on pairs or on labelled texts, and leaves a run folder in `out`.

    config: the model; a mapping gives the fields of `kind`'s configuration without the sizes that the data set.
    kind: "gpt", "encoder-decoder" or "classifier"; None: that of config, or of the run that is resumed, or "gpt".
    data: for a GPT, with glob and on_bad_file, as in `load_corpus`; for the others as in `read_table`, sources and targets, or texts and labels; or
    what the task's `read` returned; None: what the package ships.
    resume: goes on from the newest whole checkpoint, bitwise as if nothing had happened on the same machine and versions; starts anew where a killed
    run left nothing. `config`, `train_config` and `data` may then be None: those of the run.
    devices: how many of the devices that jax sees share the rows of each batch (training/sharding.py); a run may go on with another number.
    progress: shows a bar, or lines where standard error is no terminal. picture: draws loss.png at the end.

    SIGINT and SIGTERM end the run after the present step, saved, with Stopped. Raises InputError for what reading the data refuses, a text shorter
    than a window, sizes that are not the data's or beyond the device's memory, devices that are not there or do not divide the rows, a folder that
    holds a run (without resume) or other files or is being written by another process, and a resume with another configuration or text; RunError
    when the loss or the gradient norm stops being finite, the last good checkpoint kept.
    """
    use_compilation_cache()
    folder = Path(out)
    record = _inspect(folder, resume)
    task = _task(config, kind, record, folder)
    data = _read(task, data, _options(task, glob, on_bad_file), record)
    config, train_config = _configs(task, config, train_config, data, record)
    dtypes_of(config)
    keep_memory()  # what follows looks for the devices
    mesh = data_mesh(devices, train_config)
    check_memory(config, train_config, window_of(config, train_config) if isinstance(task, LanguageTask) else 1, devices)
    prepared = task.prepare(data, config, train_config)
    folder.mkdir(parents=True, exist_ok=True)
    with checkpoint.lock(folder):
        if record is None:
            _inspect(folder, resume)
            _begin(folder, task, config, train_config, data)
        return _Trainer(folder, task, config, train_config, data, prepared, mesh, progress, picture).run()


class _Trainer:
    """One call of `train`, after its arguments have been checked and while the lock is held."""

    def __init__(
        self,
        folder: Path,
        task: Task,
        config: Any,
        train_config: TrainConfig,
        data: Any,
        prepared: Prepared,
        mesh: Mesh | None,
        progress: bool,
        picture: bool,
    ):
        self.folder, self.task, self.config, self.train_config, self.data = folder, task, config, train_config, data
        self.batches, self.held_out, self.progress, self.picture = prepared.batches, prepared.held_out, progress, picture
        self.mesh = mesh
        self.metrics = folder / "metrics.jsonl"
        self.epoch = self.batches.steps_per_epoch if train_config.epochs is not None else None
        if train_config.epochs is not None:
            self.total = train_config.epochs * self.batches.steps_per_epoch
        else:
            self.total = train_config.steps or DEFAULT_STEPS
        self.schedule = learning_rate(train_config.optimizer, self.total)
        optimizer = make_optimizer(train_config.optimizer, self.total)
        self.graph, params, rest = split_model(new_model(config, train_config.seed))
        self.state = new_state(params, rest, optimizer, mesh)
        loss = functools.partial(task.loss, label_smoothing=train_config.label_smoothing)
        self.step = make_step(self.graph, optimizer, self.starts_line, loss, train_config.accumulate, mesh)
        self.evaluation = make_evaluation(self.graph, task.totals, mesh)
        self.notes: dict[str, Any] = {"epoch_loss": 0.0, "epoch_tokens": 0.0, "best": None}
        self.done = self._restore()
        self.saved = self.done

    def starts_line(self, completed: Any) -> Any:
        """Whether the batch after this many updates begins a line of metrics.jsonl; of a number or of a traced one."""
        starts = completed % self.train_config.log_interval == 0
        return starts | (completed % self.epoch == 0) if self.epoch is not None else starts

    def run(self) -> Run:
        config, clock, tokens, start = self.train_config, _Clock(), 0, self.done
        with _signals(self.progress) as received, Display(self.progress, self.done, self.total) as display:
            display.say(self._plan())
            while self.done < self.total:
                batch = self.batches[self.done]
                self.state = self.step(self.state, batch)
                self.done += 1
                if self.done == start + 1:
                    jax.block_until_ready(self.state.step)
                    display.say(f"first step after {clock.seconds():.1f} s of compilation")
                    clock = _Clock()
                else:
                    tokens += int(batch.weights.sum())
                if self.starts_line(self.done) or self.done == self.total:
                    loss, speed = self._log(tokens, clock)
                    display.update(self.done, loss, speed)
                    clock, tokens = _Clock(), 0
                best = False
                if self.held_out is not None and (self.done % config.eval_interval == 0 or self.done == self.total):
                    with clock.pause(self.state):
                        best = self._evaluate(display)
                if best or self.done % config.checkpoint_interval == 0 or self.done == self.total or received:
                    with clock.pause(self.state):
                        self._save()
                if received and self.done < self.total:
                    raise Stopped(f"stopped by {received[0]} after step {self.done}, which is saved in {self.folder}; --resume goes on from there")
        if self.picture:
            from flax_gpt.figures import loss_curve

            try:
                loss_curve.draw(self.metrics, self.folder / "loss.png")
            except InputError as error:  # a line that was damaged before a resume; the run itself is whole
                warnings.warn(f"loss.png was not drawn: {error}", stacklevel=3)
        params, rest = jax.device_put((self.state.params, self.state.rest), jax.local_devices()[0]) if self.mesh else self.state[1:3]
        model = nnx.merge(self.graph, params, rest)
        model.eval()
        data = self.task.describe(self.data)
        return Run(model, self.data.tokenizer, self.config, self.train_config, self.done, self.folder, self.task.kind, data)

    def _plan(self) -> str:
        about, parameters = self.task.describe(self.data), sum(x.size for x in jax.tree.leaves(self.state.params))
        amount = next(f"{about[unit]:,} {unit}" for unit in ("characters", "rows") if unit in about)
        if self.done == self.total:
            return f"all {self.total:,} steps are done"
        return f"{parameters:,} parameters, {amount} of {about['source']}, steps {self.done + 1:,} to {self.total:,}; compiling"

    def _restore(self) -> int:
        checkpoint.prune(self.folder, checkpoint.steps(self.folder))
        found = checkpoint.newest_whole(self.folder)
        if found is not None:
            self.state = from_arrays(checkpoint.restore(found, to_arrays(self.state)), self.state)
            self.notes = found.notes
        done = found.step if found is not None else 0
        checkpoint.cut_lines(self.metrics, done)
        return done

    def _check(self) -> None:
        if bool(failed(self.state)):
            what = f"the loss is {float(self.state.loss)} and the gradient norm {float(self.state.grad_norm)}"
            kept = f"the checkpoint of step {self.saved} is the last good one" if self.saved else "no checkpoint was saved before it"
            raise RunError(f"step {int(self.state.step) + 1}: {what}; {kept} in {self.folder}")

    def _log(self, tokens: int, clock: "_Clock") -> tuple[float, float]:
        self._check()
        speed = tokens / max(clock.seconds(), 1e-9)
        loss, count, norm = (float(x) for x in jax.device_get((self.state.line_loss, self.state.line_tokens, self.state.grad_norm)))
        line = {
            "step": self.done,
            "train_loss": loss / count,
            "lr": self.schedule(self.done - 1),
            "grad_norm": norm,
            "tokens_per_second": round(speed, 1),
        }
        if self.epoch is not None:
            self.notes["epoch_loss"] += loss
            self.notes["epoch_tokens"] += count
            if self.done % self.epoch == 0:
                line |= {"epoch": self.done // self.epoch, "epoch_loss": self.notes["epoch_loss"] / self.notes["epoch_tokens"]}
                self.notes |= {"epoch_loss": 0.0, "epoch_tokens": 0.0}
        checkpoint.append_line(self.metrics, line)
        return loss / count, speed

    def _evaluate(self, display: Display) -> bool:
        """Logs the held-out loss; whether it is the lowest so far."""
        self._check()
        display.busy("evaluating the held-out part")
        assert self.held_out is not None
        found, _ = mean_totals(functools.partial(self.evaluation, self.state.params, self.state.rest), self.held_out())
        loss = found["loss"]
        if not math.isfinite(loss):
            raise RunError(f"step {self.done}: the held-out loss is {loss}; the checkpoint of step {self.saved} is the last good one")
        checkpoint.append_line(self.metrics, {"step": self.done} | {f"held_out_{name}": value for name, value in found.items()})
        display.say(f"step {self.done}  " + "  ".join(f"held-out {name} {value:.4f}" for name, value in found.items()))
        best = self.notes["best"] is None or loss < self.notes["best"][0]
        if best:
            self.notes["best"] = [loss, self.done]
        return best

    def _save(self) -> None:
        self._check()
        checkpoint.sync_file(self.metrics)
        checkpoint.save(self.folder, self.done, to_arrays(self.state), self.notes)
        self.saved = self.done
        present = [step for step in checkpoint.steps(self.folder) if step <= self.done]
        best = [self.notes["best"][1]] if self.notes["best"] else []
        checkpoint.prune(self.folder, present[-self.train_config.keep_last :] + best)


def load_run(folder: str | Path, step: int | str = "last") -> Run:
    """The run in a folder, in eval mode.

    step: whose weights: 'last', those of the newest whole checkpoint, a damaged newer one being passed over with a warning; 'best', those with the
    lowest held-out loss; or the number of a step. Raises InputError for a folder that holds no run, no such checkpoint, or only damaged files.
    """
    use_compilation_cache()
    folder = Path(folder)
    record = _read_record(folder, "run")
    require(record is not None, "run", str(folder), "is no run folder: it holds no run.json")
    assert record is not None
    try:
        content = (folder / "tokenizer.json").read_bytes()
    except OSError as error:
        raise InputError("run", str(folder), f"its tokenizer.json cannot be read: {error.strerror}") from error
    require(
        hashlib.sha256(content).hexdigest() == record["tokenizer_sha256"], "run", str(folder), "its tokenizer.json is damaged: its SHA-256 differs"
    )
    task = TASKS[record["kind"]]
    config, train_config = task.config.from_dict(record["model"]), TrainConfig.from_dict(record["train"])
    found = _checkpoint(folder, step)
    graph, params, rest = split_model(nnx.eval_shape(lambda: new_model(config, 0)))
    like = {"params": params, "rest": rest}
    values = from_arrays(checkpoint.restore(found, to_arrays(like)), like)
    model = nnx.merge(graph, values["params"], values["rest"])
    model.eval()
    tokenizer = task.load_tokenizer(folder / "tokenizer.json")
    return Run(model, tokenizer, config, train_config, found.step, folder, task.kind, record["data"])


def _checkpoint(folder: Path, step: int | str) -> checkpoint.Checkpoint:
    """The checkpoint that `load_run` was asked for, verified."""
    wanted = str(step)
    if wanted in ("last", "best"):
        newest = checkpoint.newest_whole(folder, "run")
        require(newest is not None, "run", str(folder), "holds no checkpoint yet")
        assert newest is not None
        best = newest.notes["best"]
        require(wanted == "last" or best is not None, "step", wanted, "needs a run that has evaluated a held-out part")
        if wanted == "last" or best[1] == newest.step:
            return newest
        wanted = str(best[1])
    present = [str(number) for number in checkpoint.steps(folder)]
    require(wanted in present, "step", step, f"must be last, best or a step that {folder} keeps: {', '.join(present)}")
    try:
        return checkpoint.verify(folder / "checkpoints" / wanted)
    except checkpoint.Damaged as damage:
        raise InputError("step", str(step), f"its checkpoint {folder / 'checkpoints' / wanted} is damaged: {damage}") from damage


def evaluate(run: Run, data: Any, *, glob: str = "*.txt", on_bad_file: OnBadFile = "error") -> dict[str, float]:
    """How well a run does on data: "loss" in nats, and what the `measure` of its task adds.

    data: as in `train`, or None: what the run held out of its own data. Raises InputError for what reading them refuses, for characters that the run
    does not know, and for None where nothing was held out or the data are no longer those of the run.
    """
    task = TASKS[run.kind]
    graph, params, rest = split_model(run.model)
    evaluation = functools.partial(make_evaluation(graph, task.totals), params, rest)
    return task.measure(run, data, functools.partial(mean_totals, evaluation), **_options(task, glob, on_bad_file))


def _options(task: Task, glob: str, on_bad_file: OnBadFile) -> dict[str, Any]:
    """What of these the task's data take."""
    given = {"glob": glob, "on_bad_file": on_bad_file}
    return {name: given[name] for name in task.options}


# The run folder


def _read_record(folder: Path, argument: str) -> dict[str, Any] | None:
    """The contents of run.json, or None. Raises InputError for a damaged one and for another format."""
    if not (folder / "run.json").is_file():
        return None
    try:
        record = checkpoint.unseal((folder / "run.json").read_bytes())
    except checkpoint.Damaged as damage:
        raise InputError(argument, str(folder), f"its run.json is damaged: {damage}") from damage
    require(record.get("format") == FORMAT, argument, str(folder), f"has format {record.get('format')}; this version reads {FORMAT}")
    require(record.get("kind") in TASKS, argument, str(folder), f"holds a model of the kind {record.get('kind')!r}, none of {', '.join(TASKS)}")
    return record


def _inspect(folder: Path, resume: bool) -> dict[str, Any] | None:
    """The record of the run to go on with, or None for a new one. Raises InputError for a folder that must not be written to."""
    require(not folder.exists() or folder.is_dir(), "out", str(folder), "is not a folder")
    record = _read_record(folder, "out")
    require(record is None or resume, "out", str(folder), "already holds a run; --resume goes on with it")
    if record is not None:
        return record
    if folder.is_dir() and not checkpoint.unfinished(folder):
        present = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise InputError("out", str(folder), f"holds files that are no run's: {present}")
    if resume:
        warnings.warn(f"{folder} holds no run to resume; starting a new one", stacklevel=3)
    return None


def _read(task: Task, data: Any, options: dict[str, Any], record: dict[str, Any] | None) -> Any:
    if data is None and record is not None:
        known = record["data"]
        data, options = known["source"], {name: known[name] for name in task.options}
    found = task.read(data, **options)
    if record is not None:
        known = record["data"]
        require(found.digest == known["digest"], "data", found.source, f"is not the text that the run was trained on, {known['source']}")
    for line in found.skipped[:5]:
        warnings.warn(f"left out {line}", stacklevel=3)
    if len(found.skipped) > 5:
        warnings.warn(f"left out {len(found.skipped) - 5} more files", stacklevel=3)
    return found


def _configs(task: Task, config: Any, train_config: TrainConfig | None, data: Any, record: dict[str, Any] | None) -> tuple[Any, TrainConfig]:
    sizes = task.sizes(data)
    if isinstance(config, Mapping):
        config = task.config.from_dict({name: size for name, (size, _) in sizes.items()} | dict(config))
    if record is not None:
        config = config or task.config.from_dict(record["model"])
        train_config = train_config or TrainConfig.from_dict(record["train"])
        known_config, known_train = (
            task.config.from_dict(record["model"]),
            TrainConfig.from_dict(record["train"]),
        )  # fields that it lacks: the defaults
        for ours, theirs in ((config.to_dict(), known_config.to_dict()), (train_config.to_dict(), known_train.to_dict())):
            for name, value in _flat(ours).items():
                known = _flat(theirs).get(name)
                require(value == known, name, value, f"is {known!r} in the run that would be resumed")
        if record["versions"] != _versions():
            changed = [f"{k} {record['versions'].get(k)} -> {v}" for k, v in _versions().items() if record["versions"].get(k) != v]
            warnings.warn(f"the run was made with other versions, so it may not go on bitwise: {', '.join(changed)}", stacklevel=3)
    require(config is not None, "config", None, "must be given for a new run")
    train_config = train_config or TrainConfig()
    for name, (size, what) in sizes.items():
        require(getattr(config, name) == size, name, getattr(config, name), f"must be {size}, {what}")
    return config, train_config


def _task(config: Any, kind: str | None, record: dict[str, Any] | None, folder: Path) -> Task:
    """The task that is asked for; that of the run where there is one."""
    require(kind is None or kind in TASKS, "kind", kind, f"must be one of {', '.join(TASKS)}")
    asked = task_of(config)
    require(asked is None or kind in (None, asked.kind), "kind", kind, f"must be {asked.kind if asked else None!r}, that of the configuration")
    kind = kind or (asked.kind if asked else None)
    known = kind if record is None else record["kind"]
    require(kind in (None, known), "out", str(folder), f"holds a run of the kind {known!r}, not {kind!r}")
    return TASKS[known or LanguageTask.kind]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _versions() -> dict[str, str]:
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    return {"flax-gpt": __version__, "python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def _begin(folder: Path, task: Task, config: Any, train_config: TrainConfig, data: Any) -> None:
    """Writes tokenizer.json, then run.json, which makes the folder a run."""
    tokenizer = data.tokenizer.to_json().encode("utf-8")
    checkpoint.write_file(folder / "tokenizer.json", tokenizer)
    values = {
        "format": FORMAT,
        "kind": task.kind,
        "model": config.to_dict(),
        "train": train_config.to_dict(),
        "data": task.describe(data),
        "tokenizer_sha256": hashlib.sha256(tokenizer).hexdigest(),
        "versions": _versions(),
    }
    checkpoint.write_file(folder / "run.json", checkpoint.seal(values))


# The process


class _Clock:
    """Seconds since it was made, pauses left out."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @contextlib.contextmanager
    def pause(self, state: TrainState) -> Iterator[None]:
        jax.block_until_ready(state.step)
        paused = time.perf_counter()
        try:
            yield
        finally:
            self.began += time.perf_counter() - paused


@contextlib.contextmanager
def _signals(say: bool) -> Iterator[list[str]]:
    """A list that SIGINT and SIGTERM add their names to; a second SIGINT interrupts at once. Elsewhere than in the main thread: nothing."""
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)
        if say:
            os.write(2, b"\nstopping after this step; Ctrl-C again stops at once and loses what is not saved\n")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
