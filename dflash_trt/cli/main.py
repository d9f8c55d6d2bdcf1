"""`dflash-trt`: a small command line over library functions, each command a module of cli/."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import click

from dflash_trt.errors import EXIT_FAILED, EXIT_USAGE, DflashError, nearest, one_line, printable
from dflash_trt.version import __version__

COMMANDS = {
    "build": "Turn a target and a draft checkpoint into a bundle.",
    "demo": "Build, prove and serve a pair, with a page in the browser.",
    "diagnose": "Say why few drafts are accepted.",
    "doctor": "Say what this machine can build and run.",
    "dynamo-worker": "Serve a bundle as a worker of NVIDIA Dynamo.",
    "generate": "Continue prompts, with or without speculation.",
    "import-gguf": "Turn a GGUF file into a checkpoint that `build` takes.",
    "inspect": "Show what a bundle holds and check its files.",
    "plan": "Project throughput and memory on GPUs one does not have.",
    "package": "Turn a bundle into a Triton server model repository.",
    "quantize": "Write a checkpoint in FP8 or NVFP4, calibrated on texts.",
    "report": "Draw what a sweep measured.",
    "serve": "Serve a bundle or a model repository.",
    "sweep": "Measure served models under load.",
    "targets": "List the configurations that `build --target` knows.",
    "train-draft": "Train a DFlash draft for a target, from prompts to a proven pair.",
    "tune": "Measure which block is fastest at which batch.",
    "verify": "Prove that speculation changes nothing, and say what it gains.",
}


class _ReaderGoneError(Exception):
    """The reader of our output closed it (`| head`), which is no error."""


class _Commands(click.Group):
    """Imports a command's module when it is called, so that `--help` stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"dflash_trt.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}{nearest(args[0], sorted(COMMANDS))}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderGoneError from error  # before click makes it exit code 1

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=_Commands, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="dflash-trt")
def cli() -> None:
    """DFlash speculative decoding, from two checkpoints to lossless tokens."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0 done, 1 a failed check or a run-time failure, 2 wrong usage, 130 interrupted. Every error
    is one line.
    """
    os.environ["RUST_BACKTRACE"] = "0"  # or a tokenizer's panic writes a hundred lines before ours
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 is no reason to fail
            with suppress(OSError, ValueError):  # a pipe that does not wait loses a long output
                os.set_blocking(stream.fileno(), True)
    try:
        with _unwound_by_sigterm():
            result: Any = cli.main(arguments, prog_name="dflash-trt", standalone_mode=False)
        if sys.stdout is not None:  # None when it was closed before the start
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except DflashError as error:
        click.echo(f"error: {error.message}", err=True)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        return EXIT_USAGE
    except click.ClickException as error:
        click.echo(f"error: {one_line(printable(one_line(error.format_message())))}", err=True)
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except (_ReaderGoneError, BrokenPipeError):
        # What is still buffered goes nowhere; Python would complain at exit.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, MemoryError) as error:
        what = "out of memory; build again with a lower --max-batch, --max-seq-len or --kv-pages"
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            where = error.filename if error.filename is not None else "system"
            what = f"{where}: {error.strerror or error}"
        click.echo(f"error: {DflashError(what).message}", err=True)
        return EXIT_FAILED


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, with its clean-up; a second one kills."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread, which alone may ask for signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
