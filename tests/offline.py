"""`python -m tests.offline MODULE …` runs a module in a process that the kernel keeps local.

Native code looks names up past everything that Python could replace, so the guard is a seccomp
filter, which threads and child processes have too: whoever opens an internet socket is killed by
SIGSYS, and what it wrote before is still there to be read.
"""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

_SYSCALL_SOCKET = {"x86_64": 41, "aarch64": 198}
_SYSCALL_SECCOMP = {"x86_64": 317, "aarch64": 277}
_NO_NEW_PRIVILEGES, _SET_FILTER, _NEW_LISTENER = 38, 1, 8
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_KILL_PROCESS, _ALLOW = 0x80000000, 0x7FFF0000
UNSET = {"ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE"}
"""What a user who is to be kept local might have set."""
_NUMBER_AT, _FIRST_ARGUMENT_AT = 0, 16


class Instruction(ctypes.Structure):
    _fields_: ClassVar = [
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_: ClassVar = [("length", ctypes.c_ushort), ("first", ctypes.POINTER(Instruction))]


def refuse_network() -> None:
    """From now on this process ends at its first internet socket."""
    steps = [
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF_EQUAL, 0, 4, _SYSCALL_SOCKET[platform.machine()]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_IF_EQUAL, 1, 0, socket.AF_INET),
        (_JUMP_IF_EQUAL, 0, 1, socket.AF_INET6),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_RETURN, 0, 0, _ALLOW),
    ]
    set_filter([Instruction(*step) for step in steps])


def set_filter(steps: Sequence[Instruction], *, asks: bool = False) -> int:
    """The kernel does as `steps` say, in this process and its children; where one `asks`, the
    descriptor at which it does."""
    program = _Program(len(steps), (Instruction * len(steps))(*steps))
    library = ctypes.CDLL(None, use_errno=True)
    failed = library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    set_mode = _SYSCALL_SECCOMP[platform.machine()]
    found = -1
    if not failed:
        found = library.syscall(
            set_mode, _SET_FILTER, _NEW_LISTENER if asks else 0, ctypes.byref(program)
        )
    if found < 0:
        raise OSError(ctypes.get_errno(), "the kernel takes no filter")
    return int(found)


def run_offline(*command: str, home: Path) -> subprocess.CompletedProcess[str]:
    """`python -m COMMAND` so guarded, by a user whose home is `home` and who has set nothing."""
    environment = {key: value for key, value in os.environ.items() if key not in UNSET}
    return subprocess.run(
        [sys.executable, "-m", __name__, *command],
        env={**environment, "HOME": str(home)},
        capture_output=True,
        text=True,
    )


if __name__ == "__main__":
    refuse_network()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
