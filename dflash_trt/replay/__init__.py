"""Known answers, asked of the draft again: what the speculative loop would have accepted."""

from __future__ import annotations

from dflash_trt.replay.acceptance import Acceptance, Answer
from dflash_trt.replay.edits import Edits
from dflash_trt.replay.replay import Replay

__all__ = ["Acceptance", "Answer", "Edits", "Replay"]
