"""Checkpoints: what is saved comes back to the bit, what is damaged is noticed, and a kill at any moment leaves something whole."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from flax_gpt.config import GPTConfig, TrainConfig
from flax_gpt.errors import InputError
from flax_gpt.training import checkpoint, compilation, loop
from flax_gpt.training.checkpoint import Damaged
from flax_gpt.training.data import load_corpus
from flax_gpt.training.tasks import TASKS


def arrays(seed: int) -> dict[str, jnp.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "params.a": jnp.array(draw.normal(size=(3, 5)), jnp.float32),
        "params.b": jnp.array(draw.normal(size=7), jnp.bfloat16),
        "rest.key": jnp.array(draw.integers(0, 2**32, 2), jnp.uint32),
        "step": jnp.array(seed, jnp.int32),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of the steps 1 and 2."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, arrays(step), {"loss": 0.1 * step})
    return tmp_path


def assert_holds(found: checkpoint.Checkpoint, step: int) -> None:
    wanted = arrays(step)
    restored = checkpoint.restore(found, wanted)
    assert restored.keys() == wanted.keys()
    for name, array in wanted.items():
        assert restored[name].dtype == array.dtype
        assert restored[name].tobytes() == np.asarray(array).tobytes()


def test_what_is_saved_comes_back_to_the_bit(folder: Path) -> None:
    found = checkpoint.newest_whole(folder)
    assert (found.step, found.notes) == (2, {"loss": 0.2})
    assert_holds(found, 2)
    assert_holds(checkpoint.verify(folder / "checkpoints" / "1"), 1)
    part = checkpoint.restore(found, {"params.a": arrays(2)["params.a"]})
    assert part.keys() == {"params.a"}


def test_every_array_that_does_not_fit_is_named(folder: Path) -> None:
    found = checkpoint.newest_whole(folder)
    wanted = arrays(2) | {"params.a": jnp.zeros((5, 3)), "params.b": jnp.zeros(7), "new": jnp.zeros(1)}
    with pytest.raises(InputError) as caught:
        checkpoint.restore(found, wanted)
    for problem in ("params.a is float32[3, 5] instead of float32[5, 3]", "params.b is bfloat16[7] instead of float32[7]", "new is missing"):
        assert problem in str(caught.value)


def test_a_flipped_bit_in_any_file_is_noticed(folder: Path) -> None:
    path = folder / "checkpoints" / "2"
    draw = random.Random(0)
    files = [f for f in path.rglob("*") if f.is_file()]
    assert len(files) > 5
    for file in files:
        content = file.read_bytes()
        bits = {0, 8 * len(content) - 1, *(draw.randrange(8 * len(content)) for _ in range(25))} if content else set()
        for bit in bits:
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            with pytest.raises(Damaged):
                checkpoint.verify(path)
        file.write_bytes(content)
    assert checkpoint.verify(path).step == 2


def test_every_bit_of_the_digests_counts(tmp_path: Path) -> None:
    content = checkpoint.seal({"step": 2, "loss": 0.1, "note": "é", "files": {"a": [3, "00ff"]}, "none": None})
    assert checkpoint.unseal(content) == {"step": 2, "loss": 0.1, "note": "é", "files": {"a": [3, "00ff"]}, "none": None}
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            checkpoint.unseal(bytes(changed))
    for wrong in (b"", b"[]", b"{}", content[:-1], content + b" ", content * 2, json.dumps(json.loads(content)).encode()):
        with pytest.raises(Damaged):
            checkpoint.unseal(wrong)


def test_shortened_missing_added_and_swapped_files_are_noticed(folder: Path) -> None:
    path, kept = folder / "checkpoints" / "2", folder / "kept"
    shutil.copytree(path, kept)

    def again() -> None:
        shutil.rmtree(path)
        shutil.copytree(kept, path)

    for file in [f.relative_to(path) for f in path.rglob("*") if f.is_file()]:
        size = (path / file).stat().st_size
        for length in {0, size // 2, size - 1} - {size}:
            os.truncate(path / file, length)
            with pytest.raises(Damaged):
                checkpoint.verify(path)
            again()
        (path / file).write_bytes((path / file).read_bytes() + b"\0")
        with pytest.raises(Damaged):
            checkpoint.verify(path)
        again()
        (path / file).unlink()
        with pytest.raises(Damaged):
            checkpoint.verify(path)
        again()
    (path / "arrays" / "more").touch()
    with pytest.raises(Damaged, match="arrays/more: is not of this checkpoint"):
        checkpoint.verify(path)
    shutil.rmtree(path)
    shutil.copytree(folder / "checkpoints" / "1", path)
    with pytest.raises(Damaged, match="it is the checkpoint of step 1"):
        checkpoint.verify(path)


def test_the_newest_whole_one_is_found_and_the_damaged_named(folder: Path) -> None:
    checkpoint.save(folder, 10, arrays(10), {})
    (folder / "checkpoints" / "11.tmp").mkdir()
    for step in (10, 2):
        next((folder / "checkpoints" / str(step) / "arrays" / "d").iterdir()).write_bytes(b"x")
    with pytest.warns(UserWarning, match="is damaged and passed over") as warned:
        assert checkpoint.newest_whole(folder).step == 1
    assert [Path(str(w.message).split()[1]).name for w in warned] == ["10", "2"]
    (folder / "checkpoints" / "1" / "digests.json").unlink()
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(InputError, match="those of the steps 1, 2, 10 are damaged"):
        checkpoint.newest_whole(folder)
    shutil.rmtree(folder / "checkpoints")
    assert checkpoint.newest_whole(folder) is None


def test_saving_replaces_a_damaged_checkpoint(folder: Path) -> None:
    (folder / "checkpoints" / "2" / "digests.json").write_bytes(b"{}")
    checkpoint.save(folder, 2, arrays(2), {})
    assert_holds(checkpoint.newest_whole(folder), 2)


def test_pruning_keeps_what_is_named_and_clears_leftovers(folder: Path) -> None:
    checkpoint.save(folder, 3, arrays(3), {})
    (folder / "checkpoints" / "4.tmp" / "arrays").mkdir(parents=True)
    (folder / "checkpoints" / "1.old.tmp").mkdir()
    for name in ("work.tmp", "04.tmp", "5.new.tmp", "notes.tmp"):
        (folder / "checkpoints" / name).mkdir()
    (folder / "checkpoints" / "6.tmp").touch()
    (folder / "thesis.tmp").touch()
    (folder / "7.tmp").mkdir()
    checkpoint.prune(folder, [1, 3])
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["04.tmp", "1", "3", "5.new.tmp", "6.tmp", "notes.tmp", "work.tmp"]
    assert sorted(p.name for p in folder.iterdir()) == ["7.tmp", "checkpoints", "thesis.tmp"]


def test_what_is_no_checkpoint_by_name_or_kind_is_none(folder: Path) -> None:
    parent = folder / "checkpoints"
    (parent / "2").rename(parent / "02")
    (parent / "3").symlink_to("nowhere")
    (parent / "4").symlink_to("1")
    (parent / "5").touch()
    (parent / "٦").mkdir()
    assert checkpoint.steps(folder) == [1]
    assert_holds(checkpoint.newest_whole(folder), 1)
    for step in (3, 4, 5):
        checkpoint.save(folder, step, arrays(step), {})
    assert checkpoint.steps(folder) == [1, 3, 4, 5]
    assert_holds(checkpoint.verify(parent / "1"), 1)
    assert_holds(checkpoint.newest_whole(folder), 5)


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "name", ["thesis.tmp", "work.tmp/", "metrics.jsonl", "checkpoints/", "loss.png", "figures/", ".loss.png.1.tmp", "run.json.tmp/"]
)
def test_a_folder_that_is_no_runs_is_refused_and_stays_as_it_is(tmp_path: Path, name: str, resume: bool) -> None:
    (tmp_path / "lock").touch()
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text('{"step": 5}\n')
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match=f"holds files that are no run's: .*{name.rstrip('/')}"):
        loop.train(None, None, None, tmp_path, resume=resume)
    assert snapshot(tmp_path) == before


def test_only_what_a_run_without_its_record_leaves_is_taken_over(tmp_path: Path) -> None:
    assert checkpoint.unfinished(tmp_path)
    for name, content in (("lock", b""), ("lock", b"123\n"), ("tokenizer.json.tmp", b"{"), ("tokenizer.json", b"{}"), ("run.json.tmp", b"{")):
        (tmp_path / name).write_bytes(content)
        assert checkpoint.unfinished(tmp_path)
    (tmp_path / "lock").write_bytes(b"y\n")
    assert not checkpoint.unfinished(tmp_path)
    (tmp_path / "lock").unlink()
    assert not checkpoint.unfinished(tmp_path)
    (tmp_path / "lock").symlink_to("tokenizer.json")
    assert not checkpoint.unfinished(tmp_path)


def test_metrics_are_cut_back_and_a_torn_line_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (10, 20, 20, 30):
        checkpoint.append_line(path, {"step": step, "train_loss": 1.5})
    whole = path.read_bytes()
    for torn in (b"", b"\n", b'{"step": 3', b'{"step": 3\n', b"\xff\n", b'{"step"'):
        path.write_bytes(whole + torn)
        checkpoint.cut_lines(path, 20)
        assert [line["step"] for line in checkpoint.read_lines(path)] == [10, 20, 20]
        assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
    checkpoint.cut_lines(tmp_path / "new.jsonl", 0)
    assert (tmp_path / "new.jsonl").read_bytes() == b""


@pytest.mark.parametrize("damaged", [b'{"step": 1\x00, "t', b"", b"5", b"{}", b"null", b'{"step": "a"}', b'{"step": NaN}', b"[" * 10**5, b"\xff"])
def test_a_damaged_line_between_others_takes_none_with_it(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step":10}', damaged, b'{"step": 20}', b'{"step": 30}']
    path.write_bytes(b"\n".join([*lines, damaged, b'{"step": 40}', b'{"st']))
    with pytest.warns(UserWarning, match=r"metrics.jsonl, line 2 is no JSON object") as warned:
        checkpoint.cut_lines(path, 20)
    assert len(warned) == 1
    assert path.read_bytes() == b"\n".join(lines[:3]) + b"\n"
    assert [line["step"] for line in checkpoint.read_lines(path)] == [10, 20]


def test_a_loaded_run_is_named_as_the_run(tmp_path: Path) -> None:
    corpus = load_corpus("shipped")
    config = GPTConfig(vocab_size=corpus.tokenizer.vocab_size)
    loop._begin(tmp_path, TASKS["gpt"], config, TrainConfig(), corpus)
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(InputError, match=r"^run = .*holds no whole checkpoint"):
        loop.load_run(tmp_path)


@pytest.mark.parametrize("kind", ["gpt", "encoder-decoder", "classifier"])
def test_data_that_are_no_regular_file_are_refused_at_once(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"^data = .*pipe'.*file"):
        TASKS[kind].read(tmp_path / "pipe")


# Other processes

HOLD = """
import sys, time
from pathlib import Path
from flax_gpt.training.checkpoint import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_living_writer_keeps_others_out_and_a_dead_one_does_not(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"is being written by process {process.pid}"), checkpoint.lock(tmp_path):
            pass
        process.kill()
        process.wait()
    with checkpoint.lock(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(InputError, match="is being written"), checkpoint.lock(tmp_path):
            pass
    with checkpoint.lock(tmp_path):
        pass


KILL = """
import os, random, shutil, signal, sys
from pathlib import Path
import numpy as np
from flax_gpt.training import checkpoint

base, arrays = Path(sys.argv[1]), dict(np.load(sys.argv[2]))
seen, limit = [], [None]

def hook(event, args):
    # Every opening, renaming, making and removing below the folder is a moment to die at.
    if limit[0] is not None and event.split(".")[0] in ("open", "os", "shutil") and any(str(a).startswith(str(base)) for a in args):
        seen.append(event)
        if len(seen) > limit[0]:
            os.kill(os.getpid(), signal.SIGKILL)

def attempt(folder, moment):
    child = os.fork()
    if child == 0:
        sys.addaudithook(hook)
        limit[0] = moment
        checkpoint.save(folder, 2, arrays, {"moment": moment})
        checkpoint.prune(folder, [2])
        os._exit(len(seen) and 0)
    return os.waitpid(child, 0)[1]

moment = 0
while True:
    folder = base / str(moment)
    shutil.copytree(base / "start", folder)
    status = attempt(folder, moment)
    print(moment, status, flush=True)
    if status == 0:
        break
    moment += int(sys.argv[3])
"""


def test_a_kill_at_any_step_of_saving_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """A real SIGKILL at every third opening, renaming, making or removing that saving step 2 and dropping step 1 consists of."""
    checkpoint.save(tmp_path / "start", 1, arrays(1), {})
    np.savez(tmp_path / "two.npz", **{name: array for name, array in arrays(2).items() if array.dtype != jnp.bfloat16})
    command = [sys.executable, "-W", "ignore", "-c", KILL, str(tmp_path), str(tmp_path / "two.npz"), "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    outcomes = [line.split() for line in done.stdout.splitlines()]
    assert len(outcomes) > 15
    assert [status for _, status in outcomes] == [str(int(signal.SIGKILL))] * (len(outcomes) - 1) + ["0"]
    steps = []
    for moment, _ in outcomes:
        folder = tmp_path / moment
        with warnings.catch_warnings(action="error"):  # what the kill left behind must not even pass for damaged
            found = checkpoint.newest_whole(folder)
        steps.append(found.step)
        if found.step == 1:
            assert_holds(found, 1)
        checkpoint.prune(folder, checkpoint.steps(folder))
        assert not list(folder.rglob("*.tmp"))
        checkpoint.save(folder, 2, arrays(2), {})
        assert_holds(checkpoint.newest_whole(folder), 2)
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


def test_a_save_is_seen_whole_or_not_at_all(tmp_path: Path) -> None:
    """A reader that looks while another process saves finds a whole checkpoint every time."""
    program = (
        "import sys, numpy as np\nfrom pathlib import Path\nfrom flax_gpt.training import checkpoint\n"
        "folder = Path(sys.argv[1])\n"
        "for step in range(1, 9):\n"
        "    checkpoint.save(folder, step, {'x': np.full(4, step)}, {})\n"
        "    checkpoint.prune(folder, [step, step - 1])\n"
    )
    seen = set()
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as process:
        while process.poll() is None:
            found = checkpoint.newest_whole(tmp_path)
            if found is not None:
                seen.add(found.step)
            time.sleep(0.005)
        assert process.returncode == 0
    assert len(seen) > 1
    assert checkpoint.newest_whole(tmp_path).step == 8


def test_torn_entries_of_the_compilation_cache_are_dropped_once(tmp_path: Path) -> None:
    """jax itself writes the whole one; a killed process leaves a part of it, or nothing."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.jit(lambda x: jnp.sin(x) + 17).lower(np.zeros(3, np.float32)).compile()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    (whole,) = tmp_path.glob("*-cache")
    content = whole.read_bytes()
    torn = {tmp_path / f"jit_{number}-cache": content[:size] for number, size in enumerate((0, 1, len(content) // 2, len(content) - 1))}
    for path, part in torn.items():
        path.write_bytes(part)
    compilation.drop_torn(tmp_path)
    assert list(tmp_path.glob("*-cache")) == [whole]
    assert whole.read_bytes() == content
    whole.write_bytes(content[:-1])
    os.utime(whole, (1, 1))  # older than the last look: it is not read again
    compilation.drop_torn(tmp_path)
    assert whole.exists()
    compilation.drop_torn(tmp_path / "none")
    assert not (tmp_path / "none").exists()
