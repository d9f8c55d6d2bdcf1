"""How much memory there is, and how much a model takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.calibration import memory
from dflash_trt.checkpoints.target import read_target
from dflash_trt.quantization.linears import Algorithm
from tests.bundle.conftest import write_pair
from tests.quantization.running import quantize


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_quantised_weights_count_as_the_floats_they_become(
    tmp_path: Path, algorithm: Algorithm
) -> None:
    target = read_target(write_pair(tmp_path) / "target")
    exclude = ("*.down_proj",) if algorithm is Algorithm.NVFP4 else ()
    quantize(target, tmp_path / "q", algorithm, exclude=exclude)
    quantized = read_target(tmp_path / "q")
    wanted = memory.estimate_memory(target, None, 100, 100)
    assert memory.estimate_memory(quantized, None, 100, 100) == wanted
