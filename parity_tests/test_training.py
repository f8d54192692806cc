"""The loss, the optimizer, the step and the run: what trains, what stops it, and that nothing can be told from a run that never stopped."""

import dataclasses
import importlib.resources
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import torch_ref.training.loss as torch_loss
import torch_ref.training.optimizer as torch_optimizer
from flax_gpt.config import GPTConfig, OptimizerConfig, TrainConfig
from flax_gpt.errors import InputError, RunError
from flax_gpt.nn.linear import embedding, linear, logits
from flax_gpt.training import checkpoint, progress
from flax_gpt.training.data import Batch, Windows, load_corpus
from flax_gpt.training.loop import Stopped, evaluate, load_run, train
from flax_gpt.training.loss import cross_entropy
from flax_gpt.training.optimizer import clip_by_global_norm, decayed_names, learning_rate, make_optimizer
from flax_gpt.training.state import failed, from_arrays, language_loss, make_step, new_model, new_state, split_model, to_arrays

# Loss


def certain(token: int, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    """Logits whose losses are exact in any arithmetic: 0 for `token`, 64 for every other one."""
    return jnp.full(shape, -64, dtype).at[..., token].set(0)


def test_padding_counts_for_nothing() -> None:
    logits = certain(0, (3, 4, 8)).at[2].set(jnp.nan_to_num(jnp.inf))
    weights = jnp.ones((3, 4)).at[2].set(0).at[1, 2:].set(0)
    targets = jnp.where(weights > 0, 3, -100)
    loss, gradient = jax.value_and_grad(cross_entropy)(logits, targets, weights)
    assert loss == 64
    assert not gradient[2].any()
    assert not gradient[1, 2:].any()
    assert cross_entropy(logits, targets, jnp.zeros((3, 4))) == 0
    theirs = torch_loss.cross_entropy(*(torch.from_numpy(np.array(x)) for x in (logits, targets, weights)))
    assert theirs == 64
    assert torch_loss.cross_entropy(torch.zeros(1, 2, 8), torch.full((1, 2), -100), torch.zeros(1, 2)) == 0


@pytest.mark.parametrize("label", [-100, -1, 8, 200])
@pytest.mark.parametrize("size", [8, 150])
def test_labels_outside_the_vocabulary_never_train(label: int, size: int) -> None:
    if 0 <= label < size:
        return
    logits, targets = jnp.zeros((1, 2, size)), jnp.array([[0, label]])
    with pytest.raises(InputError, match=f"targets = {label}"):
        cross_entropy(logits, targets)
    with pytest.raises(InputError, match=f"targets = {label}"):
        torch_loss.cross_entropy(torch.zeros(1, 2, size), torch.tensor([[0, label]]))
    assert math.isnan(jax.jit(cross_entropy)(logits, targets))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_loss_of_half_precision_logits_is_float32(dtype: str) -> None:
    loss = cross_entropy(certain(1, (1, 2, 8), dtype), jnp.zeros((1, 2), int))
    assert (loss.dtype, loss) == (jnp.float32, 64)
    logits = torch.from_numpy(np.array(certain(1, (1, 2, 8)))).to(getattr(torch, dtype))
    theirs = torch_loss.cross_entropy(logits, torch.zeros(1, 2, dtype=torch.long))
    assert (theirs.dtype, theirs) == (torch.float32, 64)


# Optimizer


@given(
    schedule=st.sampled_from(["constant", "warmup_cosine"]),
    warmup=st.integers(0, 30),
    total=st.sampled_from([1, 2, 7, 40]),  # few, since each is compiled
    ratio=st.floats(0, 1),
    lr=st.floats(1e-5, 1.0),
)
def test_schedules_are_torchs_to_the_bit(schedule: Any, warmup: int, total: int, ratio: float, lr: float) -> None:
    config = OptimizerConfig(lr=lr, schedule=schedule, warmup_steps=warmup, min_lr_ratio=ratio)
    theirs = torch_optimizer.make_optimizer(torch.nn.Linear(1, 1), config, total)
    ours = learning_rate(config, total)
    rates = []
    for _ in range(total + 3):
        rates.append(theirs.lr)
        theirs.optimizer.step()
        theirs.schedule.step()
    assert [ours(count) for count in range(total + 3)] == rates
    assert ours(jnp.arange(total + 3)).tolist() == np.float32(rates).tolist()
    with jax.enable_x64(True):
        assert ours(jnp.arange(total + 3)).tolist() == rates
    if schedule == "warmup_cosine":
        assert ours(0) > 0
        assert total <= max(warmup, 1) or math.isclose(ours(total - 1), lr * ratio, rel_tol=1e-15)
        assert max(map(ours, range(total))) <= lr


def test_the_clip_is_torchs() -> None:
    for gradient, limit in (([3.0, 4.0], 1.0), ([3.0, 4.0], 10.0), ([1e-7, 0.0], 1e-7), ([0.0, 0.0], 1e-9), ([0.0, 0.0], 1.0)):
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_norm_([parameter], limit)
        ours, _ = clip_by_global_norm(limit).update({"a": jnp.array(gradient)}, optax.EmptyState())
        assert ours["a"].tolist() == parameter.grad.tolist()


def test_decay_shrinks_matrices_alone_and_says_which() -> None:
    _, params, _ = split_model(new_model(GPTConfig(vocab_size=7, d_model=8, num_heads=2, num_layers=1, max_len=4), 0))
    params = jax.tree.map(lambda p: p + 1, params)
    for decay in ("matrices", "all"):
        config = OptimizerConfig(decay=decay, weight_decay=0.1, schedule="constant")
        optimizer = make_optimizer(config, 1)
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
        shrunk = {name for name, update in to_arrays(updates).items() if bool((update != 0).any())}
        assert shrunk == set(decayed_names(params, config))
        matrices = {name for name, p in to_arrays(params).items() if p.ndim >= 2}
        assert shrunk == (matrices if decay == "matrices" else set(to_arrays(params)))
        assert all("norm" not in name and "bias" not in name for name in matrices)
    assert "token_embed.embedding" in matrices
    assert decayed_names(params, OptimizerConfig(optimizer="adam")) == []


def test_the_torch_side_stops_at_a_bad_gradient() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch_optimizer.make_optimizer(model, OptimizerConfig(), 10)
    before = [p.detach().clone() for p in model.parameters()]
    for bad in (math.nan, math.inf):
        for p in model.parameters():
            p.grad = torch.full_like(p, bad)
        with pytest.raises(RunError, match=f"step 1: the gradient norm is {bad}"):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# The step

MODEL = dict(d_model=16, num_heads=2, num_layers=1, max_len=16)


class Stepper:
    """A state, its step and its windows, with a count of how often the step was traced."""

    def __init__(self) -> None:
        tokens = np.random.default_rng(0).integers(0, 9, 100).astype(np.uint8)
        self.windows = Windows(tokens, window=16, batch_size=8, seed=0)
        self.optimizer = make_optimizer(OptimizerConfig(), 100)
        self.graph, params, rest = split_model(new_model(GPTConfig(vocab_size=9, **MODEL), 0))
        self.state = new_state(params, rest, self.optimizer)
        self.traces = 0
        self.step = make_step(self.graph, self.optimizer, self.starts_line)

    def starts_line(self, completed: Any) -> Any:
        self.traces += 1
        return completed % 5 == 0


def snapshot(state: Any) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in to_arrays(state).items()}


