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
from pathlib import Path
from typing import ClassVar

_SYSCALL_SOCKET = {"x86_64": 41, "aarch64": 198}
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_KILL_PROCESS, _ALLOW = 0x80000000, 0x7FFF0000
_NUMBER_AT, _FIRST_ARGUMENT_AT = 0, 16


class _Instruction(ctypes.Structure):
    _fields_: ClassVar = [
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_: ClassVar = [("length", ctypes.c_ushort), ("first", ctypes.POINTER(_Instruction))]


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
    program = _Program(len(steps), (_Instruction * len(steps))(*steps))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for call in (
        (_NO_NEW_PRIVILEGES, 1, 0, 0, 0),
        (_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0),
    ):
        if prctl(*call):
            raise OSError(ctypes.get_errno(), "the kernel takes no filter")


def run_offline(*command: str, home: Path) -> subprocess.CompletedProcess[str]:
    """`python -m COMMAND` so guarded, by a user whose home is `home` and who has set nothing."""
    unset = {"ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE"}
    environment = {key: value for key, value in os.environ.items() if key not in unset}
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
