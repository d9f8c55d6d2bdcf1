"""Signs of life: a model's heartbeat, and the processes of its server.

The heartbeat is what a generator does, in a small file that is mapped.

A write is a copy into memory, of two microseconds, before each turn of the generator: a busy server
is heard without being asked.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dflash_trt.decoding.worker import Phase
from dflash_trt.errors import DflashError

# Names the file to the models' processes, which get no other word from who starts their server.
HEARTBEAT_VARIABLE = "DFLASH_TRT_HEARTBEAT"
PING_S = 5.0
_FORM = struct.Struct("=QQ")
_PHASES = list(Phase)


class Beat(NamedTuple):
    """The last beat: the generator's phase, and its number."""

    phase: Phase
    number: int


class HeartbeatWriter:
    """Writes beats to the file that HEARTBEAT_VARIABLE names; without one, nothing."""

    def __init__(self) -> None:
        self._number = 0
        self._map: mmap.mmap | None = None
        if path := os.environ.get(HEARTBEAT_VARIABLE):
            with Path(path).open("w+b") as file:
                file.truncate(_FORM.size)
                self._map = mmap.mmap(file.fileno(), _FORM.size)

    def beat(self, phase: Phase) -> None:
        """Says that `phase` begins."""
        if self._map is not None:
            self._number += 1
            _FORM.pack_into(self._map, 0, _PHASES.index(phase), self._number)


def read_heartbeat(path: Path) -> Beat | None:
    """The last beat; None where no model has written one."""
    try:
        phase, number = _FORM.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return Beat(_PHASES[phase], number) if number else None


class SilenceWatch:
    """Notices a server whose processes run but do nothing any more: for `hang_s` no beat has come.

    A busy server is asked nothing. While it is idle, `ping` asks something that passes through the
    rest of the server, every PING_S; its answer counts as a beat.
    """

    def __init__(self, ping: Callable[[], Coroutine[Any, Any, None]], hang_s: float) -> None:
        self._ping, self._hang_s = ping, hang_s
        self._asking: asyncio.Task[None] | None = None
        self._heard_at = time.monotonic()
        self._number = 0

    def find_trouble(self, beat: Beat | None, now: float) -> str | None:
        """What is wrong at the time `now`; None for a server that is heard, or was lately."""
        if beat is None or beat.phase is Phase.OPENING:  # a model of others; one that loads
            return None
        if beat.phase is Phase.BROKEN:
            return "the executor failed and could not be opened again"
        is_idle, is_answered = beat.phase is Phase.IDLE, False
        if self._asking is not None and self._asking.done():
            is_answered = self._asking.exception() is None and is_idle
            self._asking = None
        if is_answered or beat.number != self._number:
            self._number, self._heard_at = beat.number, now
        silent_s = now - self._heard_at
        if silent_s > self._hang_s:
            what = "nothing was answered" if is_idle else "no step has ended"
            return f"{what} for {self._hang_s:g} s"
        if self._asking is None and is_idle and silent_s > PING_S:
            self._asking = asyncio.create_task(self._ping())
        return None

    async def close(self) -> None:
        """Ends a ping that is under way."""
        if self._asking is not None:
            self._asking.cancel()
            with suppress(asyncio.CancelledError, DflashError):
                await self._asking


PROC = Path("/proc")
_DEAD = "ZX"


def find_models(server_pid: int) -> dict[int, str]:
    """Names of the Python models that run, by process id.

    The Python backend starts a process with the path of the model's `model.py` as an argument,
    <repository>/<model>/<version>/model.py.
    """
    found: dict[int, str] = {}
    for process, state in _children(server_pid):
        with suppress(OSError):  # it has ended meanwhile
            arguments = (process / "cmdline").read_text("utf-8", "replace").split("\0")
            models = [Path(one).parts[-3] for one in arguments if one.endswith("/1/model.py")]
            if models and state not in _DEAD:
                found[int(process.name)] = models[0]
    return found


def runs(pid: int, parent_pid: int) -> bool:
    """Whether that child of its parent runs; another process may have its number by now."""
    state, parent = read_state(PROC / str(pid))
    return state not in _DEAD and parent == parent_pid


def has_dead_child(pid: int) -> bool:
    """Whether a child has ended and its parent has not asked why."""
    return any(state in _DEAD for _, state in _children(pid))


def read_state(process: Path) -> tuple[str, int]:
    """The state's letter and the parent's id; X and 0 when it has ended."""
    try:
        # pid (command) state ppid …; the command may hold spaces and brackets.
        text = (process / "stat").read_text("utf-8", "replace")
        state, parent = text.rpartition(")")[2].split()[:2]
        return state, int(parent)
    except (OSError, ValueError):
        return "X", 0


def _children(pid: int) -> Iterator[tuple[Path, str]]:
    for process in PROC.glob("[0-9]*"):
        state, parent = read_state(process)
        if parent == pid:
            yield process, state