def test_one_compilation_serves_every_batch_and_nothing_piles_up() -> None:
    s = Stepper()
    assert len({s.windows[i].weights.sum() for i in range(s.windows.steps_per_epoch)}) == 2  # a partial batch is among them
    arrays = []
    for i in range(30):
        s.state = s.step(s.state, s.windows[i])
        arrays.append(len(jax.live_arrays()))
    assert s.traces == 1
    assert int(s.state.step) == 30
    assert arrays[2] == arrays[-1]
    assert s.state.line_tokens == sum(s.windows[i].weights.sum() for i in range(25, 30))


def test_no_operation_of_the_gradient_grows_with_the_layers() -> None:
    """On the processor the gradient of the residual stream is kept, not added up anew by each layer from those after it; bfloat16 always kept it."""

    def widest(layers: int) -> int:
        """The most arrays that one operation reads."""
        config = GPTConfig(vocab_size=31, d_model=16, num_heads=2, num_layers=layers, max_len=8, dropout=0.1)
        graph, params, rest = split_model(new_model(config, 0))
        batch = Batch(jnp.zeros((2, 8), jnp.int32), jnp.zeros((2, 8), jnp.int32), jnp.ones((2, 8)))
        loss = lambda params: language_loss(nnx.merge(graph, params, rest, copy=True), batch)
        written = jax.jit(jax.grad(loss)).lower(params).compile().as_text().split("ENTRY")[1]
        return max(arguments.count("%") for arguments in re.findall(r" fusion\((.*?)\), kind", written))

    assert widest(4) == widest(2)


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_of_a_kernel_turns_nothing_around(tied: bool) -> None:
    """On the processor no copy of the inputs, or of what the outputs send back, is made for a layer's product over batch and positions."""
    config, rngs = GPTConfig(vocab_size=31, d_model=16), nnx.Rngs(0)
    graph, params = nnx.split(embedding(config, 31, rngs=rngs) if tied else linear(config, 16, 24, use_bias=True, rngs=rngs))
    of_layer = logits if tied else lambda layer, x: layer(x)
    total = lambda params, x: jnp.sum(jnp.sin(of_layer(nnx.merge(graph, params), x)))
    written = jax.jit(jax.grad(total)).lower(params, jnp.ones((3, 8, 16))).compile().as_text()
    assert " dot(" in written
    assert not re.findall(r" (?:copy|transpose)\(", written)


