"""The one error type: a line that a terminal shows and does not obey, of bounded length."""

from __future__ import annotations

import pytest

from dflash_trt.cli.main import main
from dflash_trt.errors import MAX_LINE, DflashError


def test_the_command_lines_own_errors_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["plan", "--gpu", "b200", "\u202eabc\x1b[31m"],
        ["\x1b[31m"],
        ["plan", "--\u202e"],
    ):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.isprintable()


@pytest.mark.parametrize("part", ["what", "where", "fix"])
def test_a_line_has_a_limit(part: str) -> None:
    given = {"what": "is wrong", "where": "a", "fix": "mend it"} | {part: "\x1b[31m" * 5000}
    message = DflashError(given.pop("what"), **given).message  # type: ignore[arg-type]
    assert len(message) <= MAX_LINE and message.isprintable()


def test_the_systems_errors_have_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "\x1b[31m" + "a/" * 3000]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) <= len("error: ") + MAX_LINE and line.isprintable()
