"""A sweep under way: one line for all its runs, one for the current one, on stderr."""

from __future__ import annotations

from dflash_perf.harness.load import RunProgress
from dflash_perf.harness.points import RunPlan, RunSummary
from dflash_perf.harness.sweep import SweepObserver
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


class SweepView(SweepObserver):
    """Draws itself a few times a second; on a stream that is no terminal, a line per run."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._runs = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._runs.add_task("runs", total=None)
        self._label = ""
        self._progress: RunProgress | None = None
        self._live = Live(
            get_renderable=self._draw, console=self._console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> SweepView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def plan(self, runs: int, finished: int) -> None:
        self._runs.update(self._task, total=runs, completed=finished)
        if finished:
            self._console.print(
                f"{finished} of {runs} runs are there already", highlight=False, soft_wrap=True
            )

    def start(self, run: RunPlan, progress: RunProgress) -> None:
        self._label = f"{run.configuration}, {run.load.label}, run {run.repeat + 1}"
        self._progress = progress

    def finish(self, summary: RunSummary) -> None:
        self._runs.advance(self._task)
        throughput = summary.values.get("output_throughput")
        line = f"{self._label}: {summary.completed} of {summary.requests} requests"
        if throughput is not None:
            line += f", {throughput:,.0f} tokens/s"
        if (tau := summary.values.get("acceptance_length")) is not None:
            line += f", τ {tau:.2f}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _draw(self) -> Group:
        return Group(Text(self._current()), self._runs)

    def _current(self) -> str:
        now = self._progress
        if now is None:
            return "connecting"
        done = now.completed + now.failed
        if not done:
            return f"{self._label}: waiting for the first answer"
        wanted = "" if now.wanted is None else f" of {now.wanted}"
        line = f"{self._label}: {done}{wanted} requests, {now.tokens_per_second:,.0f} tokens/s"
        if now.acceptance_length is not None:
            line += f", τ {now.acceptance_length:.2f}"
        return line + (f", {now.failed} failed" if now.failed else "")
