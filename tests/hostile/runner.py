"""Runs hostile inputs, each in a process forked for it, through the command line's own entry.

A fork of a process that has imported everything starts in milliseconds, dies alone, and its most
memory and processor time can be read when it has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hostile.case import OUTSIDE, SECRET, Ending, HostileCase

PATIENCE_S = 300.0
"""On the clock: a busy machine gives minutes of waiting for a second; `MOST_SECONDS` is judged."""
_MOST_ADDRESSES = 8 << 30
_LARGEST_FILE = 1 << 30
_MOST_OUTPUT = 1 << 20
_PRELOADED = (
    *("build", "generate", "import_gguf", "inspect", "package", "serve", "verify"),
    *("plan", "quantize", "tune"),
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
}


def preload() -> None:
    """Imports what commands import, so that no case does."""
    for name in ("onnx", "onnxruntime", "tokenizers", "safetensors.numpy"):
        importlib.import_module(name)
    for name in _PRELOADED:
        importlib.import_module(f"dflash_trt.cli.{name}")


@dataclass(frozen=True, slots=True)
class Bench:
    """Where cases run.

    Args:
        base: the good files that cases copy.
        folder: for this process's cases, one after the other.
    """

    base: Path
    folder: Path

    def run(self, case: HostileCase) -> Ending:
        """Makes the input, runs the commands, and takes everything away again."""
        place = self.folder / "case"
        inputs = place / "input"
        for folder in (inputs / "out", place / OUTSIDE, place / "tmp"):
            folder.mkdir(parents=True)
        try:
            for name in case.needs:
                shutil.copytree(self.base / name, inputs / name)
            case.damage(inputs)
            return _collect(place, *in_child(lambda: _enter(case, place), PATIENCE_S))
        finally:
            shutil.rmtree(place)


def in_child(work: Callable[[], None], patience_s: float) -> tuple[int, Any]:
    """Runs `work` in a fork; its status and what it used. It is killed with all that it started."""
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)
    watch = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(watch, select.POLLIN)
        poll.poll(patience_s * 1000)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
    finally:
        os.close(watch)
    return status, used


def _enter(case: HostileCase, place: Path) -> None:
    """In the child: runs the commands, and notes how the last one ended."""
    from dflash_trt.cli.main import main

    os.environ["TMPDIR"] = str(place / "tmp")
    os.chdir(place / "input")
    _redirect(place)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_ADDRESSES, _MOST_ADDRESSES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
    if case.before is not None:
        case.before()
    started = _tree(place)
    code, left = 0, set[str]()
    for command in case.commands:
        before = _tree(place)
        code = main(list(command))
        sys.stdout.flush()
        sys.stderr.flush()
        if code != 0:
            left = _tree(place) - before
            break
    copied = [name for name in _tree(place) - started if _holds_secret(place / name)]
    report = {"code": code, "left": sorted(left), "copied": copied}
    (place / "report").write_text(json.dumps(report))


def _redirect(place: Path) -> None:
    """Both outputs to files, by number: libraries write to those."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
        stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115


def _tree(place: Path) -> set[str]:
    """Names of what commands could have left, relative to `place`."""
    found = set[str]()
    for folder in ("input", "tmp"):
        for path, folders, files in os.walk(place / folder):
            found |= {str((Path(path) / one).relative_to(place)) for one in folders + files}
    return found


def _holds_secret(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return SECRET.encode() in file.read(_MOST_OUTPUT)


def _collect(place: Path, status: int, used: Any) -> Ending:
    report: dict[str, Any] = {"code": None, "left": [], "copied": []}
    if (place / "report").exists():
        report = json.loads((place / "report").read_text())
    elif os.WIFEXITED(status):
        report["code"] = os.WEXITSTATUS(status)  # an exception that escaped
    outputs = []
    for name in ("stdout", "stderr"):
        path = place / name
        data = path.open("rb").read(_MOST_OUTPUT) if path.exists() else b""
        outputs.append(data.decode("utf-8", "replace"))
    return Ending(
        code=report["code"],
        signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        out=outputs[0],
        err=outputs[1],
        seconds=used.ru_utime + used.ru_stime,
        max_bytes=used.ru_maxrss << 10,
        left=report["left"],
        copied=report["copied"],
    )
