"""What a part of the check is, and what it is given to work with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.proof.gpu_check.probe import Probe


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and for how long a part works.

    Args:
        folder: its own, removed when it has ended.
        ends: when it is ended, by `time.monotonic`, which all processes share.
        is_long: whether everything is run, whatever it takes.
    """

    folder: Path
    ends: float
    is_long: bool = False

    def has(self, seconds: float) -> bool:
        """Whether so much time is left."""
        return time.monotonic() + seconds <= self.ends


PartWork = Callable[[Setting], Iterator[Probe]]
"""Yields findings as they are made; another process imports it by name."""
