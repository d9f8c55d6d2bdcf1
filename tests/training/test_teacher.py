"""Features of transformers in bfloat16 beside those of the served graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_trt.api import Checkpoints, build
from dflash_trt.replay import Replay
from dflash_trt.training.teacher import MOST_DIFFERENT, Teacher, difference
from tests.training.prompts import TARGET

pytestmark = pytest.mark.exhaustive
TAPS = (1, 8, 15, 22, 29)


def test_transformers_features_are_the_graphs_and_another_taps_are_not(tmp_path: Path) -> None:
    ids = list(range(2, 130))
    bundle = build("demo", tmp_path / "bundle", checkpoints=Checkpoints())
    teacher = Teacher(TARGET, TAPS, "cpu")
    with Replay(bundle) as replay:
        features = teacher.features(ids)
        assert features.shape == (128, 6 * 64) and features.dtype == np.float32
        assert difference(teacher, replay.features, ids) <= MOST_DIFFERENT
        shifted = Teacher(TARGET, tuple(tap + 1 for tap in TAPS), "cpu")
        assert difference(shifted, replay.features, ids) > 3 * MOST_DIFFERENT
