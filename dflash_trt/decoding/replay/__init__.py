"""Known answers, asked of the draft again: what the speculative loop would have accepted."""

from __future__ import annotations

from dflash_trt.decoding.replay.edits import Edits
from dflash_trt.decoding.replay.replay import Replay
from dflash_trt.decoding.replay.replayed_acceptance import Acceptance, Answer

__all__ = ["Acceptance", "Answer", "Edits", "Replay"]
