"""What a person sees while a run trains: a bar on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 5.0


class Display:
    """Loss, tokens a second and time left, on standard error; silent when not `enabled`."""

    def __init__(self, enabled: bool, start: int, total: int):
        self.enabled, self.total = enabled, total
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        if enabled and self.console.is_terminal:
            self.bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self.console,
            )
            self.task = self.bar.add_task("train", completed=start, total=total, text="compiling")
        self.printed = time.monotonic()
        self.first: tuple[int, float] | None = None

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Called for every line of metrics.jsonl."""
        text = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(self.task, completed=step, text=text)
        elif self.enabled and (now - self.printed >= SECONDS_BETWEEN_LINES or step == self.total):
            self.printed = now
            self.say(f"step {step}/{self.total}  {text}{self._left(step, now)}")
        self.first = self.first or (step, now)

    def _left(self, step: int, now: float) -> str:
        """By the steps since the first update: those before it hold the compilation, and give no estimate."""
        if self.first is None:
            return ""
        first, then = self.first
        return f"  {(now - then) / (step - first) * (self.total - step):.0f} s left"

    def busy(self, text: str) -> None:
        """What happens instead of training, in the bar until the next update."""
        if self.bar is not None:
            self.bar.update(self.task, text=text)

    def say(self, text: str) -> None:
        """One line, above the bar."""
        if self.enabled:
            self.console.print(text, markup=False)
