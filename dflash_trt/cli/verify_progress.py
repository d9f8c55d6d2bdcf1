"""What `verify` shows while it runs: how long it will take, and what came out so far."""

from __future__ import annotations

import time

from rich.progress import Progress

from dflash_trt.proof.verification import ModeReport

_PROBED = 8
"""Tokens after which the time for all is estimated."""


class VerifyWatch:
    """Lines above a bar on stderr.

    Args:
        tokens: output tokens of each way of decoding, at most.
        runs: how often they are decoded, the baseline, all modes and timed runs together.
    """

    def __init__(self, progress: Progress, prompts: int, tokens: int, runs: int) -> None:
        self._progress, self._prompts = progress, prompts
        self._tokens, self._runs = tokens, runs
        self._heard, self._since = 0, 0.0
        self._task = progress.add_task("comparing", total=None)

    def begin(self, total: int) -> None:
        """Before the first token, of at most `total` that are compared."""
        self._progress.update(self._task, total=total)

    def take(self, count: int) -> None:
        """So many more tokens; the first of them are the baseline's, one prompt at a time."""
        self._progress.advance(self._task, count)
        if not self._since:  # what came before the first is the graph's opening
            self._since = time.perf_counter()
            return
        before, self._heard = self._heard, self._heard + count
        if before < _PROBED <= self._heard and self._tokens > _PROBED:
            seconds = (time.perf_counter() - self._since) / self._heard
            whole = seconds * self._tokens * self._runs
            self._say(
                f"about {format_seconds(whole)} at {1 / seconds:,.0f} tokens/s, less where drafts "
                "are accepted and outputs end early; --quick asks for less"
            )

    def compared(self, prompts: int, report: ModeReport) -> None:
        """`report` is about the first `prompts` prompts so far."""
        outcome = "identical"
        if report.difference is not None:
            outcome = "apart by ties" if report.is_lossless else f"DIFFERENT: {report.difference}"
        self._say(f"{report.mode}: {prompts} of {self._prompts} prompts {outcome}")

    def end(self) -> None:
        """The comparison is over."""
        self._progress.remove_task(self._task)

    def _say(self, line: str) -> None:
        self._progress.console.print(
            line, style="dim", highlight=False, markup=False, soft_wrap=True
        )


def format_seconds(seconds: float) -> str:
    """As people say it: 45 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
