"""What this machine can build and run: one finding per capability, the missing piece named."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from dflash_trt.core.machine import installed_version, int8_kernels
from dflash_trt.errors import DflashError, install_extra, one_line
from dflash_trt.hardware.chosen_gpu import Card, find_card
from dflash_trt.hardware.device import driver_cuda, has_driver
from dflash_trt.models.build_config import data_folder
from dflash_trt.version import __version__

TRAIN_MODULES = {"torch": "torch", "modelopt": "nvidia-modelopt", "transformers": "transformers"}
CUDA_13_WHEELS = ("tensorrt_rtx_cu13", "tensorrt_cu13")
SERVE_MODULES = ("tritonclient", "starlette", "uvicorn")


@dataclass(frozen=True, slots=True)
class Finding:
    """One capability: whether it is there, and with what or why not."""

    capability: str
    ready: bool
    detail: str


def examine() -> list[Finding]:
    """Every finding, in the order in which a user meets the capabilities; the GPU's come last."""
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
        _check("run --precision int8", _run_in_int8),
        _check("build TensorRT-RTX engines", _build_rtx_engines),
        _check("build TensorRT engines", _build_engines),
        _check("run with PyTorch", _run_with_torch),
        _check("compile kernels", _compile_kernels),
        _check("serve models", _serve),
        _check("download checkpoints", _hub),
        _check("import GGUF files", _gguf),
        _check("train the demo pair", _train),
        _check("run TensorRT-LLM deployments", _tensorrt_llm),
        *_on_gpu(),
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


def _run_in_int8() -> str:
    """Tries a product, as every bundle's are when it is opened."""
    from dflash_trt.backends.onnxruntime.int8_probe import first_difference

    kernels, is_tested = int8_kernels()
    if (count := first_difference(1536, 96)) is not None:
        what = f"with {kernels} a row has other bits among {count} rows than alone"
        raise DflashError(what, fix="build without --precision int8")
    tested = "" if is_tested else "; no test of this project has run on such kernels"
    return f"{kernels}: rows have the same bits alone and among others{tested}"


def _build_rtx_engines() -> str:
    from dflash_trt.backends.tensorrt.library import (
        TENSORRT_RTX,
        library_arches,
        load_library,
        make_logger,
    )

    trt = load_library()
    trt.Builder(make_logger(trt))
    return f"tensorrt_rtx {trt.__version__} for {', '.join(library_arches(TENSORRT_RTX))}"


def _build_engines() -> str:
    from dflash_trt.backends.tensorrt.library import TENSORRT, load_library

    return f"tensorrt {load_library(TENSORRT).__version__}, for the GPU of the machine it is on"


def _run_with_torch() -> str:
    from dflash_trt.backends.registry import check_torch

    return check_torch()


def _compile_kernels() -> str:
    from dflash_plugins.compile import check_compiler

    from dflash_trt.hardware.kernels import kernel_arches

    check_compiler()
    return f"triton {_version('triton')} (Triton language) for {', '.join(kernel_arches())}"


def _serve() -> str:
    from dflash_trt.serving.server.tritonserver import find_tritonserver

    server = find_tritonserver()
    missing = [name for name in SERVE_MODULES if find_spec(name) is None]
    if missing:
        raise DflashError(f"{', '.join(missing)} missing", fix=install_extra("serve"))
    source = (
        "tritonserver" if server.wheel is None else f"nvidia-pytriton {_version('nvidia-pytriton')}"
    )
    return f"{source}, tritonclient {_version('tritonclient')}"


def _hub() -> str:
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise DflashError("HF_HUB_OFFLINE is set", fix="pass local folders to `build`")
    return f"huggingface_hub {_version('huggingface_hub')} (the network itself is not tried)"


def _gguf() -> str:
    from dflash_trt.building.gguf.gguf_file import gguf_package

    gguf_package()
    return f"gguf {_version('gguf')}"


def _train() -> str:
    missing = [package for module, package in TRAIN_MODULES.items() if find_spec(module) is None]
    if missing:
        raise DflashError(f"{', '.join(missing)} missing", fix=install_extra("train"))
    return ", ".join(f"{package} {_version(package)}" for package in TRAIN_MODULES.values())


def _tensorrt_llm() -> str:
    from dflash_trt.deploy.trtllm.versions import VERSIONS

    version = installed_version("tensorrt_llm")
    if version not in VERSIONS:
        found = "is not installed" if version is None else f"{version} is installed"
        raise DflashError(
            f"tensorrt_llm {found}; deployments are written without it, for {', '.join(VERSIONS)}",
            fix="serve from NVIDIA's container; the extra trtllm brings what measures them",
        )
    return f"tensorrt_llm {version}; deployments have not been run by this project"


def _on_gpu() -> Iterator[Finding]:
    """The GPU, and what of this project could run on it."""
    from dflash_trt.building.on_gpu import NEVER_RUN, capabilities

    found: list[Card] = []

    def gpu() -> str:
        old = _old_driver()
        try:
            card = find_card()
        except DflashError as error:
            raise old or error from error
        found.append(card)  # what TensorRT-LLM can do there does not depend on our packages
        if old is not None:
            raise old
        count = "" if card.found == 1 else f", the first of {card.found}"
        return (
            f"{card.title} ({card.arch}){count}, {card.memory_bytes / 1e9:.0f} GB, CUDA "
            f"{'{}.{}'.format(*driver_cuda())}; {NEVER_RUN}; `targets --gpu here` says which pairs "
            "fit, --gpu-check runs them"
        )

    yield _check("NVIDIA GPU", gpu)
    for card in found:
        for one in capabilities(card):
            yield Finding(f"GPU: {one.part}", one.able, one.detail)


def _old_driver() -> DflashError | None:
    """What a driver is too old for that is installed here; None where it is not.

    Raises:
        DflashError: there is no driver.
    """
    if not has_driver():
        raise DflashError(
            "no driver on this machine; bundles for the CPU run anyway",
            fix="`dflash-trt targets --gpu h100`, say, tells what would run on a GPU elsewhere",
        )
    supported, needs = driver_cuda(), dict[str, tuple[int, int]]()
    python = installed_version("cuda-python")
    if python is not None:
        needs[f"cuda-python {python}"] = int(python.partition(".")[0]), 0
    needs |= {name: (13, 0) for name in CUDA_13_WHEELS if installed_version(name) is not None}
    lacking = [
        f"{name} needs {'{}.{}'.format(*cuda)}" for name, cuda in needs.items() if cuda > supported
    ]
    if not lacking:
        return None
    what = "the driver supports CUDA {}.{}".format(*supported)
    return DflashError(f"{what}, but {', '.join(lacking)}", fix="install a newer driver")


def _version(distribution: str) -> str:
    return installed_version(distribution) or "of unknown version"
