"""Runs a few tests, one of each kind of kernel, as on a CPU without AVX-512.

    python -m tests.without_avx512 tests/graph -x

They are marked `numeric`; arguments are pytest's. NumPy, OpenBLAS, PyTorch and oneDNN choose
their kernels when they are loaded, so the environment is set first and everything runs in new
processes. ONNX Runtime chooses by the CPU alone: it can't be told otherwise, and what it may use
is printed.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dflash_trt  # noqa: F401  before ONNX Runtime: it switches that one's telemetry off

KERNELS = {
    "OPENBLAS_CORETYPE": "Haswell",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""What OpenBLAS, PyTorch and the libraries below it read."""


def numpy_features() -> list[str]:
    """The sets of AVX-512 instructions that this NumPy has kernels for and uses on this CPU."""
    import numpy as np

    config: Any = np.show_config(mode="dicts")
    return [one for one in config["SIMD Extensions"].get("found", ()) if one.startswith("AVX512")]


def openblas_core() -> str | None:
    """The CPU whose kernels NumPy's OpenBLAS took; None where NumPy has another BLAS."""
    import numpy as np

    np.ones((2, 2)) @ np.ones((2, 2))
    mapped = Path("/proc/self/maps").read_text().split()
    for path in sorted({word for word in mapped if "openblas" in Path(word).name}):
        library = ctypes.CDLL(path)
        for name in ("openblas_get_corename64_", "openblas_get_corename"):
            if hasattr(library, name):
                get = getattr(library, name)
                get.restype = ctypes.c_char_p
                core: bytes = get()
                return core.decode()
    return None


def cpu_flags() -> set[str]:
    """Linux's names of what the CPU can do."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((set(one.split()) for one in lines if one.startswith("flags")), set())


def report() -> int:
    """Prints what each library uses; 1 where NumPy or OpenBLAS still uses AVX-512, else 0."""
    import numpy as np
    import onnxruntime as ort

    features, core = numpy_features(), openblas_core()
    offered = sorted(flag for flag in cpu_flags() if flag.startswith(("avx512", "amx")))
    print(f"NumPy {np.__version__}: {', '.join(features) or 'no AVX-512'}")
    print(f"OpenBLAS: kernels for {core or 'unknown, no OpenBLAS is loaded'}")
    print(
        f"ONNX Runtime {ort.__version__}: chooses by the CPU, which has "
        f"{', '.join(offered) or 'no AVX-512'}"
    )
    is_haswell = core in (None, "Haswell", "Zen")  # Zen's kernels are Haswell's
    return int(bool(features) or not is_haswell)


def main(arguments: list[str]) -> int:
    """Pytest's exit code, or 1 where AVX-512 could not be switched off; 0 where there is none."""
    environment = os.environ | KERNELS
    if features := numpy_features():
        environment["NPY_DISABLE_CPU_FEATURES"] = " ".join(features)
    python = [sys.executable, "-m"]
    if subprocess.run([*python, __spec__.name, "--report"], env=environment).returncode:
        print("AVX-512 could not be switched off", file=sys.stderr)
        return 1
    if not any(flag.startswith("avx512") for flag in cpu_flags()):
        print("this CPU has no AVX-512: every run of the tests is without it")
        return 0
    command = [*python, "pytest", "-m", "numeric", *arguments]
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(report() if sys.argv[1:] == ["--report"] else main(sys.argv[1:]))
