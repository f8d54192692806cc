"""Processes that share a case among several devices, driven by a worker over pipes, a request a line. Standard library alone.

A child ends when its standard input closes, so that none outlives its worker, however that died. An error in one is the error of the case.
"""

import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import timing


@dataclasses.dataclass(frozen=True)
class Place:
    """What a child knows of its family."""

    number: int
    """Counted from 0."""
    count: int
    """How many share the case."""
    folder: Path
    """Empty at the start, the same for all."""


class Children:
    """The children of one program; they end with the object."""

    def __init__(self, module: str, case: Mapping[str, Any], variant: str, environments: Sequence[Mapping[str, str]]):
        """A child of `python -m module` for each of `environments`, which say what differs from this process's own."""
        self.folder = tempfile.TemporaryDirectory(prefix="flax-gpt-bench-")
        self.answers: queue.Queue[tuple[int, str]] = queue.Queue()
        self.processes: list[subprocess.Popen[str]] = []
        self.end = weakref.finalize(self, _end, self.processes, self.folder)
        for number, environment in enumerate(environments):
            command = [sys.executable, "-m", module, "child", json.dumps(case), variant, self.folder.name, str(number), str(len(environments))]
            process = subprocess.Popen(command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.processes.append(process)
            timing.CHILDREN.add(process.pid)
            threading.Thread(target=_read, args=(process, number, self.answers), daemon=True).start()

    def ask(self, request: str) -> list[Any]:
        """Each child's answer, in their order. Raises RuntimeError, and ends all of them, when one fails."""
        found: dict[int, Any] = {}
        try:
            for process in self.processes:
                assert process.stdin is not None
                process.stdin.write(request + "\n")
                process.stdin.flush()
            while len(found) < len(self.processes):
                number, line = self.answers.get()
                answer = json.loads(line) if line else {"error": "it ended"}
                if "error" in answer:
                    raise RuntimeError(f"process {number + 1} of {len(self.processes)}: {answer['error']}")
                found[number] = answer["value"]
        except BaseException as error:
            self.end()
            if isinstance(error, BrokenPipeError):
                raise RuntimeError("a process that shares the case has ended") from error
            raise
        return [found[number] for number in range(len(self.processes))]

    def peak(self) -> int | None:
        """The sum of the most that each took since it was asked to `forget`; None where one does not know."""
        peaks = self.ask("peak")
        return None if None in peaks else sum(peaks)


def _read(process: "subprocess.Popen[str]", number: int, answers: "queue.Queue[tuple[int, str]]") -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            answers.put((number, line))
    answers.put((number, ""))


def _end(processes: "list[subprocess.Popen[str]]", folder: "tempfile.TemporaryDirectory[str]") -> None:
    # Killed before any is waited for: one that has lost the others might wait for them.
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        timing.CHILDREN.discard(process.pid)
        if process.stdin is not None:
            process.stdin.close()
    folder.cleanup()


def serve(answer: Callable[[str], Any], reason: Callable[[BaseException], str]) -> None:
    """A child's life: answers each request, or says why it cannot, until standard input closes. Standard output carries nothing else."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line.strip())
        os._exit(0)  # whatever the main thread is in, nobody waits for it any more

    threading.Thread(target=read, daemon=True).start()
    while True:
        request = requests.get()
        try:
            said = {"value": answer(request)}
        except Exception as error:
            said = {"error": reason(error)}
        out.write(json.dumps(said) + "\n")
        out.flush()
