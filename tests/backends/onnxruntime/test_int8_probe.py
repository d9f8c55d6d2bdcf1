"""What an int8 bundle rests on is tried on the processor that opens it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest

from dflash_trt.backends.onnxruntime import int8_probe
from dflash_trt.errors import DflashError
from tests.pairs import PairFactory

QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
PROBE = (
    "from dflash_trt.backends.onnxruntime.int8_probe import first_difference as f\n"
    "print([f(columns, rows, 1) for columns, rows in ((576, 96), (96, 33))])"
)


class OtherKernels(ort.InferenceSession):
    """A processor whose products of three rows and more are other ones."""

    def run(self, names: Any, feeds: Any, options: Any = None) -> Any:
        (y,) = super().run(names, feeds, options)
        return [y * (1 + 2**-20) if len(y) > 2 else y]


def test_a_processor_whose_kernels_differ_is_refused(
    make_pair: PairFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_pair(int8=["target", "draft"])
    folder.open().preload(["target", "draft", "target_only"])
    int8_probe.first_difference.cache_clear()
    monkeypatch.setattr(int8_probe.ort, "InferenceSession", OtherKernels)
    with pytest.raises(DflashError) as refused:
        folder.open().preload(["draft"])
    said = "gives a row of an eight-bit product, 64 → 64, other bits among 3 rows than alone"
    assert said in refused.value.what and "without --precision int8" in str(refused.value.fix)
    int8_probe.first_difference.cache_clear()


@pytest.mark.parametrize(("name", "value"), [("K", 1 << 40), ("N", 0), ("accuracy_level", 0)])
def test_a_product_that_nobody_builds_is_refused(
    make_pair: PairFactory, name: str, value: int
) -> None:
    folder = make_pair(int8=["target", "draft"]).bundle.folder
    model = onnx.load(folder / "draft.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    next(one for one in node.attribute if one.name == name).i = value
    with pytest.raises(DflashError, match="has a narrow product in a form that is not known"):
        int8_probe.check_products(model, folder, 1)


@pytest.mark.skipif(QEMU is None, reason="qemu-x86_64, which emulates AVX2, is not installed")
def test_avx2_keeps_bits_too() -> None:
    command = [str(QEMU), "-cpu", "Haswell", str(Path(sys.executable).resolve()), "-c", PROBE]
    found = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "[None, None]\n"
