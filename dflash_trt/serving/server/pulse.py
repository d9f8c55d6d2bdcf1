"""A model's heartbeat: a small file in which its process says what its generator does, since when.

A write is a copy into mapped memory, of two microseconds, before each turn of the generator:
a busy server is heard without being asked.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.runtime.worker import Phase

# Names the file to the models' processes, which get no other word from who starts their server.
PULSE_VARIABLE = "DFLASH_TRT_PULSE"
_FORM = struct.Struct("=dQQ")
_PHASES = list(Phase)


@dataclass(frozen=True, slots=True)
class Pulse:
    """The last beat: the generator's phase, when it began (`time.monotonic`), and its number."""

    phase: Phase
    since: float
    count: int


class PulseWriter:
    """Writes beats to the file that PULSE_VARIABLE names; without one, nothing."""

    def __init__(self) -> None:
        self._count = 0
        self._map: mmap.mmap | None = None
        path = os.environ.get(PULSE_VARIABLE)
        if path:
            with Path(path).open("w+b") as file:
                file.truncate(_FORM.size)
                self._map = mmap.mmap(file.fileno(), _FORM.size)

    def beat(self, phase: Phase) -> None:
        """Says that `phase` begins."""
        if self._map is not None:
            self._count += 1
            _FORM.pack_into(self._map, 0, time.monotonic(), _PHASES.index(phase), self._count)


def read_pulse(path: Path) -> Pulse | None:
    """The last beat; None where no model has written one."""
    try:
        since, phase, count = _FORM.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return Pulse(_PHASES[phase], since, count) if count else None
