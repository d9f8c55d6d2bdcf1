"""`dflash-trt generate --chat`: a conversation in the terminal, with a pair or a served model."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

import click

from dflash_trt.cli.generation_output import ACCEPTED, OWN, TextWriter, showable
from dflash_trt.cli.options import name_threads
from dflash_trt.decoding import SamplingParams
from dflash_trt.decoding.request import ContinuationOptions
from dflash_trt.errors import DflashError, printable
from dflash_trt.pair import LoadedPair
from dflash_trt.serving.client.openai_chat import OpenAiChat
from dflash_trt.text.chat import Message
from dflash_trt.text.harmony import HarmonyFormat
from dflash_trt.text.thoughts import open_answer

NEW, HELP, QUIT = "/new", "/help", "/quit"
_MOST_CHARACTERS = 16 << 20


class PairSpeaker:
    """The pair of a bundle in this process; accepted drafts are coloured.

    `answer` prints the answer as it grows, and returns it, for the history, and a line about it.
    Ctrl-C ends it early.
    """

    def __init__(
        self,
        pair: LoadedPair,
        sampling: SamplingParams,
        options: ContinuationOptions,
        variables: Mapping[str, object],
    ) -> None:
        if pair.tokenizer.chat_template is None:
            fix = "generate --prompt continues a text"
            what = "its tokenizer has no chat template"
            raise DflashError(what, where=pair.bundle.folder, fix=fix, usage=True)
        self._pair, self._sampling, self._options = pair, sampling, options
        self._variables = variables
        self._threads = name_threads(pair.bundle.manifest, pair.threads)
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        shows = sys.stdout is not None and sys.stdout.isatty() and not plain
        self._colours = shows and not isinstance(pair.answer_format, HarmonyFormat)

    @property
    def greeting(self) -> str:
        """The pair's name, and what colours mean where there are any."""
        name = self._pair.bundle.manifest.name + self._threads
        if not self._colours:
            return name
        accepted = click.style("accepted drafts", fg=ACCEPTED)
        own = click.style("the target's own tokens", fg=OWN)
        return f"{name}; {accepted}, {own}"

    def answer(self, messages: Sequence[Message]) -> tuple[str, str]:
        form, stops = self._pair.answer_format, self._options.get("stop_strings", ())
        prompt = self._pair.request(messages, template_options=self._variables).prompt_ids
        channels = [] if form is None else [partial(open_answer, form, stops, prompt)]
        writer = TextWriter(view=self._colours, quiet=False, count=1, channels=channels)
        said, ids, result = "", list[int](), None
        started = time.perf_counter()
        events = self._pair.stream(prompt, self._sampling, **self._options)
        pressed: list[int] = []

        def note(number: int, frame: object) -> None:
            if pressed:
                raise KeyboardInterrupt
            pressed.append(number)

        # A step is not torn apart: the request is cancelled between two, or by a second Ctrl-C.
        before = signal.signal(signal.SIGINT, note)
        try:
            with closing(events):
                for event in events:
                    writer.take(0, event)
                    said += event.text
                    ids += event.token_ids
                    result = event.result
                    if pressed:
                        break
        finally:
            signal.signal(signal.SIGINT, before)
        if form is not None:
            stream = open_answer(form, stops, prompt)
            said = (stream.push(ids) + stream.flush()).content
        seconds = time.perf_counter() - started
        line = f"{len(ids)} tokens, {len(ids) / seconds:,.1f} tokens/s"
        length = None if result is None else result.statistics.acceptance_length
        if length is not None:
            line += f", acceptance length {length:.2f}"
        return said, line if result is not None else f"ended; {line}"


class ServedSpeaker:
    """A model that is served elsewhere."""

    def __init__(self, server: OpenAiChat) -> None:
        self._server = server

    @property
    def greeting(self) -> str:
        return printable(self._server.greeting)

    def answer(self, messages: Sequence[Message]) -> tuple[str, str]:
        said, reasons, ended = "", False, ""
        started = time.perf_counter()
        with closing(self._server.answer(messages)) as pieces:
            try:
                for kind, text in pieces:
                    if kind == "reasoning":
                        reasons = True
                        click.secho(showable(text), nl=False, dim=True)
                        continue
                    click.echo(("\n\n" if reasons else "") + showable(text), nl=False)
                    said, reasons = said + text, False
            except KeyboardInterrupt:
                ended = "ended; "
        return said, f"{ended}{time.perf_counter() - started:.1f} s"


def hold_chat(speaker: PairSpeaker | ServedSpeaker, system: str | None) -> None:
    """Reads messages and prints answers until the end of stdin.

    Raises:
        DflashError: the first message already cannot be answered.
    """
    first = [] if system is None else [{"role": "system", "content": system}]
    history: list[Message] = list(first)
    click.echo(speaker.greeting, err=True)
    hint = f"Ctrl-C ends an answer, Ctrl-D or {QUIT} the chat; {NEW} forgets what was said"
    click.secho(hint, err=True, dim=True)
    for text in _messages():
        if text == QUIT:
            return
        if text == HELP:
            click.secho(hint, err=True, dim=True)
            continue
        if text == NEW:
            history = list(first)
            continue
        asked = {"role": "user", "content": text}
        try:
            said, line = speaker.answer([*history, asked])
        except DflashError as error:
            if len(history) == len(first):
                raise
            click.echo(f"\nerror: {error.message}; {NEW} begins again", err=True)
            continue
        click.echo()
        click.secho(line, err=True, dim=True)
        history += [asked, {"role": "assistant", "content": said}]


def _messages() -> Iterator[str]:
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # input() edits lines and remembers them then
    while True:
        try:
            text = input("\n> ").strip() if is_terminal else _read_line()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            what = f"is not UTF-8 at byte {error.start}"
            raise DflashError(what, where="stdin", usage=True) from error
        except KeyboardInterrupt:
            click.secho("\nCtrl-D ends the chat", err=True, dim=True)
            continue
        if text:
            yield text


def _read_line() -> str:
    """A line of stdin where that is no terminal; EOFError behind the last, or without any."""
    line = "" if sys.stdin is None else sys.stdin.readline(_MOST_CHARACTERS + 1)
    if len(line) > _MOST_CHARACTERS:
        what = f"a message has more than {_MOST_CHARACTERS:,} characters"
        raise DflashError(what, where="stdin", usage=True)
    if not line:
        raise EOFError
    return line.strip()