@pytest.mark.parametrize("placed", [False, True])
def test_the_second_step_is_not_compiled_anew(placed: bool) -> None:
    """Also where the weights have a device of their own, as loaded ones have, and after a checkpoint was read back."""
    s = Stepper()
    model = new_model(GPTConfig(vocab_size=9, **MODEL), 0)
    if placed:
        nnx.update(model, jax.device_put(nnx.state(model, nnx.Param), jax.devices()[0]))
    _, params, rest = split_model(model)
    state = new_state(params, rest, s.optimizer)
    for number in range(3):
        state = s.step(state, s.windows[number])
    assert s.step._cache_size() == 1
    state = from_arrays({name: np.asarray(array) for name, array in to_arrays(state).items()}, state)
    s.step(state, s.windows[3])
    assert s.step._cache_size() == 1


def test_a_run_compiles_nothing_twice_and_waits_for_the_device_at_its_lines_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two rounds of logging, evaluation and saving; the second one compiles nothing."""
    compiled: list[str] = []
    waits: list[int] = []
    rounds: list[int] = []
    done = [0]
    listen = lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    array = type(jnp.zeros(()))
    value = array._value  # what every way from a device array to a number on the host reads
    monkeypatch.setattr(array, "_value", property(lambda self: (waits.append(done[0]), value.fget(self))[1]))
    monkeypatch.setattr(jax, "block_until_ready", lambda x, wait=jax.block_until_ready: (waits.append(done[0]), wait(x))[1])
    save, fetch = checkpoint.save, Windows.__getitem__
    monkeypatch.setattr(checkpoint, "save", lambda *arguments: (save(*arguments), rounds.append(len(compiled))))
    monkeypatch.setattr(Windows, "__getitem__", lambda self, step: (done.__setitem__(0, step), fetch(self, step))[1])
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40, encoding="utf-8")
    config = TrainConfig(steps=40, batch_size=8, window=16, log_interval=10, eval_interval=20, checkpoint_interval=20)
    train(MODEL, config, tmp_path / "text.txt", tmp_path / "run", progress=False, picture=False)
    jax.monitoring.unregister_event_duration_listener(listen)
    assert rounds[0] > 0
    assert rounds[0] == rounds[-1]
    assert {step for step in waits if 0 < step} <= {9, 19, 29, 39}


FAULTS = """
import resource, sys
import jax, jax.numpy as jnp
from flax_gpt.training.allocation import keep_memory

