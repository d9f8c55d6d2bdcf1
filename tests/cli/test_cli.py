"""The command line as a whole: its help, and how it ends; what it has is in tests/frozen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dflash_trt.cli.targets as targets
from dflash_trt import __version__
from dflash_trt.cli.main import main
from dflash_trt.errors import MAX_LINE, DflashError
from tests.cli.conftest import Run
from tests.frozen.command_line import command_line_facts
from tests.waiting import PATIENCE_S

COMMAND_LINE = command_line_facts()


@pytest.mark.parametrize("name", COMMAND_LINE)
def test_help(run: Run, name: str) -> None:
    outcome = run.well(name, "--help")
    for option in COMMAND_LINE[name]:
        assert option.split("/")[-1] in outcome.out
    assert run(name, "-h").out == outcome.out


def test_group_help_and_version(run: Run) -> None:
    shown = run("--help")
    assert shown.code == 0 and all(name in shown.out for name in COMMAND_LINE)
    assert run("--version").out == f"dflash-trt, version {__version__}\n"
    bare = run()
    assert bare.code == 2
    assert bare.err.startswith("Usage: dflash-trt") and "error:" not in bare.err


@pytest.mark.parametrize(
    ("words", "piece"),
    [
        ("build --drfat-checkpoint x", "No such option '--drfat-checkpoint'"),
        ("generate x --no-speculation", "No such option '--no-speculation'"),
        ("biuld", "No such command 'biuld' (nearest: 'build')."),
    ],
)
def test_what_is_not_known(run: Run, words: str, piece: str) -> None:
    run(*words.split()).fails(2, piece)


@pytest.mark.parametrize(
    ("error", "code", "pieces"),
    [
        (DflashError("broke", where="there", fix="mend it"), 1, ["there: broke; mend it"]),
        (DflashError("wrong", usage=True), 2, ["error: wrong"]),
        (DflashError("a\nb\x1b[31m\udcffc é →", where="d\te"), 1, [r"d\te: a\nb\x1b[31m\udcffc é"]),
        (OSError(28, "No space left on device", "/full"), 1, ["/full: No space left on device"]),
        (PermissionError(13, "Permission denied", "/root/x"), 1, ["/root/x: Permission denied"]),
        (OSError("odd"), 1, ["odd"]),
        (MemoryError(), 1, ["out of memory"]),
    ],
)
def test_every_failure_is_one_line(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: int,
    pieces: list[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(targets, "target_names", fail)
    run("targets").fails(code, *pieces)


def test_interruption(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(targets, "target_names", interrupt)
    outcome = run("targets")
    assert outcome.code == 130
    assert outcome.err.split() == ["interrupted"]


def _run_module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dflash_trt", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=PATIENCE_S,
    )


def test_a_terminal_that_cannot_show_everything(bundle: Path) -> None:
    # The last line of `verify` has an ellipsis.
    arguments = ["verify", str(bundle), "--prompt", "a", "--max-tokens", "4", "--repeats", "1"]
    done = _run_module(*arguments, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "speed at batch 1" in done.stdout


def test_targets(run: Run) -> None:
    shown = run.well("targets")
    lines = shown.out.splitlines()
    listed: dict[str, Any] = run("targets", "--json").json
    configs = {name: one for name, one in listed.items() if one["supported"]}
    assert "demo" in configs and "qwen3-8b" in configs
    for name in listed.keys() - configs.keys():
        assert any(line.startswith("not yet: ") and name in line for line in lines)
        assert any(listed[name]["reason"] in line for line in lines)
        run("build", "--target", name).fails(2, f"{name} is not supported yet")
    for name, config in configs.items():
        assert all(profile in shown.out for profile in config["profiles"])
        assert any(line.split()[0] == name and config["description"] in line for line in lines)
        assert config["verified"] and config["max_seq_len"] >= 1


def test_a_closed_stdout_is_no_traceback(bundle: Path) -> None:
    command = f"{sys.executable} -m dflash_trt generate {bundle} --prompt a --max-tokens 3 >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "Error" not in done.stderr, done.stderr


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
