"""`flax-gpt bench` and `flax-gpt bench compare`."""

import dataclasses
import importlib.util
from pathlib import Path

from rich.console import Console

from benchmarks import cases, report, results, runner
from flax_gpt.errors import RunError, require


def bench(level: str, pattern: str | None, out: Path, resume: bool, keep_memory: bool) -> None:
    """Measures, and reports what there is even when it is interrupted. Raises RunError when a case has no ratio, InputError without torch."""
    require(importlib.util.find_spec("torch") is not None, "COMMAND", "bench", "needs PyTorch: pip install '.[bench]' in the clone")
    selected, settings = cases.select(level, pattern), dataclasses.replace(runner.SETTINGS[level], keep_memory=keep_memory)
    runner.prepare(selected, settings, out, resume=resume)
    try:
        runner.run(selected, settings, out)
    finally:
        document = report.write(out)
        console = terminal()
        for line in report.headline(document):
            console.print(line, soft_wrap=True)
        console.print(report.table(document))
        console.print(f"{out}: results.html, results.md, results.json")
    failed = [row["name"] for row in document["rows"] if row["error"]]
    if failed:
        raise RunError(f"{len(failed)} of {len(selected)} cases have no ratio: {', '.join(failed)}")


def compare(old: Path, new: Path) -> None:
    """Prints how the ratios moved. Raises RunError when one fell by more than the intervals explain, or is gone."""
    before, now = results.load(old), results.load(new)
    found = results.changes(before, now)
    require(bool(found), "NEW", str(new), f"has no case in common with {old}")
    console = terminal()
    for line in report.compared(before, now):
        console.print(line, soft_wrap=True)
    console.print(report.changes_table(found))
    worse = [change["name"] for change in found if change["verdict"] in ("slower", "failed")]
    if worse:
        raise RunError(f"{len(worse)} of {len(found)} cases became slower: {', '.join(worse)}")


def terminal() -> Console:
    """Standard output; wide where nobody sees its edge."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=150)
