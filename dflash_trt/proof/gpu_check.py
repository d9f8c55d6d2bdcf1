"""`doctor --gpu-check`: the demo pair's engines built, run and probed on this machine's GPU.

Its record moves a feature from rung 3 (built) to rung 5 (run), so it holds all that is needed to
read it: machine, versions, date and every figure.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash_trt.backends.registry import open_executor
from dflash_trt.backends.tensorrt.build.builder import EngineOptions
from dflash_trt.backends.tensorrt.build.plugins import plugin_arch
from dflash_trt.backends.tensorrt.library import LIBRARIES, Library, load_library
from dflash_trt.backends.tensorrt.run.executor import TensorRtExecutor
from dflash_trt.bundle.build import BuildOptions, build_bundle
from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.target import read_target
from dflash_trt.config import load_config, resolve_file
from dflash_trt.core.machine import describe_host
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError, one_line
from dflash_trt.graph.form import Precision
from dflash_trt.hardware.device import Device
from dflash_trt.hardware.gpus import Arch
from dflash_trt.proof.gpu_probes import Probe, run_probes
from dflash_trt.runtime import Request
from dflash_trt.text.prompts import read_prompts

TARGET = "demo"
PRECISION = Precision.BFLOAT16
PROMPTS = 4
MAX_TOKENS = 64
RECORDED = ("dflash-trt", "numpy", "onnx", "onnxruntime", "cuda-python")


def check_gpu(progress: Progress) -> dict[str, Any]:
    """Builds and probes with every library that is installed; the record, ready for JSON.

    `passed` is False when a probe failed, or when nothing could be built.

    Raises:
        DflashError: there is no GPU, or neither library is installed.
    """
    device = Device()
    machine = {"gpu": device.describe(), **describe_host(RECORDED)}
    device.close()
    arch = Arch(
        name=device.arch,
        devices=device.name,
        largest_bytes=device.total_bytes,
        tensorrt_rtx="CURRENT",
    )
    runs = [
        _check_library(library, arch, progress, plugins=plugins)
        for library in installed_libraries()
        for plugins in ((False, True) if _takes_plugins(library, arch) else (False,))
    ]
    return {
        "name": "gpu-check",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "dflash-trt doctor --gpu-check",
        "machine": machine,
        "pair": TARGET,
        "precision": PRECISION.value,
        "passed": all(
            run["error"] is None and all(probe["passed"] is not False for probe in run["probes"])
            for run in runs
        ),
        "runs": runs,
    }


def describe(record: dict[str, Any]) -> list[str]:
    """The record as lines for a terminal."""
    gpu = record["machine"]["gpu"]
    lines = [f"{gpu['name']} ({gpu['arch']}), {gpu['memory_gb']} GB, CUDA {gpu['driver_cuda']}"]
    marks = {True: "yes", False: "no ", None: "   "}
    for run in record["runs"]:
        plugins = ", plugins" if run["plugins"] else ""
        lines.append(f"{run['library']} {run['version']}, {record['precision']}{plugins}")
        if run["error"] is not None:
            lines.append(f"  no   {run['error']}")
        for probe in run["probes"]:
            lines.append(f"  {marks[probe['passed']]}  {probe['name']}: {probe['detail']}")
    return lines


def installed_libraries() -> list[Library]:
    """The libraries that can be imported; raises the first one's error when none can."""
    found, errors = [], []
    for library in LIBRARIES.values():
        try:
            load_library(library)
            found.append(library)
        except DflashError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def _takes_plugins(library: Library, arch: Arch) -> bool:
    """Whether this project's kernels can be compiled here for `arch`, and `library` takes them."""
    if library.is_rtx:
        return False
    try:
        plugin_arch(arch.name)
    except DflashError:
        return False
    return True


def _check_library(
    library: Library, arch: Arch, progress: Progress, *, plugins: bool
) -> dict[str, Any]:
    """One library's probes; an error ends them and is part of the record."""
    probes: list[Probe] = []
    error = None
    with tempfile.TemporaryDirectory(prefix="dflash-trt-") as folder:
        try:
            engines = EngineOptions(arch, PRECISION, library, plugins=plugins)
            cpu_bundle = _build(Path(folder) / "cpu", None, progress)
            gpu_bundle = _build(Path(folder) / "gpu", engines, progress)
            progress.stage(f"probes of {library.name}", None)
            for probe in _probe(gpu_bundle, cpu_bundle):
                probes.append(probe)
        except DflashError as failure:
            error = failure.message
        except Exception as failure:  # what a library does here for the first time is a finding
            error = f"{type(failure).__name__}: {one_line(failure)}"
    return {
        "library": library.name,
        "version": str(load_library(library).__version__),
        "plugins": plugins,
        "error": error,
        "probes": [asdict(probe) for probe in probes],
    }


def _build(folder: Path, engines: EngineOptions | None, progress: Progress) -> Bundle:
    config, path = load_config(TARGET)
    target, draft = (
        resolve_file(source.checkpoint, path) for source in (config.target, config.draft)
    )
    pair = check_pair(read_target(target), read_draft(draft))
    assert config.prompts is not None
    prompts = resolve_file(config.prompts, path)
    options = BuildOptions(engines=engines)
    build_bundle(pair, config, path.stem, folder, options, progress, prompts=prompts)
    return open_bundle(folder)


def _probe(gpu_bundle: Bundle, cpu_bundle: Bundle) -> Iterator[Probe]:
    tokenizer = load_tokenizer(cpu_bundle)
    assert cpu_bundle.prompts is not None
    requests = [
        Request(prompt_ids=tuple(tokenizer.encode(text)), max_tokens=MAX_TOKENS)
        for text in read_prompts(cpu_bundle.prompts)[:PROMPTS]
    ]
    with closing(open_executor(cpu_bundle)) as cpu, closing(open_executor(gpu_bundle)) as gpu:
        assert isinstance(gpu, TensorRtExecutor)
        yield from run_probes(gpu, cpu, requests, gpu_bundle.manifest.limits.prefill_chunk)
