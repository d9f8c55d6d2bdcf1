"""Progress bars of long work, on stderr so that stdout stays clean."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dflash_trt.core.progress import Unit


class StageBars:
    """One line per stage; bytes and speed or a percentage, and the time left, where measured."""

    def __init__(self) -> None:
        console = Console(stderr=True)

        def bar(*columns: ProgressColumn) -> Progress:
            lead = SpinnerColumn(finished_text="✓"), TextColumn("{task.description}")
            return Progress(*lead, *columns, console=console)

        self._plain = bar(TimeElapsedColumn())
        left = TimeRemainingColumn(elapsed_when_finished=True)
        self._bytes = bar(BarColumn(), DownloadColumn(), TransferSpeedColumn(), left)
        self._steps = bar(BarColumn(), TaskProgressColumn(), left)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.pause(done=kind is None)

    def stage(self, name: str, total: int | None, unit: Unit = "bytes") -> None:
        """Closes the current line and opens the next; the size is on it before work starts."""
        self.pause()
        measured = self._bytes if unit == "bytes" else self._steps
        self._bar = self._plain if total is None else measured
        self._task = self._bar.add_task(name, total=total or 1)
        self._bar.start()

    def advance(self, count: int) -> None:
        """`count` more units of a measured stage are done."""
        if self._bar is not self._plain and self._bar is not None and self._task is not None:
            self._bar.advance(self._task, count)

    def pause(self, *, done: bool = True) -> None:
        """Closes the current line, so that others can be written; the next stage opens one."""
        if self._bar is None or self._task is None:
            return
        if done:
            self._bar.update(self._task, completed=self._bar.tasks[-1].total)
        self._bar.stop()
        self._bar.remove_task(self._task)
        self._bar = self._task = None


def format_size(count: float) -> str:
    """Bytes in the largest unit that keeps a digit before the point."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
