"""A grammar is a program: it is tried in a bounded process before this one compiles it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from dflash_trt.errors import DflashError, one_line
from dflash_trt.text.foreign import ForeignLimits, ForeignProcess

MAX_SECONDS = 2
"""Of processor time, for compiling and going some way; a schema in use takes hundredths."""
MAX_BYTES = 128 << 20
MAX_MASK_SECONDS = 0.5
MEAN_MASK_SECONDS = 0.02
"""Of processor time, for saying once what may come next; usual are fractions of a millisecond."""
# The process also holds the tokenizer, and the largest take seconds to load.
_LOADING = ForeignLimits(max_seconds=30, max_bytes=3 << 30, max_answer_bytes=1 << 16)
_TRYING = ForeignLimits(MAX_SECONDS + 1, _LOADING.max_bytes, _LOADING.max_answer_bytes)


class GrammarTrial:
    """Tries grammars with one tokenizer; any thread may ask, one after the other.

    Promised of what passes: it compiles within `MAX_SECONDS` and `MAX_BYTES`, and so does going
    some way through it. Not promised: that no way at all leads to a limit, which ends a request.

    Args:
        tokenizer: the content of a `tokenizer.json` that has passed its own trial.
        vocab_size: of the model.
        eos_token_ids: what may come where an output is whole.
        limits: of llguidance's LLParserLimits, by name.
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        eos_token_ids: Collection[int],
        limits: Mapping[str, int],
    ) -> None:
        self._tokenizer = tokenizer.encode()
        self._head = {"vocab_size": vocab_size, "eos_token_ids": list(eos_token_ids)}
        self._job = {
            "trial_seconds": MAX_SECONDS,
            "trial_bytes": MAX_BYTES,
            "mask_seconds": MAX_MASK_SECONDS,
            "mean_seconds": MEAN_MASK_SECONDS,
            "limits": dict(limits),
        }
        self._lock = threading.Lock()
        self._process = ForeignProcess("grammar_worker.py")
        weakref.finalize(self, self._process.close)

    def take(self, text: str) -> int:
        """The bytes that a grammar in llguidance's own form takes.

        Raises:
            DflashError: it does not compile, or not within the limits (usage).
            ForeignProcessLostError: the process was killed, twice.
        """
        with self._lock:
            answer = self._ask(self._job, text.encode(), _TRYING)
            if "absent" in answer:
                answer = self._ask(self._head, self._tokenizer, _LOADING)
                if "error" in answer:
                    what = f"the tokenizer is of no kind that grammars know ({answer['error']})"
                    raise DflashError(one_line(what, 200), where="grammar", usage=True)
                answer = self._ask(self._job, text.encode(), _TRYING)
        if "bytes" not in answer:
            what = str(answer.get("error", "its process gave no answer"))
            raise DflashError(one_line(what, 200), where="grammar", usage=True)
        found: int = answer["bytes"]
        return found

    def _ask(self, job: Mapping[str, Any], payload: bytes, limits: ForeignLimits) -> dict[str, Any]:
        loads = job is self._head
        return self._process.ask({**job, "loads": loads}, limits, payload)
