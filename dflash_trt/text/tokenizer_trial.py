"""A tokenizer is code: it is tried in a bounded process before this one loads it."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path

import tokenizers

from dflash_trt.core.user_cache import read_cache, user_cache_file, write_cache
from dflash_trt.errors import DflashError, one_line
from dflash_trt.text.foreign import ForeignLimits, ForeignProcess

# The largest published tokenizers, of 262,144 entries, take 400 MiB and a few seconds.
MAX_BYTES = 1 << 30
MAX_SECONDS = 15
_MAX_ANSWER_BYTES = 1 << 16
_TRIAL = 1
"""Goes up when the trial finds more than it did."""
_PASSED = b"passed\n"


def check_tokenizer(data: bytes, where: str | Path) -> None:
    """Raises DflashError unless the content of a `tokenizer.json` loads and behaves when tried.

    Promised of what passes: loading it ends and neither panics nor takes more than the limits; no
    text comes out of its steps more than `MAX_GROWTH` times as long; the same text gives the same
    tokens. Not promised: that no text at all makes a pattern backtrack. The library ends such a
    match with a panic, which is an error of the request then.

    Each content is tried once: the user's cache remembers the hashes of those that passed with
    this release of the library. A bundle cannot vouch for its own.
    """
    key = hashlib.sha256(f"{_TRIAL} {tokenizers.__version__} ".encode())
    key.update(data)
    record = user_cache_file(f"tokenizers/{key.hexdigest()}")
    if read_cache(record) == _PASSED:
        return
    limits = ForeignLimits(MAX_SECONDS, MAX_BYTES, _MAX_ANSWER_BYTES)
    with closing(ForeignProcess("tokenizer_worker.py")) as process:
        answer = process.ask({}, limits, data)
    if "error" in answer:
        raise DflashError(one_line(answer["error"]), where=where)
    write_cache(record, _PASSED)
