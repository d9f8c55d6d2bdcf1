"""Tries grammars with one tokenizer. Run by sandbox_worker.py, in its limits.

Each is tried in a fork with limits of its own, so that one that exceeds them ends that fork alone:
loading the tokenizer again would cost more than most trials.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

_WALKS, _STEPS = 3, 16
_OVERTIME = 6  # on the clock, for a machine that is busy
_PIPE_BYTES = 4096


def load(job: dict[str, Any], payload: bytes) -> Any:
    """The tokenizer in `payload`, as llguidance takes it."""
    size, ends = job["vocab_size"], job["eos_token_ids"]
    return llguidance.LLTokenizer(payload.decode(), n_vocab=size, eos_token=ends)


def answer(job: dict[str, Any], payload: bytes, tokenizer: Any) -> dict[str, Any]:
    """Tries the grammar in `payload`: {"bytes": what it takes}.

    {"error": …} of what does not compile or exceeds a limit.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.close(reads)
            _bound(job)
            said = json.dumps(_try(job, payload.decode(), tokenizer)).encode()
            os.write(writes, said[:_PIPE_BYTES])
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read(_PIPE_BYTES)
    _, status = os.waitpid(child, 0)
    if said:
        found: dict[str, Any] = json.loads(said)
        return found
    seconds, mib = job["trial_seconds"], job["trial_bytes"] >> 20
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM):
        return {"error": f"takes more than {seconds} s to compile and try"}
    return {"error": f"needs more than {mib} MiB, or crashes the library"}


def _bound(job: dict[str, Any]) -> None:
    """The limits of this fork; it may have no more threads, and dies by itself."""
    most = _address_space() + job["trial_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    seconds = job["trial_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    signal.alarm(_OVERTIME * seconds)


def _try(job: dict[str, Any], text: str, tokenizer: Any) -> dict[str, Any]:
    before = _address_space()
    try:
        limits = llguidance.LLParserLimits(**job["limits"])
        start = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if start.is_error():
            return {"error": _first_words(start.get_error())}
        start.compute_bitmask()  # the first is slow, and comes before any output
        begun, steps = time.process_time(), 0
        for seed in range(_WALKS):
            fault, walked = _walk(start.deep_copy(), seed, job["mask_seconds"])
            if fault is not None:
                return {"error": _first_words(fault)}
            steps += walked
        if time.process_time() - begun > job["mean_seconds"] * max(steps, _STEPS):
            return {"error": f"takes more than {job['mean_seconds']} s for each token"}
    except MemoryError:
        return {"error": f"needs more than {job['trial_bytes'] >> 20} MiB"}
    except BaseException as error:
        return {"error": _first_words(f"the library fails: {error}")}
    return {"bytes": max(_address_space() - before, 0)}


def _walk(matcher: Any, seed: int, most_seconds: float) -> tuple[str | None, int]:
    """What goes wrong on one way through the grammar, the same for a seed; and how far it went."""
    drawn = seed
    for step in range(_STEPS):
        started = time.process_time()
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return str(matcher.get_error()), step
        if time.process_time() - started > most_seconds:
            return f"takes more than {most_seconds} s to say what may come next", step
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if not len(allowed) or matcher.is_stopped():
            return None, step
        drawn = (drawn * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        matcher.consume_token(int(allowed[(drawn >> 33) % len(allowed)]))
        if matcher.is_error():
            return str(matcher.get_error()), step
    return None, _STEPS


def _first_words(text: str) -> str:
    """Without what the library adds of its own state, and not more than a pipe takes at once."""
    return text.split("\n<state>")[0][:500]


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    return pages * resource.getpagesize()
