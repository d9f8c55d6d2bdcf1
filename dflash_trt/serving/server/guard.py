"""Ends a server whose launcher was killed; also a program of its own, of the standard library.

`guard.py GROUP PREFIX...` waits for the end of its standard input, a pipe whose other end the
launcher alone holds. Then nobody is left to end the server: it kills the process group (0: its own)
and removes the files whose paths begin with a PREFIX.
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
from pathlib import Path

_DEATH_S = 0.3  # until what was killed writes no file any more


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
        _kill(self.group)
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


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    # A terminal and an orchestrator signal everyone: this process is the last to go.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    group, *prefixes = sys.argv[1:]
    sys.stdin.buffer.read()
    doomed = int(group) or os.getpgrp()
    if os.fork():  # the child outlives the group
        os.waitpid(-1, 0)
        return
    os.setsid()
    _kill(doomed)
    time.sleep(_DEATH_S)
    paths = [one for prefix in map(Path, prefixes) for one in prefix.parent.iterdir()]
    for path in paths:
        if not str(path).startswith(tuple(prefixes)):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
