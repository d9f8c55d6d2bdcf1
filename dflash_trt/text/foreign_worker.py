"""Runs code that came with a checkpoint, in a process of its own, which foreign.py starts.

Reads jobs from stdin, a line of JSON each and the bytes that it announces, and writes a line with
the answer of the script that it was started for. Imports nothing of the project: it starts
quickly, and foreign code has little to find here.
"""

from __future__ import annotations

import json
import math
import resource
import runpy
import sys
import time
from typing import Any


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        answer = runpy.run_path(sys.argv[1])["answer"]
    except ImportError as error:
        _say({"error": f"its process lacks a package: {error}"})
        return
    for line in iter(sys.stdin.buffer.readline, b""):
        job = json.loads(line)
        payload = sys.stdin.buffer.read(job["payload_bytes"])
        resource.setrlimit(resource.RLIMIT_AS, (job["max_bytes"], job["max_bytes"]))
        seconds = math.ceil(time.process_time()) + job["max_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        _say(answer(job, payload))


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
