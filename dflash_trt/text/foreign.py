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

_WAIT_FACTOR = 6
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ForeignLimits:
    """What a job may take: processor time, address space, and bytes of its answer."""

    max_seconds: int
    max_bytes: int
    max_answer_bytes: int


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
        """The script's answer; {"error": …} also when the process ended or exceeded a limit."""
        try:
            worker = self._start()
        except OSError as error:
            return {"error": f"its process cannot be started: {error.strerror or error}"}
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
            return {"error": self._end(worker, limits, len(output))}
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
    ) -> str:
        """Ends the process, which gave no whole answer, and says why there is none."""
        if answer_bytes > limits.max_answer_bytes:
            self.close()
            return f"answers with more than {limits.max_answer_bytes:,} bytes"
        try:
            code = worker.wait(1)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        self.close()
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"takes more than {limits.max_seconds} s or {limits.max_bytes >> 20} MiB"
        if code < 0:
            name = signal.Signals(-code).name
            return f"needs more than {limits.max_bytes >> 20} MiB, or crashes ({name})"
        return "its process gave no answer"
