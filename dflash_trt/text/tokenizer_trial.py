"""A tokenizer is code: it is tried in a bounded process before this one loads it."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path

import tokenizers

from dflash_trt.core.user_cache import read_cache, user_cache_file, write_cache
from dflash_trt.errors import DflashError, one_line
from dflash_trt.text.bounded import are_known
from dflash_trt.text.foreign import ForeignLimits, ForeignProcess

# The largest published tokenizers, of 262,144 entries, take 400 MiB and a few seconds.
MAX_BYTES = 1 << 30
MAX_SECONDS = 15
_MAX_ANSWER_BYTES = 1 << 16
_TRIAL = 2
"""Goes up when the trial finds more than it did."""
_PASSED = {b"passed\n": True, b"passed, with expressions of its own\n": False}
"""What the cache remembers, and whether all regular expressions are known then."""


def check_tokenizer(data: bytes, where: str | Path) -> bool:
    """Whether all regular expressions in the content of a `tokenizer.json` are known ones.

    Raises DflashError unless it loads and behaves when tried.

    Promised of what passes: loading it ends and neither panics nor takes more than the limits; no
    text comes out of its steps more than `MAX_GROWTH` times as long; the same text gives the same
    tokens. Not promised: that no text at all makes an expression backtrack, unless all are known.

    Each content is tried once: the user's cache remembers the hashes of those that passed with
    this release of the library. A bundle cannot vouch for its own.
    """
    key = hashlib.sha256(f"{_TRIAL} {tokenizers.__version__} ".encode())
    key.update(data)
    record = user_cache_file(f"tokenizers/{key.hexdigest()}")
    remembered = _PASSED.get(read_cache(record))
    if remembered is not None:
        return remembered
    limits = ForeignLimits(MAX_SECONDS, MAX_BYTES, _MAX_ANSWER_BYTES)
    with closing(ForeignProcess("tokenizer_worker.py")) as process:
        answer = process.ask({}, limits, data)
    if "error" in answer:
        raise DflashError(one_line(answer["error"]), where=where)
    passed = are_known(answer["expressions"])
    write_cache(record, next(text for text, known in _PASSED.items() if known is passed))
    return passed
