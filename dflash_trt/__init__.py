"""dflash-trt: DFlash speculative decoding, from two checkpoints to lossless tokens."""

from __future__ import annotations

from dflash_trt.version import __version__

__all__ = ["__version__"]
