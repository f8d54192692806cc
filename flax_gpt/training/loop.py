"""`train`, `load_run` and `evaluate`: what the commands of the same names call, usable without them."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import math
import os
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_gpt import __version__
from flax_gpt.config import GPTConfig, TrainConfig
from flax_gpt.errors import InputError, RunError, require
from flax_gpt.models.gpt import MiniGPT
from flax_gpt.training import checkpoint
from flax_gpt.training.data import Corpus, OnBadFile, Windows, evaluation_batches, load_corpus, split
from flax_gpt.training.optimizer import learning_rate, make_optimizer
from flax_gpt.training.progress import Display
from flax_gpt.training.state import TrainState, failed, from_arrays, make_evaluation, make_step, new_model, new_state, split_model, to_arrays
from flax_gpt.training.tokenizer import CharTokenizer

FORMAT = 1
KIND = "gpt"
DEFAULT_STEPS = 1000
_OWN_FILES = ("run.json", "tokenizer.json", "metrics.jsonl", "loss.png", "checkpoints", "lock", "figures")


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model and what it was trained with; the model is in eval mode."""

    model: MiniGPT
    tokenizer: CharTokenizer
    config: GPTConfig
    train_config: TrainConfig
    step: int
    """Completed updates."""
    folder: Path


class Stopped(RunError):
    """A run that a signal ended, saved; `resume` goes on from there."""


def train(
    config: GPTConfig | Mapping[str, Any] | None,
    train_config: TrainConfig | None,
    data: str | Path | Corpus | None,
    out: str | Path,
    *,
    glob: str = "*.txt",
    on_bad_file: OnBadFile = "error",
    resume: bool = False,
    progress: bool = True,
    picture: bool = True,
) -> Run:
    """Trains a character model on a text and leaves a run folder in `out`.

    config: the model; a mapping gives the fields of GPTConfig without vocab_size, which is the number of characters of the text.
    data, glob, on_bad_file: as in `load_corpus`, or a corpus that it returned.
    resume: goes on from the newest whole checkpoint, bitwise as if nothing had happened on the same machine and versions; starts anew where a killed
    run left nothing. `config`, `train_config` and `data` may then be None: those of the run.
    progress: shows a bar, or lines where standard error is no terminal. picture: draws loss.png at the end.

    SIGINT and SIGTERM end the run after the present step, saved, with Stopped. Raises InputError for what `load_corpus` refuses, a text shorter than
    a window, a vocab_size that is not the text's, a folder that holds a run (without resume) or other files or is being written by another process,
    and a resume with another configuration or text; RunError when the loss or the gradient norm stops being finite, the last good checkpoint kept.
    """
    use_compilation_cache()
    folder = Path(out)
    record = _inspect(folder, resume)
    corpus = _corpus(data, glob, on_bad_file, record)
    config, train_config = _configs(config, train_config, corpus, record)
    tokens, held_out = split(corpus.tokens, train_config.held_out)
    if train_config.held_out > 0:
        require(len(held_out) >= 2, "held_out", train_config.held_out, f"leaves {len(held_out)} of {len(corpus.tokens)} tokens, and needs 2; or 0")
    window = _window(config, train_config)
    windows = Windows(tokens, window=window, batch_size=train_config.batch_size, seed=train_config.seed, stride=train_config.stride or 1)
    folder.mkdir(parents=True, exist_ok=True)
    with checkpoint.lock(folder):
        if record is None:
            _inspect(folder, resume)
            _begin(folder, config, train_config, corpus)
        return _Trainer(folder, config, train_config, corpus, windows, held_out, progress, picture).run()


