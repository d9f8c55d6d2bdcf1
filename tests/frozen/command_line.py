"""The command line in this process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

from dflash_trt.cli.main import main
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
