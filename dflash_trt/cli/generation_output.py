"""What `generate` shows: texts as they grow, statistics, JSON."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from dflash_trt.cli.options import print_json
from dflash_trt.decoding import RequestResult, TokenEvent, TotalStatistics, total
from dflash_trt.text.thoughts import TokenReader

OpenAnswer = Callable[[], TokenReader]
"""Opens what tells an answer from its reasoning."""
ACCEPTED, OWN = "green", "yellow"
"""Colours of accepted drafts and of the target's own tokens."""
_CODES = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def showable(text: str) -> str:
    """A model's text; where stdout is a terminal, without the codes that one obeys.

    Any token of a stranger's tokenizer, and any server, may say some.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return text
    return _CODES.sub(lambda found: ascii(found[0])[1:-1], text)


class TextWriter:
    """Prints texts in the prompts' order while they all grow at once.

    `channels` has one for each prompt, or none: reasoning then is dim and stands before.
    """

    def __init__(
        self, *, view: bool, quiet: bool, count: int, channels: Sequence[OpenAnswer] = ()
    ) -> None:
        self._view = view
        self._channels = channels
        self._answers = [_Answer(channel()) for channel in channels]
        self._quiet = quiet
        self._count = count
        self._waiting: dict[int, list[str]] = {}
        self._finished: set[int] = set()
        self._current = 0
        self._began = False

    def take(self, index: int, event: TokenEvent) -> None:
        """Prints or keeps what an event of prompt `index` made visible."""
        finished = event.finish_reason is not None
        if self._answers and not self._view:
            text = self._answers[index].take(event.token_ids, finished=finished)
        else:
            text = self._paint(event)
        self.write(index, text, finished=finished)

    def write(self, index: int, text: str, *, finished: bool) -> None:
        """Prints or keeps the next piece of the text of prompt `index`."""
        if self._quiet:
            return
        self._waiting.setdefault(index, []).append(text)
        if finished:
            self._finished.add(index)
        while self._current < self._count:
            self._begin()
            shown = "".join(self._waiting.pop(self._current, []))
            # With --view the colours must survive a pipe: they are what was asked for.
            click.echo(shown, nl=False, color=True if self._view else None)
            if self._current not in self._finished:
                return
            self._current += 1
            self._began = False

    def end(self, results: list[RequestResult], wall_s: float, threads: str = "") -> None:
        """Ends the last line and says how fast it all was; as JSON, texts included, if quiet."""
        summary = total((result.statistics for result in results), wall_s)
        if self._quiet:
            self._print_json(results, summary)
        else:
            click.echo()
            _print_statistics(results, summary, threads)

    def _begin(self) -> None:
        if self._count > 1 and not self._began:
            lead = "" if self._current == 0 else "\n"
            click.secho(f"{lead}--- prompt {self._current + 1}", dim=True)
        self._began = True

    def _paint(self, event: TokenEvent) -> str:
        if not self._view or not event.pieces:
            return showable(event.text)
        return "".join(
            click.style(showable(piece), fg=ACCEPTED if index < event.accepted_tokens else OWN)
            for index, piece in enumerate(event.pieces)
        )

    def _print_json(self, results: list[RequestResult], summary: TotalStatistics) -> None:
        described: list[dict[str, Any]] = []
        for index, result in enumerate(results):
            text: dict[str, Any] = {"text": result.text}
            if self._channels:
                stream = self._channels[index]()
                piece = stream.push(result.token_ids) + stream.flush()
                text = {"text": piece.content, "reasoning": piece.reasoning}
            text |= {"token_ids": list(result.token_ids), **result.statistics.to_json()}
            described.append(text | {"finish_reason": result.finish_reason})
        several = {"requests": described, "total": summary.to_json()}
        print_json(described[0] if len(described) == 1 else several)


class _Answer:
    """An answer whose reasoning has come to an end or not."""

    def __init__(self, stream: TokenReader) -> None:
        self._stream = stream
        self._reasons = False

    def take(self, token_ids: Sequence[int], *, finished: bool) -> str:
        piece = self._stream.push(token_ids)
        if finished:
            piece += self._stream.flush()
        shown = click.style(showable(piece.reasoning), dim=True) if piece.reasoning else ""
        self._reasons |= bool(piece.reasoning)
        if piece.content and self._reasons:
            shown, self._reasons = f"{shown}\n\n", False
        return shown + showable(piece.content)


def _print_statistics(results: list[RequestResult], summary: TotalStatistics, threads: str) -> None:
    reasons = {result.finish_reason for result in results}
    lines = [
        f"{summary.output_tokens} tokens from {summary.prompt_tokens} of prompt, "
        f"{summary.steps} steps, ended by {' and '.join(sorted(reasons))}"
    ]
    if summary.cached_prompt_tokens or summary.preemptions:
        lines.append(
            f"{summary.cached_prompt_tokens} prompt tokens taken from other requests, "
            f"{summary.preemptions} preemptions"
        )
    if summary.grammar_s is not None:
        lines.append(
            f"{summary.forced_tokens} drafts forced by a grammar, {summary.grammar_s:.3f} s in it"
        )
    if summary.acceptance_length is not None and summary.acceptance_rate is not None:
        histogram = " ".join(
            f"{emitted}:{count}"
            for emitted, count in enumerate(summary.acceptance_histogram, start=1)
        )
        lines.append(
            f"acceptance length {summary.acceptance_length:.2f} "
            f"({summary.acceptance_rate:.0%} of {summary.drafted_tokens} drafts); "
            f"tokens per step {histogram}"
        )
    if summary.interactivity is not None and summary.median_time_to_first_token_s is not None:
        lines.append(
            f"time to first token {summary.median_time_to_first_token_s * 1e3:.1f} ms, then "
            f"{summary.interactivity:,.0f} tokens/s per request{threads}"
        )
    if summary.requests > 1 and summary.output_throughput is not None:
        lines.append(
            f"{summary.requests} requests, {summary.output_throughput:,.0f} tokens/s together"
        )
    for line in lines:
        click.secho(line, err=True, dim=True)
