"""Runs a few tests, one of each kind of kernel, as on a CPU without AVX-512.

    python -m tests.without_avx512 tests/graph -x

They are marked `numeric`; arguments are pytest's. NumPy, OpenBLAS, PyTorch and oneDNN choose
their kernels when they are loaded, so the environment is set first and everything runs in a new
process. ONNX Runtime chooses by the CPU alone: it can't be told otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

KERNELS = {
    "OPENBLAS_CORETYPE": "Haswell",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""What OpenBLAS, PyTorch and the libraries below it read."""


def main(arguments: list[str]) -> int:
    """Pytest's exit code; 0 where this CPU has no AVX-512."""
    if "avx512" not in Path("/proc/cpuinfo").read_text():
        print("this CPU has no AVX-512: every run of the tests is without it")
        return 0
    config: Any = np.show_config(mode="dicts")
    found = [one for one in config["SIMD Extensions"].get("found", ()) if one.startswith("AVX512")]
    environment = os.environ | KERNELS | {"NPY_DISABLE_CPU_FEATURES": " ".join(found)}
    command = [sys.executable, "-m", "pytest", "-m", "numeric", *arguments]
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
