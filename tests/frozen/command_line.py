"""The command line in this process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

import click

from dflash_trt.cli.main import cli, main
from tests.cli.conftest import Outcome


def run(*words: object) -> Outcome:
    """`dflash-trt WORDS`, however it ends."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    return Outcome(code, out.getvalue(), err.getvalue())


def run_well(*words: object) -> Outcome:
    """As `run`; raises AssertionError where the command fails."""
    outcome = run(*words)
    assert outcome.code == 0, (words, outcome.err)
    return outcome


def command_line_facts() -> dict[str, list[str]]:
    """Arguments and options of every command: a new one is a promise to users."""
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return {
        name: sorted(
            parameter.human_readable_name.upper()
            if isinstance(parameter, click.Argument)
            else "/".join(parameter.opts + parameter.secondary_opts)
            for parameter in command.params
        )
        for name, command in commands.items()
        if command is not None
    }
