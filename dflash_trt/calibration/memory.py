"""Whether a model fits into memory in float32, asked before it is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dflash_trt.checkpoints.draft import DraftSpec
from dflash_trt.checkpoints.quantized_weights import count_parameters
from dflash_trt.checkpoints.target import TargetSpec
from dflash_trt.errors import DflashError

MEMORY_FILE = Path("/proc/meminfo")
MEMBERSHIP_FILE = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
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
    rows = min(rows, positions)
    widest = 4 * target.sizes.intermediate_size + 8 * target.hidden_size
    activations = rows * (2 * target.vocab_size + widest + 2 * target.sizes.layer.heads * positions)
    elements = 1.1 * weights + extra_heads * head + caches * positions + activations
    return int(elements * np.dtype(np.float32).itemsize)


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    found = [left for left in (_system_memory(), _cgroup_memory()) if left is not None]
    return min(found, default=None)


def _system_memory() -> int | None:
    """MemAvailable: the whole machine's, even inside a container."""
    return _read_field(MEMORY_FILE, "MemAvailable:", unit=1 << 10)


def _cgroup_memory() -> int | None:
    """What the tightest cgroup (version 2) around this process has left; None without a limit."""
    try:
        membership = MEMBERSHIP_FILE.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    path = next((line.removeprefix("0::") for line in membership if line.startswith("0::")), None)
    if path is None:
        return None
    group = CGROUP_ROOT / path.lstrip("/")
    left = [
        _group_memory(one) for one in (group, *group.parents) if one.is_relative_to(CGROUP_ROOT)
    ]
    return min((one for one in left if one is not None), default=None)


def _group_memory(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # the root has neither file
        return None
    if not limit.isdecimal():  # "max"
        return None
    # memory.current counts the files that were read; those not in use give way at once.
    cached = _read_field(group / "memory.stat", "inactive_file", unit=1) or 0
    return max(0, int(limit) - used + cached)


def _read_field(path: Path, name: str, *, unit: int) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1]) * unit
    return None
