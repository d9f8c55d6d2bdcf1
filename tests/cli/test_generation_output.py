"""Answers with channels on a terminal and in JSON."""

from __future__ import annotations

import sys

import click
import pytest

from dflash_trt.cli.generation_output import OWN, TextWriter, showable
from dflash_trt.decoding import TokenEvent
from dflash_trt.text.harmony import HarmonyFormat
from dflash_trt.text.thoughts import TokenReader, open_answer
from tests.text.tokenizers import ANALYSIS, FINAL, encode, make_harmony

FORM = HarmonyFormat.find(make_harmony())
assert FORM is not None
REASONING = "Simple: 2 + 2, é 🙂."


def _open() -> TokenReader:
    assert FORM is not None
    return open_answer(FORM, ("= ",), "")


def test_reasoning_stands_before_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    writer = TextWriter(view=False, quiet=False, count=1, channels=[_open])
    ids = encode(ANALYSIS + FINAL)
    for index, token_id in enumerate(ids):
        event = TokenEvent(
            request_id=0,
            token_ids=(token_id,),
            accepted_tokens=0,
            text="x",
            pieces=("x",),
            finish_reason="stop" if index == len(ids) - 1 else None,
        )
        writer.take(0, event)
    assert capsys.readouterr().out == f"{REASONING}\n\n2 + 2 "


CODES = "a\x1b]0;b\x07\x9bc\t\n\u200dé\x7f"


def test_no_token_tells_a_terminal_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere a text is as it was said."""
    event = TokenEvent(
        request_id=0,
        token_ids=(1,),
        accepted_tokens=0,
        text=CODES,
        pieces=(CODES,),
        finish_reason="stop",
    )
    assert showable(CODES) == CODES
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = "a\\x1b]0;b\\x07\\x9bc\t\n\u200dé\\x7f"
    assert showable(CODES) == shown
    for view, expected in ((False, shown), (True, click.style(shown, fg=OWN))):
        TextWriter(view=view, quiet=False, count=1).take(0, event)
        assert capsys.readouterr().out == expected
