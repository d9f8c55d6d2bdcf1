"""A copy of the tree in a temporary folder, and pytest in it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - (.*))?$", re.MULTILINE)
_TEST = re.compile(r"^(tests/\S+\.py::.*?)(?: (?:PASSED|SKIPPED|XFAIL|FAILED|ERROR)\b.*)?$")
_FOLDERS = re.compile(r"(?:/[\w.-]+){2,}/")
_ENDS_WITHOUT_TESTS = 5
_POLL_S = 0.5
_LONGEST_HOW = 160


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of pytest ended: the test that failed or hung, and how; None when all passed."""

    test: str | None = None
    how: str = ""


@dataclass(frozen=True, slots=True)
class Scratch:
    """A copy of the tree with a virtual environment in it, which finds the copy's code first."""

    root: Path

    @classmethod
    def create(cls, root: Path) -> Scratch:
        """Makes the virtual environment; other packages are those of the running Python."""
        venv = root / ".venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        (site,) = venv.glob("lib/python*/site-packages")
        packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        paths = [str(root), str(root / "perf"), str(root / "plugins"), *packages]
        (site / "00-scratch.pth").write_text("".join(f"{path}\n" for path in paths))
        script = venv / "bin" / "dflash-trt"
        script.write_text(f'#!/bin/sh\nexec "{venv}/bin/python" -m dflash_trt "$@"\n')
        script.chmod(0o755)
        (root / "build").mkdir(exist_ok=True)
        return cls(root)

    def pytest(
        self, arguments: list[str], stall_s: float, *, without: list[str] | None = None
    ) -> Outcome:
        """Runs tests until one fails, or none has ended for `stall_s` seconds."""
        command = [str(self.root / ".venv/bin/python"), "-m", "pytest", "-x", "-vv", "-rfE"]
        command += ["--tb=line", "-p", "no:cacheprovider", "--color=no", *arguments]
        command += [f"--deselect={test}" for test in without or []]
        # The same examples at every run; a wide line, since pytest cuts its summary to it.
        environment = os.environ | {"CI": "1", "COLUMNS": "400"}
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            environment.pop(name, None)
        log = self.root / "build" / "pytest.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            hangs = _wait(process, log, stall_s)
        text = log.read_text(errors="replace")
        if hangs:
            started = [line for line in text.splitlines() if line.startswith("tests/")]
            match = _TEST.match(started[-1]) if started else None
            return Outcome(match[1] if match else "collection", f"hangs for {stall_s:.0f} s")
        if process.returncode in (0, _ENDS_WITHOUT_TESTS):
            return Outcome()
        if match := _FAILED.search(text):
            how = _FOLDERS.sub("…/", (match[2] or "").strip())
            return Outcome(match[1].strip(), how[:_LONGEST_HOW])
        return Outcome("collection", " ".join(text.split())[-_LONGEST_HOW:])


def _wait(process: subprocess.Popen[bytes], log: Path, stall_s: float) -> bool:
    """Waits for the process; ends it, and returns True, when its log has stopped growing."""
    size, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_S)
        if (now := log.stat().st_size) != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > stall_s:
            _end(process)
            return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Lets the tests put away what they started, then kills what is left of them."""
    for sent, patience_s in ((signal.SIGINT, 20.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, sent)
            process.wait(patience_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
