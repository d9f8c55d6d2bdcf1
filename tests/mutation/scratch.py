"""A copy of the tree in a temporary folder, and pytest in it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - (.*))?$", re.MULTILINE)
_FOLDERS = re.compile(r"(?:/[\w.-]+){2,}/")
_ENDS_WITHOUT_TESTS = 5
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
        self, arguments: list[str], patience_s: float, *, without: list[str] | None = None
    ) -> Outcome:
        """Runs tests until one fails, for `patience_s` seconds at most."""
        command = [str(self.root / ".venv/bin/python"), "-m", "pytest", "-x", "-vv", "-rfE"]
        command += ["--tb=line", "-p", "no:cacheprovider", "--color=no", *arguments]
        command += [f"--deselect={test}" for test in without or []]
        # The same examples at every run; a wide line, since pytest cuts its summary to it.
        environment = os.environ | {"CI": "1", "COLUMNS": "400"}
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            environment.pop(name, None)
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            started = [line for line in text.splitlines() if line.startswith("tests/")]
            test = started[-1].split(" ")[0] if started else "collection"
            return Outcome(test, f"hangs for {patience_s:.0f} s")
        if process.returncode in (0, _ENDS_WITHOUT_TESTS):
            return Outcome()
        if match := _FAILED.search(text):
            how = _FOLDERS.sub("…/", (match[2] or "").strip())
            return Outcome(match[1].strip(), how[:_LONGEST_HOW])
        return Outcome("collection", " ".join(text.split())[-_LONGEST_HOW:])
