"""Runs code that came with a checkpoint in processes with limits, one for each kind of job."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_trt.errors import DflashError

JobKind = Literal["template", "encoding", "tokenizer", "grammar"]
_WAIT_FACTOR = 6
_PIECE_BYTES = 1 << 16
# Its limits end it otherwise: by SIGXCPU, or as a crash where memory is short.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What a job may take: processor time, address space, and bytes of its answer."""

    max_seconds: int
    max_bytes: int
    max_answer_bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    """What a process loads before its first job, and keeps: a tokenizer.

    Args:
        payload: its content.
        limits: of loading it.
        job: what else the process must know.
        fault: what to say where it cannot be loaded; `{}` stands for the reason.
    """

    payload: bytes
    limits: SandboxLimits
    job: Mapping[str, Any]
    fault: str = "{}"


class SandboxLostError(DflashError):
    """The process was ended from outside, twice; who asked is not at fault, and may try again."""


class Sandbox:
    """Answers jobs of one kind (`sandbox_worker.py`) in a process that is kept until it ends.

    The process bounds its own time and memory and may write no file; this end bounds what it
    reads and how long it waits. Any thread may ask, one after the other.
    """

    def __init__(self, kind: JobKind, held: Held | None = None) -> None:
        self._kind, self._held = kind, held
        self._lock = threading.Lock()
        self._workers: list[subprocess.Popen[bytes]] = []  # one, or none yet
        weakref.finalize(self, _end_all, self._workers)

    def ask(
        self, job: Mapping[str, Any], limits: SandboxLimits, payload: bytes = b""
    ) -> dict[str, Any]:
        """The job's answer; {"error": …} also when the process ended or exceeded a limit.

        One that is killed from outside is started again, once.

        Raises:
            SandboxLostError: it was killed again, or cannot be started.
        """
        with self._lock:
            answer = self._ask({**job, "loads": False}, limits, payload)
            held = self._held
            if "absent" in answer and held is not None:
                answer = self._ask({**held.job, "loads": True}, held.limits, held.payload)
                if "error" in answer:
                    return {"error": held.fault.format(answer["error"])}
                answer = self._ask({**job, "loads": False}, limits, payload)
        return answer

    def close(self) -> None:
        """Ends the process."""
        _end_all(self._workers)

    def _ask(self, job: Mapping[str, Any], limits: SandboxLimits, payload: bytes) -> dict[str, Any]:
        for _ in range(2):
            answer = self._ask_once(job, limits, payload)
            if answer is not None:
                return answer
        raise SandboxLostError("the process that does this was killed, twice")

    def _ask_once(
        self, job: Mapping[str, Any], limits: SandboxLimits, payload: bytes
    ) -> dict[str, Any] | None:
        """None where the process was killed from outside."""
        try:
            worker = self._start()
        except OSError as error:
            what = f"the process that does this cannot be started: {error.strerror or error}"
            raise SandboxLostError(what) from error
        head = {**job, **asdict(limits), "payload_bytes": len(payload)}
        assert worker.stdin is not None
        output = b""
        with suppress(BrokenPipeError):
            worker.stdin.write(json.dumps(head).encode() + b"\n" + payload)
            worker.stdin.flush()
            output = _read_line(worker, limits)
        if not output.endswith(b"\n"):
            reason = _find_end(worker, limits, len(output))
            self.close()
            return None if reason is None else {"error": reason}
        try:
            answer = json.loads(output)
        except ValueError:
            answer = None
        return answer if isinstance(answer, dict) else {"error": "its process gave no answer"}

    def _start(self) -> subprocess.Popen[bytes]:
        if not self._workers or self._workers[0].poll() is not None:
            self.close()
            script = Path(__file__).with_name("sandbox_worker.py")
            worker = subprocess.Popen(
                [sys.executable, "-P", str(script), self._kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    # A model's process of Triton server finds packages where model.py told it to.
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    # Threads would each take a share of the address space.
                    "TOKENIZERS_PARALLELISM": "false",
                    "RAYON_NUM_THREADS": "1",
                },
            )
            self._workers.append(worker)
        return self._workers[0]


def _end_all(workers: list[subprocess.Popen[bytes]]) -> None:
    while workers:
        worker = workers.pop()
        worker.kill()
        worker.communicate()


def _read_line(worker: subprocess.Popen[bytes], limits: SandboxLimits) -> bytes:
    """A line of its output; without its end where it says too much, takes too long or ends."""
    assert worker.stdout is not None
    number, line = worker.stdout.fileno(), bytearray()
    # It bounds its processor time itself; this one is for a machine that is busy.
    deadline = time.monotonic() + _WAIT_FACTOR * limits.max_seconds
    poll = select.poll()  # select.select knows no file beyond the 1024th
    poll.register(number, select.POLLIN)
    while not line.endswith(b"\n") and len(line) <= limits.max_answer_bytes:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            break
        piece = os.read(number, _PIECE_BYTES)
        if not piece:
            break
        line += piece
    return bytes(line)


def _find_end(
    worker: subprocess.Popen[bytes], limits: SandboxLimits, answer_bytes: int
) -> str | None:
    """Why a process gave no whole answer; None where others ended it."""
    if answer_bytes > limits.max_answer_bytes:
        return f"answers with more than {limits.max_answer_bytes:,} bytes"
    try:
        code = worker.wait(1)
    except subprocess.TimeoutExpired:
        code = -signal.SIGXCPU
    if -code in _FROM_OUTSIDE:
        return None
    if code == -signal.SIGXCPU:
        return f"takes more than {limits.max_seconds} s or {limits.max_bytes >> 20} MiB"
    if code < 0:
        name = signal.Signals(-code).name
        return f"needs more than {limits.max_bytes >> 20} MiB, or crashes ({name})"
    return "its process gave no answer"
