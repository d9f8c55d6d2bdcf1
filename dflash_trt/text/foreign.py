"""Code that came with a checkpoint, run in one bounded process: what the two ends agree on."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_trt.errors import DflashError

_WAIT_FACTOR = 6
_PIECE_BYTES = 1 << 16
# Its limits end it otherwise: by SIGXCPU, or as a crash where memory is short.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class ForeignLimits:
    """What a job may take: processor time, address space, and bytes of its answer."""

    max_seconds: int
    max_bytes: int
    max_answer_bytes: int


class ForeignProcessLostError(DflashError):
    """The process was ended from outside, twice; who asked is not at fault, and may try again."""


class ForeignProcess:
    """Answers jobs by a script of this folder, in a process that is kept until it ends.

    The process bounds its own time and memory (`foreign_worker.py`) and may write no file; this
    end bounds what it reads and how long it waits. For one thread at a time.

    Args:
        script: a module beside this one with a function `answer(job, payload)`.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._worker: subprocess.Popen[bytes] | None = None

    def ask(
        self, job: Mapping[str, Any], limits: ForeignLimits, payload: bytes = b""
    ) -> dict[str, Any]:
        """The script's answer; {"error": …} also when the process ended or exceeded a limit.

        One that is killed or stopped from outside is started again, once.

        Raises:
            ForeignProcessLostError: it was killed again, or cannot be started.
        """
        for _ in range(2):
            answer = self._ask_once(job, limits, payload)
            if answer is not None:
                return answer
        raise ForeignProcessLostError("the process that does this was killed, twice")

    def _ask_once(
        self, job: Mapping[str, Any], limits: ForeignLimits, payload: bytes
    ) -> dict[str, Any] | None:
        """None where the process was killed or stopped from outside."""
        try:
            worker = self._start()
        except OSError as error:
            what = f"the process that does this cannot be started: {error.strerror or error}"
            raise ForeignProcessLostError(what) from error
        head = {**job, **asdict(limits), "payload_bytes": len(payload)}
        assert worker.stdin is not None
        output = b""
        try:
            worker.stdin.write(json.dumps(head).encode() + b"\n" + payload)
            worker.stdin.flush()
            output = self._read_line(worker, limits)
        except BrokenPipeError:
            pass
        if not output.endswith(b"\n"):
            reason = self._end(worker, limits, len(output))
            return None if reason is None else {"error": reason}
        try:
            answer = json.loads(output)
        except ValueError:
            answer = None
        return answer if isinstance(answer, dict) else {"error": "its process gave no answer"}

    def close(self) -> None:
        """Ends the process."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None

    def _start(self) -> subprocess.Popen[bytes]:
        if self._worker is None or self._worker.poll() is not None:
            self.close()
            folder = Path(__file__).parent
            command = [folder / "foreign_worker.py", folder / self._script]
            self._worker = subprocess.Popen(
                [sys.executable, "-P", *map(str, command)],
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
        return self._worker

    def _read_line(self, worker: subprocess.Popen[bytes], limits: ForeignLimits) -> bytes:
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

    def _end(
        self, worker: subprocess.Popen[bytes], limits: ForeignLimits, answer_bytes: int
    ) -> str | None:
        """Ends the process, which gave no whole answer, and says why; None where others did it."""
        if answer_bytes > limits.max_answer_bytes:
            self.close()
            return f"answers with more than {limits.max_answer_bytes:,} bytes"
        try:
            code = worker.wait(1)
        except subprocess.TimeoutExpired:
            flags = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            stopped = os.waitid(os.P_PID, worker.pid, flags) is not None
            code = -signal.SIGKILL if stopped else -signal.SIGXCPU
        self.close()
        if -code in _FROM_OUTSIDE:
            return None
        if code == -signal.SIGXCPU:
            return f"takes more than {limits.max_seconds} s or {limits.max_bytes >> 20} MiB"
        if code < 0:
            name = signal.Signals(-code).name
            return f"needs more than {limits.max_bytes >> 20} MiB, or crashes ({name})"
        return "its process gave no answer"
