"""Tokenizers whose patterns nobody knows encode in a bounded process, for a text may hold them up.

A regular expression may go back over a text as often as its maker wants; the library gives up
after ten million steps at each place, which are tenths of a second, and a prompt has as many
places as characters. Whether one does so cannot be told from how it looks: those of published
tokenizers are known by heart here. Any other costs a start of half a second, a tenth of a
millisecond for a short text, and twice the time for a long one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from typing import Any

from dflash_trt.text.foreign import ForeignLimits, ForeignProcess

MAX_SECONDS = 5
MAX_BYTES = 2 << 30
_MAX_ANSWER_BYTES = 128 << 20
_LIMITS = (MAX_BYTES, _MAX_ANSWER_BYTES)

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_OSS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN = {QWEN2, LLAMA3, GPT_OSS, " {2,}"}


def are_known(patterns: Collection[str]) -> bool:
    """Whether each takes time in proportion to a text, as those of published tokenizers do."""
    return _KNOWN.issuperset(patterns)


class BoundedEncoder:
    """A tokenizer in a process of its own; any thread may ask it, one after the other.

    Args:
        data: the content of a `tokenizer.json` that has passed its trial.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._lock = threading.Lock()
        self._process = ForeignProcess("encode_worker.py")
        weakref.finalize(self, self._process.close)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text.

        Raises:
            ValueError: the tokenizer fails, or takes more than the limits.
        """
        job = {"loads": False, "special": special}
        payload = text.encode("utf-8", "surrogatepass")
        with self._lock:
            answer = self._ask(job, payload)
            if "absent" in answer:
                answer = self._ask({"loads": True}, self._data)
                if "error" not in answer:
                    answer = self._ask(job, payload)
        if "ids" not in answer:
            raise ValueError(str(answer.get("error")))
        ids: list[int] = answer["ids"]
        return ids

    def _ask(self, job: dict[str, Any], payload: bytes) -> dict[str, Any]:
        return self._process.ask(job, ForeignLimits(MAX_SECONDS, *_LIMITS), payload)
