"""Builds a graph into an engine, straight into its file, for a GPU that need not be here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from dflash_trt.checkpoints.draft import DraftSpec
from dflash_trt.checkpoints.pair import Pair
from dflash_trt.checkpoints.quantized_weights import quantized_linears
from dflash_trt.checkpoints.target import TargetSpec
from dflash_trt.engines.arch import ARCHES, Arch
from dflash_trt.engines.library import load_library, make_logger, refused
from dflash_trt.engines.monitor import TOTAL_STEPS, make_monitor, make_writer
from dflash_trt.engines.network import NetworkSummary, check_network, summarize_network
from dflash_trt.engines.profiles import EngineLimits, Profile, add_profile, profiles
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.progress import Progress

# What TensorRT-RTX 1.7 has fused attention kernels for; the build itself has the last word.
HEAD_DIMS = range(16, 257, 8)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What engines to build, beyond the bundle's limits."""

    arch: Arch
    precision: Precision

    @property
    def folder(self) -> str:
        """Where the engines lie in a bundle."""
        return f"engines/tensorrt-rtx-{self.arch.name}"

    def form(self, limits: EngineLimits) -> GraphForm:
        """The graphs that TensorRT wants: strongly typed, with caches of a fixed length."""
        return GraphForm(self.precision, limits.cache_length)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """One engine: where it lies in the bundle, and what it was built from."""

    graph: GraphName
    path: str
    summary_path: str
    summary: NetworkSummary


def check_buildable(pair: Pair, arch: Arch) -> None:
    """Refuses what no engine can be built for.

    Raises:
        DflashError: TensorRT-RTX is missing, or has no attention kernel for a head size or no
            quantised product on `arch`.
    """
    load_library()
    specs: tuple[tuple[str, TargetSpec | DraftSpec], ...]
    specs = (("target", pair.target), ("draft", pair.draft))
    for owner, spec in specs:
        for algorithm in sorted(set(quantized_linears(spec.weights).values())):
            if algorithm not in arch.algorithms:
                able = [a.name for a in ARCHES.values() if algorithm in a.algorithms]
                raise DflashError(
                    f"the {owner} is quantised in {algorithm}, which {arch.name} cannot compute in",
                    where="--arch",
                    fix=f"{', '.join(able)} can; --executor cpu runs it anywhere",
                    usage=True,
                )
        if spec.head_dim not in HEAD_DIMS:
            raise DflashError(
                f"the {owner}'s head size {spec.head_dim} has no fused attention in TensorRT-RTX, "
                f"which takes multiples of {HEAD_DIMS.step} from {HEAD_DIMS.start} to "
                f"{HEAD_DIMS[-1]}",
                fix="build with --executor cpu",
            )


def library_version() -> str:
    """TensorRT-RTX's version, which an engine is bound to."""
    return str(load_library().__version__)


def build_engine(
    graph: GraphName,
    folder: Path,
    options: EngineOptions,
    limits: EngineLimits,
    progress: Progress,
) -> BuiltEngine:
    """Builds `folder`/GRAPH.onnx into an engine below `folder`, with a summary beside it.

    Memory: about 1.6 times the weights, beside the weight files that it maps; the engine goes to
    its file as it comes.

    Raises:
        DflashError: the parser or builder refuses, or attention or caches would not be native.
        OSError: the file cannot be written.
    """
    progress.stage(f"{graph} engine for {options.arch.name}", TOTAL_STEPS, "steps")
    trt = load_library()
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    strong = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(strong)
    parser = trt.OnnxParser(network, logger)
    model_path = folder / f"{graph}.onnx"
    if not parser.parse_from_file(str(model_path)):
        messages = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise refused("read", graph, messages)
    summary = summarize_network(network)
    check_network(onnx.load(model_path, load_external_data=False), summary)

    path = folder / options.folder / f"{graph}.engine"
    path.parent.mkdir(parents=True, exist_ok=True)
    built = profiles(graph, limits)
    monitor = make_monitor(trt, progress.advance)
    config = _configure(trt, builder, network, options.arch, built)
    config.progress_monitor = monitor
    with path.open("wb") as file:
        writer = make_writer(trt, file)
        succeeded = builder.build_serialized_network_to_stream(network, config, writer)
        monitor.check()
        writer.check()
    if not succeeded or path.stat().st_size == 0:
        raise refused("build", graph, logger.errors)
    summary_path = path.with_suffix(".json")
    described = _describe(summary, built, options, str(trt.__version__))
    summary_path.write_text(json.dumps(described, indent=2) + "\n", "utf-8")
    return BuiltEngine(
        graph,
        path.relative_to(folder).as_posix(),
        summary_path.relative_to(folder).as_posix(),
        summary,
    )


def _configure(trt: Any, builder: Any, network: Any, arch: Arch, wanted: list[Profile]) -> Any:
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    capability = getattr(trt.ComputeCapability, arch.capability, None)
    if capability is None:
        raise DflashError(
            f"TensorRT-RTX {trt.__version__} does not build for {arch.name}", where="--arch"
        )
    config.set_compute_capability(capability, 0)
    for profile in wanted:
        add_profile(builder, config, network, profile)
    return config


def _describe(
    summary: NetworkSummary, built: list[Profile], options: EngineOptions, version: str
) -> dict[str, Any]:
    return {
        "library": f"tensorrt_rtx {version}",
        "arch": options.arch.name,
        "precision": options.precision.value,
        "profiles": {
            profile.name: {
                axis: [span.low, span.usual, span.high] for axis, span in profile.axes.items()
            }
            for profile in built
        },
        **summary.to_json(),
    }
