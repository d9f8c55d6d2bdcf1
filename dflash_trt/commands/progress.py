"""Progress bars of long work, on stderr so that stdout stays clean."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)


class StageBars:
    """One line per stage; bytes and speed where a stage is measured in bytes."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._plain = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._bytes = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
        )
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> StageBars:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._finish(done=kind is None)

    def stage(self, name: str, total_bytes: int | None) -> None:
        """Closes the current line and opens the next; the size is on it before work starts."""
        self._finish(done=True)
        self._bar = self._plain if total_bytes is None else self._bytes
        self._task = self._bar.add_task(name, total=total_bytes or 1)
        self._bar.start()

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""
        if self._bar is self._bytes and self._task is not None:
            self._bar.advance(self._task, count)

    def _finish(self, *, done: bool) -> None:
        if self._bar is None or self._task is None:
            return
        if done:
            self._bar.update(self._task, completed=self._bar.tasks[-1].total)
        self._bar.stop()
        self._bar.remove_task(self._task)
        self._bar = self._task = None
