"""What this machine can build and run: one finding per capability, the missing piece named."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dflash_trt.config import data_folder
from dflash_trt.core.machine import installed_version
from dflash_trt.errors import DflashError, one_line
from dflash_trt.version import __version__

TRAIN_MODULES = {"torch": "torch", "modelopt": "nvidia-modelopt", "transformers": "transformers"}
SERVE_MODULES = ("tritonclient", "starlette", "uvicorn")


@dataclass(frozen=True, slots=True)
class Finding:
    """One capability: whether it is there, and with what or why not."""

    capability: str
    ready: bool
    detail: str


def examine() -> list[Finding]:
    """Every finding, in the order in which a user meets the capabilities."""
    return [
        Finding(
            "dflash-trt",
            True,
            f"{__version__} on Python {platform.python_version()}, {platform.system()} "
            f"{platform.machine()}, {os.cpu_count()} CPU cores",
        ),
        _check("demo pair", _demo_pair),
        _check("build graphs", _build_graphs),
        _check("run on the CPU", _run_on_cpu),
        _check("build TensorRT-RTX engines", _build_engines),
        _check("compile kernels", _compile_kernels),
        _check("serve models", _serve),
        _check("download checkpoints", _hub),
        _check("train the demo pair", _train),
        _check("NVIDIA GPU", _gpu),
    ]


def _check(capability: str, probe: Callable[[], str]) -> Finding:
    try:
        return Finding(capability, True, probe())
    except DflashError as error:
        return Finding(capability, False, error.message)
    except Exception as error:  # a broken installation is a finding, not a crash
        return Finding(capability, False, f"{type(error).__name__}: {one_line(error)}")


def _demo_pair() -> str:
    folder = data_folder("demo_pair")
    if not (folder / "target" / "config.json").is_file():
        raise DflashError("its files are missing from this installation", fix="reinstall")
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    return f"{size / 1e6:.1f} MB of weights"


def _build_graphs() -> str:
    import onnx

    from dflash_trt.graph.functions import OPSET

    newest = onnx.defs.onnx_opset_version()
    if newest < OPSET:
        raise DflashError(f"onnx {onnx.__version__} ends at opset {newest}, {OPSET} is needed")
    return f"onnx {onnx.__version__}, opset {OPSET}"


def _run_on_cpu() -> str:
    """Runs the attention function itself: an old ONNX Runtime fails here, not in a user's model."""
    import numpy as np
    import onnx
    import onnxruntime as ort

    from dflash_trt.graph.functions import IR_VERSION, OPSET, TRT_DOMAIN, attention_function

    function = attention_function("lower_right")
    model = onnx.parser.parse_model(
        f"""<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}, "{TRT_DOMAIN}": 1]>
        doctor (float[B, 1, S, 4] q, float[B, 1, M, 4] k, int32[B] lengths)
            => (float[B, 1, S, 4] y) {{
            y = {TRT_DOMAIN}.{function.name}:{function.overload}
                <causal_kind = "lower_right"> (q, k, k, "", "", lengths)
        }}"""
    )
    model.functions.append(function)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rows = np.ones((1, 1, 2, 4), np.float32)
    keys = np.ones((1, 1, 4, 4), np.float32)
    (attended,) = session.run(None, {"q": rows, "k": keys, "lengths": np.array([3], np.int32)})
    if not np.array_equal(attended, rows):
        raise DflashError("ONNX Runtime's attention gives a wrong result")
    return f"onnxruntime {ort.__version__}, float32 compute"


def _build_engines() -> str:
    from dflash_trt.backends.tensorrt.library import (
        TENSORRT_RTX,
        library_arches,
        load_library,
        make_logger,
    )

    trt = load_library()
    trt.Builder(make_logger(trt))
    return f"tensorrt_rtx {trt.__version__} for {', '.join(library_arches(TENSORRT_RTX))}"


def _compile_kernels() -> str:
    from dflash_plugins.compile import check_compiler

    from dflash_trt.kernels.arches import kernel_arches

    check_compiler()
    return f"triton {_version('triton')} (Triton language) for {', '.join(kernel_arches())}"


def _serve() -> str:
    from dflash_trt.serving.server.tritonserver import find_tritonserver

    server = find_tritonserver()
    missing = [name for name in SERVE_MODULES if find_spec(name) is None]
    if missing:
        raise DflashError(f"{', '.join(missing)} missing", fix="pip install 'dflash-trt[serve]'")
    source = (
        "tritonserver" if server.wheel is None else f"nvidia-pytriton {_version('nvidia-pytriton')}"
    )
    return f"{source}, tritonclient {_version('tritonclient')}"


def _hub() -> str:
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise DflashError("HF_HUB_OFFLINE is set", fix="pass local folders to `build`")
    return f"huggingface_hub {_version('huggingface_hub')} (the network itself is not tried)"


def _train() -> str:
    missing = [package for module, package in TRAIN_MODULES.items() if find_spec(module) is None]
    if missing:
        raise DflashError(f"{', '.join(missing)} missing", fix="pip install 'dflash-trt[train]'")
    return ", ".join(f"{package} {_version(package)}" for package in TRAIN_MODULES.values())


def _gpu() -> str:
    if not Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is None:
        raise DflashError("no driver on this machine; bundles for the CPU run anyway")
    from dflash_trt.hardware.device import Device

    device = Device()
    memory = f"{device.total_bytes / 1e9:.0f} GB, CUDA {device.driver_version}"
    device.close()
    return f"{device.name} ({device.arch}), {memory}; --gpu-check runs engines on it"


def _version(distribution: str) -> str:
    return installed_version(distribution) or "of unknown version"
