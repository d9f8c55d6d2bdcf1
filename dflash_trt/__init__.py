"""dflash-trt: DFlash speculative decoding, from two checkpoints to lossless tokens."""

from __future__ import annotations

__version__ = "0.1.0"
