"""The command line in this process."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from tests.frozen import adapter


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*words: object) -> Outcome:
    """`dflash-trt WORDS`, however it ends."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = adapter.main([str(word) for word in words])
    return Outcome(code, out.getvalue(), err.getvalue())


def run_well(*words: object) -> Outcome:
    """As `run`; raises AssertionError where the command fails."""
    outcome = run(*words)
    assert outcome.code == 0, (words, outcome.err)
    return outcome
