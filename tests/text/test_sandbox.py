"""The sandbox: what it bounds beside time and memory."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dflash_trt.text import sandbox
from dflash_trt.text.chat import ChatRenderer
from dflash_trt.text.sandbox import Sandbox, SandboxLimits, SandboxLostError
from tests.inspection import chat_worker
from tests.waiting import PATIENCE_S

LIMITS = SandboxLimits(max_seconds=1, max_bytes=512 << 20, max_answer_bytes=1000)


@pytest.fixture
def process() -> Iterator[Sandbox]:
    with closing(Sandbox("template")) as opened:
        yield opened


def _ask(process: Sandbox, template: str) -> dict[str, str]:
    job = {"template": template, "variables": {}, "max_characters": 1 << 20}
    return process.ask(job, LIMITS)


def test_an_answer_that_is_too_long_is_not_read(process: Sandbox) -> None:
    answer = _ask(process, "{{ 'x' * 900000 }}")
    assert answer == {"error": "answers with more than 1,000 bytes"}
    assert _ask(process, "fine") == {"text": "fine"}


class Patience:
    """Seconds to wait: little for the first answer, enough for the second."""

    def __init__(self) -> None:
        self._waits = iter((0.2, PATIENCE_S))

    def __mul__(self, _: int) -> float:
        return next(self._waits)


def test_a_process_that_is_stopped_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(ChatRenderer("fine", {})) as renderer:
        assert renderer.render([]) == "fine"
        chat_worker(renderer).send_signal(signal.SIGSTOP)
        monkeypatch.setattr(sandbox, "_WAIT_FACTOR", Patience())
        assert renderer.render([]) == "fine"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_at_work_is_started_again(
    process: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Once; then whoever asks hears that nothing is wrong with what was asked."""
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    interpreter = tmp_path / "python"
    interpreter.write_text(
        f"#!/bin/sh\nrmdir {deaths}/1 2>/dev/null || rmdir {deaths}/2 2>/dev/null ||"
        f' exec {sys.executable} "$@"\nread -r job\nkill -{int(number)} $$\n'
    )
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    (deaths / "1").mkdir()
    assert _ask(process, "fine") == {"text": "fine"}
    process.close()
    for name in "12":
        (deaths / name).mkdir()
    with pytest.raises(SandboxLostError, match="killed, twice"):
        _ask(process, "fine")
    assert not list(deaths.iterdir())
    assert _ask(process, "fine") == {"text": "fine"}