class _Trainer:
    """One call of `train`, after its arguments have been checked and while the lock is held."""

    def __init__(
        self,
        folder: Path,
        config: GPTConfig,
        train_config: TrainConfig,
        corpus: Corpus,
        windows: Windows,
        held_out: np.ndarray,
        progress: bool,
        picture: bool,
    ):
        self.folder, self.config, self.train_config, self.corpus = folder, config, train_config, corpus
        self.windows, self.held_out, self.progress, self.picture = windows, held_out, progress, picture
        self.metrics = folder / "metrics.jsonl"
        self.epoch = windows.steps_per_epoch if train_config.epochs is not None else None
        if train_config.epochs is not None:
            self.total = train_config.epochs * windows.steps_per_epoch
        else:
            self.total = train_config.steps or DEFAULT_STEPS
        self.schedule = learning_rate(train_config.optimizer, self.total)
        optimizer = make_optimizer(train_config.optimizer, self.total)
        self.graph, params, rest = split_model(new_model(config, train_config.seed))
        self.state = new_state(params, rest, optimizer)
        self.step = make_step(self.graph, optimizer, self.starts_line)
        self.evaluation = make_evaluation(self.graph)
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
            while self.done < self.total:
                batch = self.windows[self.done]
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
                if len(self.held_out) and (self.done % config.eval_interval == 0 or self.done == self.total):
                    with clock.pause(self.state):
                        best = self._evaluate(display)
                if best or self.done % config.checkpoint_interval == 0 or self.done == self.total or received:
                    with clock.pause(self.state):
                        self._save()
                if received and self.done < self.total:
                    raise Stopped(f"stopped by {received[0]} after step {self.done}, which is saved in {self.folder}; --resume goes on from there")
        if self.picture:
            from flax_gpt.figures import loss_curve

            loss_curve.draw(self.metrics, self.folder / "loss.png")
        model = nnx.merge(self.graph, self.state.params, self.state.rest)
        model.eval()
        return Run(model, self.corpus.tokenizer, self.config, self.train_config, self.done, self.folder)

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
        loss, _ = _mean_loss(self.evaluation, self.state.params, self.state.rest, self.held_out, self.windows.window, self.windows.batch_size)
        if not math.isfinite(loss):
            raise RunError(f"step {self.done}: the held-out loss is {loss}; the checkpoint of step {self.saved} is the last good one")
        checkpoint.append_line(self.metrics, {"step": self.done, "held_out_loss": loss})
        display.say(f"step {self.done}  held-out loss {loss:.4f}")
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


