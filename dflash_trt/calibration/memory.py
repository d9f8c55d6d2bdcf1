"""Whether a model fits into memory in float32, asked before it is loaded."""

from __future__ import annotations

import numpy as np

from dflash_trt.checkpoints.draft import DraftSpec
from dflash_trt.checkpoints.quantized_weights import count_parameters
from dflash_trt.checkpoints.target import TargetSpec
from dflash_trt.core.free_memory import available_memory
from dflash_trt.errors import DflashError

_GIB = 1 << 30


def check_memory(needed: int) -> None:
    """Refuses what the machine has no room for.

    Raises:
        DflashError: `needed` bytes exceed what Linux, or the container's limit, leaves.
    """
    available = available_memory()
    if available is not None and needed > available:
        raise DflashError(
            f"observing activations in float32 needs about {needed / _GIB:.1f} GiB of memory, "
            f"{available / _GIB:.1f} GiB are available",
            fix="close other programs, shorten the calibration sequences, or use a machine with "
            "more memory",
        )


def estimate_memory(target: TargetSpec, draft: DraftSpec | None, positions: int, rows: int) -> int:
    """Bytes that passes of `rows` rows over sequences of `positions` take, the weights in float32.

    What ONNX Runtime was measured to hold on top of the weights is a tenth, and while the second
    session opens, the output head once more.
    """
    specs = (target,) if draft is None else (target, draft)
    weights = sum(count_parameters(spec.weights) for spec in specs)
    head = target.vocab_size * target.hidden_size
    extra_heads = 0 if draft is None else 2  # the draft's session packs a copy of its own
    caches = sum(layer.kv_elements for spec in specs for layer in spec.sizes.layers)
    states = sum(layer.recurrent.state_elements for layer in target.sizes.layers if layer.recurrent)
    rows = min(rows, positions)
    widest = 4 * target.sizes.intermediate_size + 8 * target.hidden_size
    activations = rows * (2 * target.vocab_size + widest + 2 * target.sizes.layer.heads * positions)
    elements = 1.1 * weights + extra_heads * head + caches * positions + states + activations
    return int(elements * np.dtype(np.float32).itemsize)