if sys.argv[1] == "keep":
    keep_memory()
program, x = jax.jit(lambda x: jnp.sum(jnp.sin(x) @ x[:, :1])), jnp.ones((3072, 3072))
jax.block_until_ready(program(x))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(16):
    jax.block_until_ready(program(x))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="keep_memory speaks to glibc's malloc")
def test_memory_that_a_step_gives_back_is_kept_for_the_next() -> None:
    """By page faults: 16 executions touch 36 MiB of temporary memory each, 9216 pages, which may lie in three places before they stay in one."""
    run = lambda how: int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True, timeout=120).stdout)
    assert run("keep") < 4 * 9216
    assert run("give back") > 10 * 9216


def test_the_step_deletes_its_state_but_not_the_models_arrays() -> None:
    s = Stepper()
    _, params, rest = split_model(new_model(GPTConfig(vocab_size=9, **MODEL), 0))
    state = new_state(params, rest, s.optimizer)
    s.step(state, s.windows[0])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, rest)))


def test_dropout_draws_anew_at_each_step_and_again_at_the_same() -> None:
    s = Stepper()
    start = jax.tree.map(np.array, s.state)
    losses = []
    for count in (0, 0, 1, 2):
        state = jax.tree.map(jnp.array, start)._replace(step=jnp.array(count, jnp.int32))
        losses.append(float(s.step(state, s.windows[0]).loss))
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_batch_changes_nothing_and_neither_does_what_follows(bad: float) -> None:
    s = Stepper()
    s.state = s.step(s.state, s.windows[0])
    before = snapshot(s.state)
    assert not failed(s.state)
    batch = s.windows[1]
    batch.weights[0, 0] = bad
    for b in (batch, s.windows[2], s.windows[3]):
        s.state = s.step(s.state, b)
        after = snapshot(s.state)
        assert failed(s.state)
        assert {name for name in after if after[name] != before[name]} <= {"loss", "grad_norm"}


def test_the_originals_model_has_its_size_and_one_tied_leaf() -> None:
    _, params, _ = split_model(nnx.eval_shape(lambda: new_model(GPTConfig.preset("original", vocab_size=208), 0)))
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(params)) == 162_624
    assert [name for name, p in to_arrays(params).items() if 208 in p.shape] == ["token_embed.embedding"]


# Runs

