"""Ends a server whose launcher was killed; also a program of its own, of the standard library.

`guard.py GROUP PREFIX...` waits for the end of its standard input, a pipe whose other end the
launcher alone holds. Then nobody is left to end the server: it kills the process group and removes
the files whose paths begin with a PREFIX.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

_PATIENCE_S = 3.0
_ROUND_S = 0.02
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Guard:
    """A guard over the process group `group`, to which a server and its models belong.

    The group is the guard's own and exists before its first server: there is no moment at which a
    server runs unguarded. If this process is killed, the files whose paths begin with one of
    `prefixes` are removed.
    """

    def __init__(self, prefixes: Sequence[Path]) -> None:
        self._prefixes = [str(one.absolute()) for one in prefixes]
        self._ended = False
        self._process = self._start(0)
        self.group = self._process.pid

    def keep(self) -> None:
        """Starts another guard if this one has been killed."""
        if not self._ended and self._process.poll() is not None:
            self._process = self._start(self.group)

    def end_group(self) -> None:
        """Kills whatever is in the group, and the guard; the second time nothing happens."""
        if self._ended:  # the number may be another group's by now
            return
        self._ended = True
        with suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        self._process.kill()  # one that was started later is in a group of its own
        self._process.communicate()

    def _start(self, group: int) -> subprocess.Popen[bytes]:
        # Isolated and without site-packages: it starts in 15 ms and takes 8 MB.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(group), *self._prefixes],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )


def _members(group: int) -> list[int]:
    """Processes of the group that run, without this one."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        with suppress(OSError, ValueError):
            # pid (command) state ppid pgrp …; the command may hold spaces and brackets.
            text = (process / "stat").read_text("utf-8", "replace")
            state, _, its_group = text.rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(process.name))
    return found


def _end(group: int, prefixes: Sequence[str]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while (members := _members(group)) and time.monotonic() < deadline:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_ROUND_S)
    for path in chain.from_iterable(map(_matches, prefixes)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _matches(prefix: str) -> list[Path]:
    folder, name = os.path.split(prefix)
    return [path for path in Path(folder).iterdir() if path.name.startswith(name)]


def main() -> None:
    # A terminal and an orchestrator signal everyone: this process is the last to go.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    group, *prefixes = sys.argv[1:]
    sys.stdin.buffer.read()
    _end(int(group) or os.getpgrp(), prefixes)


if __name__ == "__main__":
    main()
