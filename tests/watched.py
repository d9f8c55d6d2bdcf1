"""`python -m tests.watched LOG MODULE …` runs a module and writes each call on the network to LOG.

Native code looks names up past everything that Python could replace, so the kernel asks before each
`connect`, and each `sendto` that names an address, of threads and child processes too: this
machine's own are let through, and a line is written for others and for whatever asks a name
server, which may be on this machine too.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import ipaddress
import os
import platform
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

_CONNECT = {"x86_64": 42, "aarch64": 203}
_SENDTO = {"x86_64": 44, "aarch64": 206}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_NO_NEW_PRIVILEGES, _SET_FILTER, _NEW_LISTENER = 38, 1, 8
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ASK, _ALLOW = 0x7FC00000, 0x7FFF0000
_NUMBER_AT, _ADDRESS_AT = 0, 16 + 8 * 4
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_QUESTION, _REPLY = struct.Struct("QII iIQ6Q"), struct.Struct("QqiI")
_GO_ON = 1
_NAME_SERVER = 53
UNSET = {"ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE"}
"""What a user who is to be kept local might have set."""


class _Instruction(ctypes.Structure):
    _fields_: ClassVar = [
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_: ClassVar = [("length", ctypes.c_ushort), ("first", ctypes.POINTER(_Instruction))]


def _set_filter(steps: Sequence[_Instruction]) -> int:
    """The kernel does as `steps` say, here and in children; the descriptor at which it asks."""
    program = _Program(len(steps), (_Instruction * len(steps))(*steps))
    library = ctypes.CDLL(None, use_errno=True)
    failed = library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    set_mode = _SECCOMP[platform.machine()]
    found = -1
    if not failed:
        found = library.syscall(set_mode, _SET_FILTER, _NEW_LISTENER, ctypes.byref(program))
    if found < 0:
        raise OSError(ctypes.get_errno(), "the kernel takes no filter")
    return int(found)


def _ask_before_calls() -> int:
    """Installs the filter in this process; the descriptor at which the kernel asks."""
    connect, sendto = (one[platform.machine()] for one in (_CONNECT, _SENDTO))
    steps = [
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF_EQUAL, 4, 0, connect),
        (_JUMP_IF_EQUAL, 0, 2, sendto),
        (_LOAD, 0, 0, _ADDRESS_AT),  # the lower half: no address lies at a multiple of 4 GiB
        (_JUMP_IF_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ASK),
    ]
    return _set_filter([_Instruction(*step) for step in steps])


def _answer(listener: int, log: int) -> None:
    """Answers one question of the kernel's."""
    question = bytearray(_QUESTION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, question)
    except OSError as error:
        if error.errno == errno.ENOENT:  # who called has been killed
            return
        raise
    call, pid, _, number, _, _, *arguments = _QUESTION.unpack(question)
    at, size = arguments[1:3] if number == _CONNECT[platform.machine()] else arguments[4:6]
    with suppress(OSError), Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(at)
        stranger = _find_stranger(memory.read(min(size, 128)))
        if stranger is not None:
            os.write(log, f"{stranger}\n".encode())
    with suppress(OSError):
        fcntl.ioctl(listener, _SEND, bytearray(_REPLY.pack(call, 0, 0, _GO_ON)))


def _find_stranger(address: bytes) -> str | None:
    """Who is called; None for this machine, or what is no internet address."""
    family = int.from_bytes(address[:2], sys.byteorder)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    port = int.from_bytes(address[2:4], "big")
    host = ipaddress.ip_address(address[4:8] if family == socket.AF_INET else address[8:24])
    mapped = getattr(host, "ipv4_mapped", None) or host
    ours = mapped.is_loopback or mapped.is_unspecified
    return None if ours and port != _NAME_SERVER else f"{host} {port}"


def main() -> int:
    """The exit status of the module; a signal that ends this process ends that one."""
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        listener = array.array("i", [_ask_before_calls()])
        theirs.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, listener)])
        os.close(listener[0])
        theirs.close()
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    theirs.close()
    _, (listener,), *_ = socket.recv_fds(ours, 1, 1)
    watch = os.pidfd_open(child)
    poll = select.poll()
    for file in (listener, watch):
        poll.register(file, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if ready.get(listener, 0) & select.POLLIN:
            _answer(listener, log)
        elif watch in ready:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