def load_run(folder: str | Path) -> Run:
    """The run in a folder, with the weights of its newest whole checkpoint, in eval mode; a damaged newer one is passed over with a warning.

    Raises InputError for a folder that holds no run, no checkpoint yet, or only damaged files.
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
    config, train_config = GPTConfig.from_dict(record["model"]), TrainConfig.from_dict(record["train"])
    found = checkpoint.newest_whole(folder)
    require(found is not None, "run", str(folder), "holds no checkpoint yet")
    assert found is not None
    graph, params, rest = split_model(nnx.eval_shape(lambda: new_model(config, 0)))
    like = {"params": params, "rest": rest}
    values = from_arrays(checkpoint.restore(found, to_arrays(like)), like)
    model = nnx.merge(graph, values["params"], values["rest"])
    model.eval()
    return Run(model, CharTokenizer.load(folder / "tokenizer.json"), config, train_config, found.step, folder)


def evaluate(run: Run, data: str | Path | Corpus | None, *, glob: str = "*.txt", on_bad_file: OnBadFile = "error") -> dict[str, float]:
    """{"loss": nats a token, "perplexity": its exponential, "tokens": how many were predicted} of a run on a text.

    The text is cut into non-overlapping windows of the length that the run trained on; every token but the first is predicted once. Raises InputError
    for what `load_corpus` refuses, characters that the run does not know included, and for fewer than two characters.
    """
    corpus = data if isinstance(data, Corpus) else load_corpus(data, glob=glob, on_bad_file=on_bad_file, tokenizer=run.tokenizer)
    require(corpus.tokenizer == run.tokenizer, "data", corpus.source, "must be read with the run's tokenizer")
    graph, params, rest = split_model(run.model)
    window, batch_size = _window(run.config, run.train_config), run.train_config.batch_size
    loss, count = _mean_loss(make_evaluation(graph), params, rest, corpus.tokens, window, batch_size)
    return {"loss": loss, "perplexity": float(np.exp(loss)), "tokens": count}


def _mean_loss(evaluation: Any, params: nnx.State, rest: nnx.State, tokens: np.ndarray, window: int, batch_size: int) -> tuple[float, int]:
    total, pending = 0.0, None
    for batch in evaluation_batches(tokens, window=window, batch_size=batch_size):
        ahead = evaluation(params, rest, batch)
        # Read one batch late, so that the device never waits for the host; added up in float64.
        total, pending = total + (0.0 if pending is None else float(pending)), ahead
    assert pending is not None
    return (total + float(pending)) / (len(tokens) - 1), len(tokens) - 1


def _window(config: GPTConfig, train_config: TrainConfig) -> int:
    window = config.max_len if train_config.window is None else train_config.window
    require(window <= config.max_len, "window", window, f"must be at most max_len = {config.max_len}")
    return window


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
    require(record.get("kind") == KIND, argument, str(folder), f"holds a model of the kind {record.get('kind')!r}, not {KIND!r}")
    return record


def _inspect(folder: Path, resume: bool) -> dict[str, Any] | None:
    """The record of the run to go on with, or None for a new one. Raises InputError for a folder that must not be written to."""
    require(not folder.exists() or folder.is_dir(), "out", str(folder), "is not a folder")
    record = _read_record(folder, "out")
    require(record is None or resume, "out", str(folder), "already holds a run; resume goes on with it")
    if record is not None:
        return record
    present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    strange = [name for name in present if name not in _OWN_FILES and not name.endswith(".tmp")]
    require(not strange and not checkpoint.steps(folder), "out", str(folder), f"holds files that are no run's: {', '.join(strange or present)}")
    if resume:
        warnings.warn(f"{folder} holds no run to resume; starting a new one", stacklevel=3)
    return None


def _corpus(data: str | Path | Corpus | None, glob: str, on_bad_file: OnBadFile, record: dict[str, Any] | None) -> Corpus:
    if isinstance(data, Corpus):
        corpus, size = data, data.tokenizer.vocab_size
        require(len(data.tokens) > 0, "data", data.source, "holds no tokens")
        require(int(data.tokens.max()) < size, "data", int(data.tokens.max()), f"is a token id outside [0, {size}), the vocabulary")
    elif data is None and record is not None:
        known = record["data"]
        corpus = load_corpus(known["source"], glob=known["glob"], on_bad_file=known["on_bad_file"])
    else:
        corpus = load_corpus(data, glob=glob, on_bad_file=on_bad_file)
    if record is not None:
        known = record["data"]
        require(corpus.digest == known["digest"], "data", corpus.source, f"is not the text that the run was trained on, {known['source']}")
    for line in corpus.skipped[:5]:
        warnings.warn(f"left out {line}", stacklevel=3)
    if len(corpus.skipped) > 5:
        warnings.warn(f"left out {len(corpus.skipped) - 5} more files", stacklevel=3)
    return corpus


def _configs(
    config: GPTConfig | Mapping[str, Any] | None, train_config: TrainConfig | None, corpus: Corpus, record: dict[str, Any] | None
) -> tuple[GPTConfig, TrainConfig]:
    size = corpus.tokenizer.vocab_size
    if isinstance(config, Mapping):
        config = GPTConfig.from_dict({"vocab_size": size, **config})
    if record is not None:
        config = config or GPTConfig.from_dict(record["model"])
        train_config = train_config or TrainConfig.from_dict(record["train"])
        for ours, theirs in ((config.to_dict(), record["model"]), (train_config.to_dict(), record["train"])):
            for name, value in _flat(ours).items():
                known = _flat(theirs).get(name)
                require(value == known, name, value, f"is {known!r} in the run that would be resumed")
        if record["versions"] != _versions():
            changed = [f"{k} {record['versions'].get(k)} -> {v}" for k, v in _versions().items() if record["versions"].get(k) != v]
            warnings.warn(f"the run was made with other versions, so it may not go on bitwise: {', '.join(changed)}", stacklevel=3)
    require(config is not None, "config", None, "must be given for a new run")
    assert config is not None
    train_config = train_config or TrainConfig()
    require(config.vocab_size == size, "vocab_size", config.vocab_size, f"must be {size}, the number of distinct characters in the text")
    return config, train_config


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _versions() -> dict[str, str]:
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    return {"flax-gpt": __version__, "python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def _begin(folder: Path, config: GPTConfig, train_config: TrainConfig, corpus: Corpus) -> None:
    """Writes tokenizer.json, then run.json, which makes the folder a run."""
    tokenizer = corpus.tokenizer.to_json().encode("utf-8")
    checkpoint.write_file(folder / "tokenizer.json", tokenizer)
    values = {
        "format": FORMAT,
        "kind": KIND,
        "model": config.to_dict(),
        "train": train_config.to_dict(),
        "data": {
            "source": corpus.source,
            "glob": corpus.glob,
            "on_bad_file": corpus.on_bad_file,
            "digest": corpus.digest,
            "characters": len(corpus.tokens),
            "files": corpus.files,
            "skipped": len(corpus.skipped),
        },
        "tokenizer_sha256": hashlib.sha256(tokenizer).hexdigest(),
        "versions": _versions(),
    }
    checkpoint.write_file(folder / "run.json", checkpoint.seal(values))


# The process


def use_compilation_cache() -> None:
    """Keeps compiled programs, small ones too, in the user's cache folder; what JAX_… variables or jax's own configuration say comes first."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None:
        if sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        elif sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        config.update("jax_compilation_cache_dir", str(base / "flax-gpt" / "jax"))
    # A start is made of many compilations below jax's threshold of a second.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


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
