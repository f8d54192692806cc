"""A training step that several devices share, timed: what the children of a worker compute, count and cost, and that none outlives it."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import agreement, cases, timing, worker
from benchmarks.cases import Train
from benchmarks.children import Children
from flax_gpt.errors import InputError

SHARED = Train(size="S", dropout=0.0, devices=2)

STAND_IN = """
import os, sys, time
from benchmarks.children import serve
number = int(sys.argv[5])
def answer(request):
    if request == "work":
        while time.process_time() < 1.0: pass
    elif request == "fail" and number == 1:
        raise ValueError("no such thing")
    elif request == "die" and number == 1:
        os._exit(3)
    elif request in ("fail", "die", "hang"):
        while True: pass
    print("chatter")
    return [request, number]
serve(answer, str)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module whose children need no framework."""
    (tmp_path / "stand_in_child.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return "stand_in_child"


def living(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_several_devices_are_a_case_of_their_own() -> None:
    assert Train(size="M", dropout=0.0, devices=2).name == "train-M-dropout0-devices2"
    assert "train-M-dropout0-devices2" in [case.name for case in cases.grid("full")]
    assert all(case.devices == 1 for case in cases.grid("standard"))
    assert worker.variants(SHARED, "torch", "full") == ("eager",)


def test_two_devices_of_each_side_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the children that are timed. Of the batch that is compared the first four rows count, which are all the first device's."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=600")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    found = {}
    for name, variant in (("jax", "jit"), ("torch", "eager")):
        side = importlib.import_module(f"benchmarks.{name}_worker").SIDE
        found[name] = worker.measure(side, SHARED, variant, 0.01, tmp_path / "outputs" / name / SHARED.name / f"{variant}.npz")
        assert not timing.CHILDREN
    verdict = agreement.decide(SHARED, agreement.read_outputs(tmp_path, SHARED))
    assert verdict.ok, verdict.summary
    assert {name: one["facts"]["processes"] for name, one in found.items()} == {"jax": 1, "torch": 2}
    assert found["torch"]["facts"]["backend"] == "gloo"
    for one in found.values():
        assert one["cpu_ms"] > 0
        assert one["peak_bytes"] >= 0


def test_more_devices_than_there_are_is_an_error_of_the_row(tmp_path: Path) -> None:
    side = worker.Side("none", {}, lambda threads: {}, lambda: None, lambda case, variant: 0.0)
    with pytest.raises(InputError, match="devices = 2: must be at most 1"):
        worker.measure(side, SHARED, "jit", 0.01, None)


def test_the_time_of_children_is_ones_own(stand_in: str) -> None:
    children = Children(stand_in, {}, "", [{}, {}])
    before = timing.own_seconds()
    assert children.ask("work") == [["work", 0], ["work", 1]]
    spent = timing.own_seconds() - before
    children.end()
    # Each works until it has used a second, its start included.
    assert 0.5 < spent < 2.5
    assert timing.own_seconds() - before >= spent
    assert not timing.CHILDREN


@pytest.mark.parametrize(("request_", "told"), [("fail", "process 2 of 2: no such thing"), ("die", "process 2 of 2: it ended")])
def test_an_error_in_one_ends_all(stand_in: str, request_: str, told: str) -> None:
    children = Children(stand_in, {}, "", [{}, {}])
    with pytest.raises(RuntimeError, match=told):
        children.ask(request_)
    assert not any(living(process.pid) for process in children.processes)
    assert not Path(children.folder.name).exists()


def test_children_end_with_the_program_that_holds_them(stand_in: str) -> None:
    def build() -> worker.Program:
        children = Children(stand_in, {}, "", [{}])
        return worker.Program(lambda: children.ask("x"), lambda: {}, children=children)

    program = build()
    program.run()
    assert program.children is not None
    (process,) = program.children.processes
    del program
    assert not living(process.pid)


def test_no_child_outlives_a_worker_that_was_killed(stand_in: str) -> None:
    """While one waits for a request and the other is busy with one."""
    code = f"""
from benchmarks.children import Children
idle, busy = (Children({stand_in!r}, {{}}, "", [{{}}]) for _ in range(2))
for children in (idle, busy):
    children.ask("x")
print(*(children.processes[0].pid for children in (idle, busy)), flush=True)
busy.ask("hang")
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(living, pids))
    process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 60
    while any(map(living, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    left = [pid for pid in pids if living(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
