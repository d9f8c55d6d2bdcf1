"""Block schedules as `tune` writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def write_schedule(path: Path, blocks: Sequence[tuple[int, int]], executor: str = "cpu") -> Path:
    """A schedule of (max_batch, block_size), measured on `executor`."""
    entries = [{"max_batch": batch, "block_size": block} for batch, block in blocks]
    record = {"schema_version": 1, "blocks": entries, "executor": executor}
    path.write_text(json.dumps(record), encoding="utf-8")
    return path