SETTINGS = dict(steps=24, batch_size=4, log_interval=3, eval_interval=4, checkpoint_interval=5, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=3))
QUIET = dict(progress=False, picture=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("春眠不觉晓，处处闻啼鸟。To be, or not to be! " * 12, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that never stopped."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    train(MODEL, TrainConfig(**SETTINGS), text, folder, **QUIET)
    return folder


def final(folder: Path) -> dict[str, bytes]:
    """All arrays of the last checkpoint, and the metrics but for the speed."""
    found = checkpoint.newest_whole(folder)
    target = {name: np.empty(shape, dtype) for name, (shape, dtype) in found.arrays.items()}
    arrays = {name: array.tobytes() for name, array in checkpoint.restore(found, target).items()}
    lines = [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in checkpoint.read_lines(folder / "metrics.jsonl")]
    return arrays | {"metrics": json.dumps(lines).encode(), "notes": json.dumps(found.notes).encode(), "step": str(found.step).encode()}


def test_a_run_leaves_what_design_says(straight: Path, text: Path) -> None:
    lines = checkpoint.read_lines(straight / "metrics.jsonl")
    trained = [line for line in lines if "train_loss" in line]
    assert [line["step"] for line in trained] == list(range(3, 25, 3))
    assert all(line.keys() == {"step", "train_loss", "lr", "grad_norm", "tokens_per_second"} for line in trained)
    assert trained[-1]["train_loss"] < trained[0]["train_loss"]
    assert trained[0]["lr"] == 1e-2
    held_out = {line["step"]: line["held_out_loss"] for line in lines if "held_out_loss" in line}
    assert list(held_out) == list(range(4, 25, 4))
    best = min(held_out, key=lambda step: held_out[step])
    assert set(checkpoint.steps(straight)) >= {best, 24}
    assert len(checkpoint.steps(straight)) <= 3
    record = json.loads((straight / "run.json").read_text(encoding="utf-8"))
    assert GPTConfig.from_dict(record["model"]).vocab_size == len(set(text.read_text(encoding="utf-8")))
    assert TrainConfig.from_dict(record["train"]) == TrainConfig(**SETTINGS)
    assert record["data"]["digest"] == load_corpus(text).digest


def test_a_run_is_loaded_in_eval_mode_and_evaluates_as_it_was(straight: Path, text: Path, tmp_path: Path) -> None:
    run = load_run(straight)
    assert (run.step, run.folder, run.train_config) == (24, straight, TrainConfig(**SETTINGS))
    assert run.tokenizer == load_corpus(text).tokenizer
    tokens = run.tokenizer.encode("To be, or")[None].astype(np.int32)
    assert (run.model(tokens)[0] == run.model(tokens)[0]).all()
    whole = text.read_text(encoding="utf-8")
    (tmp_path / "end.txt").write_text(whole[len(whole) - int(0.1 * len(whole)) :], encoding="utf-8")
    found = evaluate(run, tmp_path / "end.txt")
    last = [line for line in checkpoint.read_lines(straight / "metrics.jsonl") if "held_out_loss" in line][-1]
    assert found == {"loss": last["held_out_loss"], "perplexity": float(np.exp(last["held_out_loss"])), "tokens": int(0.1 * len(whole)) - 1}
    assert evaluate(run, None) == found
    with pytest.raises(InputError, match="the run held nothing out"):
        evaluate(dataclasses.replace(run, train_config=dataclasses.replace(run.train_config, held_out=0.0)), None)
    with pytest.raises(InputError, match="is not what the run was trained on"):
        evaluate(dataclasses.replace(run, data=run.data | {"digest": "another"}), None)
    (tmp_path / "other.txt").write_text("To be ~", encoding="utf-8")
    with pytest.raises(InputError, match="holds '~'"):
        evaluate(run, tmp_path / "other.txt")
    with pytest.raises(InputError, match="the run's tokenizer"):
        evaluate(run, load_corpus())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_resume_goes_on_to_the_bit(number: int, text: Path, straight: Path, tmp_path: Path) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with signal_when(tmp_path / "metrics.jsonl", 4, number), pytest.raises(Stopped, match=f"stopped by {signal.Signals(number).name}") as caught:
        train(MODEL, TrainConfig(**SETTINGS), text, tmp_path, **QUIET)
    stopped = checkpoint.newest_whole(tmp_path).step
    assert f"after step {stopped}," in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert 0 < stopped < 24
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    run = train(None, None, None, tmp_path, resume=True, **QUIET)
    assert run.step == 24
    assert final(tmp_path) == final(straight)
    assert checkpoint.steps(tmp_path) == checkpoint.steps(straight)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("lock", "metrics.jsonl")}
    assert train(None, None, text, tmp_path, resume=True, **QUIET).step == 24  # nothing is left to do
    assert before == {path: path.stat().st_mtime_ns for path in before}


class signal_when:
    """Sends this process a signal once a file has so many lines."""

    def __init__(self, path: Path, lines: int, number: int):
        self.path, self.lines, self.number, self.over = path, lines, number, threading.Event()

    def __enter__(self) -> None:
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()

    def watch(self) -> None:
        while not self.over.wait(0.001):
            if self.path.exists() and self.path.read_bytes().count(b"\n") >= self.lines:
                os.kill(os.getpid(), self.number)
                return


WORKER = """
import json, sys
from flax_gpt.config import OptimizerConfig, TrainConfig
from flax_gpt.training.loop import train
model, settings = json.loads(sys.argv[3])
settings = TrainConfig.from_dict(settings)
train(model, settings, sys.argv[1], sys.argv[2], resume=True, progress=False, picture=False)
"""


def start_worker(text: Path, folder: Path) -> subprocess.Popen[bytes]:
    arguments = json.dumps([MODEL, TrainConfig(**SETTINGS).to_dict()])
    environment = os.environ | {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", WORKER, str(text), str(folder), arguments], env=environment)


def test_a_run_killed_again_and_again_ends_as_one_never_killed(text: Path, straight: Path, tmp_path: Path) -> None:
    """SIGKILL to a real process: before the folder exists, and at random moments after it has got a little further than the one before."""
    draw = random.Random(0)
    folder = tmp_path / "run"

    def lines() -> int:
        return len((folder / "metrics.jsonl").read_bytes().splitlines()) if (folder / "metrics.jsonl").exists() else 0

    reached = []
    for kill in range(4):
        process = start_worker(text, folder)
        goal, seen = lines() + 1, lines()
        while process.poll() is None and kill and seen < goal:
            time.sleep(0.002)
            seen = lines()
        time.sleep(draw.uniform(0, 0.2))
        process.kill()
        assert process.wait() in (-signal.SIGKILL, 0)
        reached.append(checkpoint.newest_whole(folder).step if (folder / "run.json").exists() and checkpoint.steps(folder) else 0)
    assert reached[0] == 0
    process = start_worker(text, folder)
    assert process.wait() == 0
    assert final(folder) == final(straight)
    assert checkpoint.steps(folder) == checkpoint.steps(straight)
    assert not list(folder.rglob("*.tmp"))


def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_the_same(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    newest = folder / "checkpoints" / "24"
    file = max((f for f in newest.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with (folder / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'{"step": 24, "train_l')
    with pytest.warns(UserWarning, match="24 is damaged and passed over"):
        assert load_run(folder).step < 24
    with pytest.warns(UserWarning, match="24 is damaged and passed over"):
        train(None, None, None, folder, resume=True, **QUIET)
    assert final(folder) == final(straight)
    for step in checkpoint.steps(folder):
        (folder / "checkpoints" / str(step) / "digests.json").write_bytes(b"{}")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(InputError, match="no whole checkpoint"):
        train(None, None, None, folder, resume=True, **QUIET)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_step(text: Path, tmp_path: Path) -> None:
    settings = TrainConfig(**SETTINGS | {"checkpoint_interval": 1, "held_out": 0.0, "optimizer": OptimizerConfig(lr=1e38, schedule="constant")})
    with pytest.raises(RunError, match=r"step 2: the loss is (nan|inf).*the checkpoint of step 1 is the last good one"):
        train(MODEL, settings, text, tmp_path / "a", **QUIET)
    assert load_run(tmp_path / "a").step == 1
    with pytest.raises(RunError, match=r"step 2: .*no checkpoint was saved before it"):
        train(MODEL, TrainConfig(**settings.to_dict() | {"checkpoint_interval": 9, "optimizer": settings.optimizer}), text, tmp_path / "b", **QUIET)
    assert checkpoint.steps(tmp_path / "b") == []


def test_two_writers_cannot_share_a_folder(text: Path, straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    with checkpoint.lock(folder), pytest.raises(InputError, match=f"is being written by process {os.getpid()}"):
        train(None, None, None, folder, resume=True, **QUIET)
    (tmp_path / "new").mkdir()
    with checkpoint.lock(tmp_path / "new"), pytest.raises(InputError, match="is being written"):
        train(MODEL, TrainConfig(**SETTINGS), text, tmp_path / "new", **QUIET)


def test_a_thread_can_train(text: Path, straight: Path, tmp_path: Path) -> None:
    thread = threading.Thread(target=train, args=(MODEL, TrainConfig(**SETTINGS), text, tmp_path / "run"), kwargs=QUIET)
    thread.start()
    thread.join()
    assert final(tmp_path / "run") == final(straight)


def test_lines_are_shown_where_there_is_no_terminal(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(MODEL, TrainConfig(**SETTINGS), text, tmp_path / "run", progress=True, picture=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    parameters = sum(array.size for array in jax.tree.leaves(split_model(load_run(tmp_path / "run").model)[1]))
    characters = len(text.read_text("utf-8"))
    assert shown.err.startswith(f"{parameters:,} parameters, {characters:,} characters of {text}, steps 1 to 24; compiling\n")
    assert "step 24/24  loss " in shown.err
    assert "step 24  held-out loss " in shown.err
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000


def test_time_left_does_not_count_the_compilation(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 100.0, 110.0, 140.0])  # made; 10 steps, 90 s of them compiling; then a step a second
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    display = progress.Display(True, 0, 60)
    for step in (10, 20, 50):
        display.update(step, 1.0, 64.0)
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition("tokens/s")[2].strip() for line in lines] == ["", "40 s left", "10 s left"]


# What is refused


def test_an_output_folder_with_anything_in_it_is_refused(text: Path, straight: Path, tmp_path: Path) -> None:
    settings = TrainConfig(**SETTINGS)
    with pytest.raises(InputError, match="already holds a run"):
        train(MODEL, settings, text, straight, **QUIET)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"holds files that are no run's: file"):
        train(MODEL, settings, text, tmp_path, **QUIET)
    with pytest.raises(InputError, match=r"holds files that are no run's: file"):
        train(MODEL, settings, text, tmp_path, resume=True, **QUIET)
    with pytest.raises(InputError, match="is not a folder"):
        train(MODEL, settings, text, tmp_path / "file", **QUIET)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (MODEL, {"window": 17}, "window = 17: must be at most max_len = 16"),
        (MODEL, {"held_out": 0.001}, "held_out = 0.001: leaves 0 of 396 tokens"),
        (MODEL | {"max_len": 600}, {}, r"tokens to train on.*must hold more than window = 600"),
        (GPTConfig(vocab_size=99, **MODEL), {}, r"vocab_size = 99: must be \d+, the number of distinct characters"),
        (MODEL | {"width": 4}, {}, "width = 4: is not a field"),
        (None, {}, "config = None: must be given for a new run"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_written(
    model: Any, settings: dict[str, Any], message: str, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train(model, TrainConfig(**SETTINGS | settings), text, tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()


def test_ids_outside_the_vocabulary_are_refused(text: Path, tmp_path: Path) -> None:
    corpus = load_corpus(text)
    size = corpus.tokenizer.vocab_size
    tokens = corpus.tokens.copy()
    tokens[7] = size
    with pytest.raises(InputError, match=rf"data = {size}: is a token id outside \[0, {size}\)"):
        train(MODEL, TrainConfig(**SETTINGS), dataclasses.replace(corpus, tokens=tokens), tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()


def test_a_resume_with_anything_else_is_refused(straight: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(text.read_text(encoding="utf-8")[::-1], encoding="utf-8")
    other = OptimizerConfig(lr=1e-3, warmup_steps=3)
    for model, settings, data, message in (
        (MODEL | {"d_model": 32}, SETTINGS, text, "d_model = 32: is 16 in the run"),
        (MODEL, SETTINGS | {"seed": 1}, text, "seed = 1: is 0 in the run"),
        (MODEL, SETTINGS | {"optimizer": other}, text, "optimizer.lr = 0.001: is 0.01 in the run"),
        (MODEL, SETTINGS, tmp_path / "other.txt", "is not the text that the run was trained on"),
    ):
        with pytest.raises(InputError, match=message):
            train(model, TrainConfig(**settings), data, straight, resume=True, **QUIET)


def test_the_best_checkpoint_and_any_other_is_loaded_on_request(tmp_path: Path) -> None:
    """What is held out is nothing that the model is trained on, so that it only gets worse."""
    folder, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("a" * 540 + "b" * 60, encoding="utf-8")
    train(MODEL, TrainConfig(**SETTINGS | {"steps": 12, "keep_last": 1}), text, folder, **QUIET)
    held_out = {line["step"]: line["held_out_loss"] for line in checkpoint.read_lines(folder / "metrics.jsonl") if "held_out_loss" in line}
    best = min(held_out, key=lambda step: held_out[step])
    assert best != 12
    assert checkpoint.steps(folder) == [best, 12]
    for step, number in (("best", best), (best, best), (str(best), best), ("last", 12), (12, 12)):
        run = load_run(folder, step)
        assert run.step == number
        assert evaluate(run, None)["loss"] == held_out[number]
    with pytest.raises(InputError, match=rf"step = 3: must be last, best or a step that .* keeps: {best}, 12$"):
        load_run(folder, 3)
    (folder / "checkpoints" / str(best) / "digests.json").write_bytes(b"")
    with pytest.raises(InputError, match=r"step = 'best': its checkpoint .* is damaged"):
        load_run(folder, "best")
    assert load_run(folder).step == 12


def test_a_resume_of_nothing_starts_and_says_so(text: Path, straight: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="holds no run to resume"):
        train(MODEL, TrainConfig(**SETTINGS), text, tmp_path / "run", resume=True, **QUIET)
    assert final(tmp_path / "run") == final(straight)


def test_a_folder_that_is_no_whole_run_is_refused(straight: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no run folder"):
        load_run(tmp_path)
    with pytest.raises(InputError, match="is no run folder"):
        load_run(tmp_path / "none")
    folder = tmp_path / "run"
    for name, content, message in (
        ("run.json", (straight / "run.json").read_bytes().replace(b"16", b"32", 1), "run.json is damaged"),
        ("run.json", checkpoint.seal({"format": 2}), "has format 2; this version reads 1"),
        ("run.json", checkpoint.seal({"format": 1, "kind": "encoder"}), "of the kind 'encoder'"),
        ("tokenizer.json", (straight / "tokenizer.json").read_bytes().replace("晓".encode(), "小".encode()), "tokenizer.json is damaged"),
        ("tokenizer.json", None, "tokenizer.json cannot be read"),
    ):
        shutil.copytree(straight, folder)
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        with pytest.raises(InputError, match=message):
            load_run(folder)
        shutil.rmtree(folder)
    shutil.copytree(straight, folder)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(InputError, match="holds no checkpoint yet"):
        load_run(folder)


# The original's recipe


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("original")
    with importlib.resources.as_file(importlib.resources.files("flax_gpt.corpus") / "original_size.txt") as path:
        corpus = load_corpus(path)
    assert (len(corpus.tokens), corpus.tokenizer.vocab_size) == (448, 208)
    train(
        GPTConfig.preset("original", vocab_size=208), TrainConfig.preset("original", epochs=60, checkpoint_interval=10_000), corpus, folder, **QUIET
    )
    return [line for line in checkpoint.read_lines(folder / "metrics.jsonl") if "epoch" in line]


def test_the_originals_recipe_reaches_its_loss(original: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in original] == [27 * epoch for epoch in range(1, 61)]
    assert original[0]["epoch_loss"] > 10  # torch's initialisation starts near 30
    assert original[19]["epoch_loss"] < 0.15
    assert original[59]["epoch_loss"] < 0.09
