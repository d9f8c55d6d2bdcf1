"""Builds a graph into an engine, straight into its file.

TensorRT-RTX builds for GPUs that are not there (rung 3). TensorRT builds for the one that is: its
own part below (no compute capability) has run against a stand-in only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import onnx
from dflash_plugins.operation import KernelCode

from dflash_trt.backends.kernel_calls import hand_over, hand_over_attention
from dflash_trt.backends.tensorrt.build.monitor import TOTAL_STEPS, make_monitor, make_writer
from dflash_trt.backends.tensorrt.build.network import check_network, summarize_network
from dflash_trt.backends.tensorrt.build.plugins import (
    operation_forms,
    plugin_arch,
    plugin_caches,
    raise_callback_failure,
    register_plugins,
)
from dflash_trt.backends.tensorrt.build.profiles import Profile, add_profile, profiles
from dflash_trt.backends.tensorrt.library import (
    TENSORRT_RTX,
    Library,
    RefusedError,
    library_arches,
    load_library,
    make_logger,
)
from dflash_trt.bundle.manifest import EngineFile
from dflash_trt.core.files import FileKind, find_file
from dflash_trt.core.limits import Limits
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GraphName, Owner
from dflash_trt.graph.caches import cache_head_dim
from dflash_trt.graph.caches.native import (
    FUSED_HEAD_DIMS,
    is_attended_by_kernel,
    is_decomposed,
)
from dflash_trt.graph.form import CPU_FORM, GraphForm, Precision
from dflash_trt.graph.gated_delta import ALIGNED_ELEMENTS
from dflash_trt.graph.gated_delta_groups import GROUPS
from dflash_trt.hardware.device import Device
from dflash_trt.hardware.gpus import Arch
from dflash_trt.hardware.kernels import HEAD_DIMS
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.pair_check import Pair
from dflash_trt.models.quantized_weights import quantized_linears
from dflash_trt.models.sizes import LayerSizes


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What engines to build, beyond the bundle's limits.

    With `plugins`, kernels of this project stand for the functions that they are written for, and
    the target's engines draw tokens themselves.
    """

    arch: Arch
    precision: Precision
    library: Library = TENSORRT_RTX
    plugins: bool = False

    @property
    def folder(self) -> str:
        """Where the engines lie in a bundle."""
        return f"engines/{self.library.executor}-{self.arch.name}"

    def form(self, caches: GraphForm = CPU_FORM) -> GraphForm:
        """The graphs that TensorRT wants: strongly typed, with caches as `caches` has them."""
        return replace(caches, precision=self.precision, draws=self.plugins)


def check_buildable(
    pair: Pair,
    options: EngineOptions,
    form: GraphForm,
    planned: Mapping[Owner, str] | None = None,
) -> None:
    """Refuses what cannot be built here: graphs of `form`, models as `planned` quantises them.

    Raises:
        DflashError: the library is missing or needs another GPU than the one here, or has no
            attention kernel for a head size or no quantised product on the architecture; plugins
            are asked for and cannot be compiled.
    """
    library, arch = options.library, options.arch
    load_library(library)
    if not library.is_rtx and (local := local_arch()) != arch.name:
        raise DflashError(
            f"{library.name} builds for the GPU that is here, {local}, not for {arch.name}",
            where="--arch",
            fix=f"build on a machine with one of {arch.devices}, or pass --arch {local}",
            usage=True,
        )
    if options.plugins:
        plugin_arch(arch.name)
    specs: dict[Owner, DecoderSpec] = {"target": pair.target, "draft": pair.draft}
    for owner, spec in specs.items():
        algorithms: set[str] = set(quantized_linears(spec.weights).values())
        if planned is not None and owner in planned:
            algorithms.add(planned[owner])
        for algorithm in sorted(algorithms):
            if algorithm.lower() not in arch.formats:
                known = library_arches(library).values()
                able = [one.name for one in known if algorithm.lower() in one.formats]
                raise DflashError(
                    f"the {owner} is quantised in {algorithm}, which {arch.name} cannot compute in",
                    where="--arch",
                    fix=f"{', '.join(able)} can; --executor cpu runs it anywhere",
                    usage=True,
                )
        for layer in spec.sizes.kinds:
            _check_layer(library, owner, layer, form, needs_room=spec.sizes.needs_sink_room)


def _check_layer(
    library: Library, owner: Owner, layer: LayerSizes, form: GraphForm, *, needs_room: bool
) -> None:
    """Attention has a kernel, or is written out; a slot's state begins where a tensor may."""
    size, room, cpu = layer.head_dim, "", "build with --executor cpu"
    if layer.recurrent is not None:
        if layer.recurrent.state_elements % ALIGNED_ELEMENTS:
            raise DflashError(
                f"the {owner}'s recurrent states of {layer.recurrent.state_elements} elements "
                f"fill no whole {ALIGNED_ELEMENTS}, as TensorRT's tensors do",
                fix=cpu,
            )
    elif form.has_kernel_caches:
        if size not in HEAD_DIMS:
            raise DflashError(
                f"the {owner}'s head size {size} has no kernel over paged or FP8 caches; "
                f"{', '.join(map(str, HEAD_DIMS))} have",
                fix="leave out --kv-layout and --kv-dtype, or build with --executor cpu",
                usage=True,
            )
    elif needs_room or not (is_decomposed(layer, form) or is_attended_by_kernel(layer, form)):
        if needs_room:
            size, room = cache_head_dim(size, needs_room, form), " with room for a sink"
        if size not in FUSED_HEAD_DIMS:
            raise DflashError(
                f"the {owner}'s head size {size}{room} has no fused "
                f"attention in {library.name}, which takes multiples of "
                f"{FUSED_HEAD_DIMS.step} from {FUSED_HEAD_DIMS.start} to {FUSED_HEAD_DIMS[-1]}",
                fix=cpu,
            )


def local_arch() -> str:
    """The architecture of the GPU that is here.

    Raises:
        DflashError: there is none.
    """
    device = Device()
    device.close()
    return device.arch


def library_version(library: Library) -> str:
    """The library's version, which an engine is bound to."""
    return str(load_library(library).__version__)


def build_engine(
    graph: GraphName,
    folder: Path,
    options: EngineOptions,
    limits: Limits,
    cache_length: int,
    progress: Progress,
) -> EngineFile:
    """Builds `folder`/GRAPH.onnx into an engine below `folder`, with a summary beside it.

    `cache_length` is M, the positions of a slot of its caches. Building takes memory of about 1.6
    times the weights, beside the weight files that it maps. Kernels are tried as machine code
    first: that TensorRT takes it is in its code, and not in its documentation.

    Raises:
        DflashError: the parser or builder refuses, or attention or caches would not be native.
        OSError: the file cannot be written.
    """
    refusals = []
    for code in get_args(KernelCode) if options.plugins else (None,):
        progress.stage(f"{graph} engine for {options.arch.name}", TOTAL_STEPS, "steps")
        try:
            return _build_with(code, graph, folder, options, limits, cache_length, progress)
        except RefusedError as error:
            refusals.append(error)
    raise refusals[0]


def _build_with(
    code: KernelCode | None,
    graph: GraphName,
    folder: Path,
    options: EngineOptions,
    limits: Limits,
    cache_length: int,
    progress: Progress,
) -> EngineFile:
    library, trt = options.library, load_library(options.library)
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    plugins: set[str] = set()
    if code is not None:
        plugins = register_plugins(library, trt, options.arch.name, code)
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    model_path = folder / f"{graph}.onnx"
    model = onnx.load(find_file(model_path, FileKind.GRAPH), load_external_data=False)
    handed = hand_over(model, plugins)
    if plugins:
        hand_over_attention(handed, limits.block_size, cache_length)
    # The path tells the parser where the weights are.
    if not parser.parse(handed.SerializeToString(), str(model_path)):
        raise_callback_failure()
        messages = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise RefusedError(library, "read it", f"{graph}.onnx", messages)
    summary, caches = summarize_network(trt, network), plugin_caches(handed, plugins)
    check_network(handed, summary, caches)

    path = folder / options.folder / f"{graph}.engine"
    path.parent.mkdir(parents=True, exist_ok=True)
    built = profiles(graph, limits, library)
    has_states = any(node.op_type == GROUPS for node in handed.graph.node)
    config = _configure(trt, builder, network, options, built, has_states=has_states)
    with path.open("wb") as file:
        writer = make_writer(trt, file)
        config.progress_monitor = monitor = make_monitor(trt, progress.advance)
        succeeded = builder.build_serialized_network_to_stream(network, config, writer)
        monitor.check()
        writer.check()
    raise_callback_failure()
    if not succeeded or path.stat().st_size == 0:
        raise RefusedError(library, "build it", f"{graph}.onnx", logger.errors)
    described = {
        "library": f"{library.module} {trt.__version__}",
        "arch": options.arch.name,
        "precision": options.precision.value,
        "kernel_code": code,
        "profiles": {one.name: {axis: [*span] for axis, span in one.axes.items()} for one in built},
        **asdict(summary),
    }
    summary_path = path.with_suffix(".json")
    summary_path.write_text(json.dumps(described, indent=2) + "\n", "utf-8")
    return EngineFile(
        graph=graph,
        path=path.relative_to(folder).as_posix(),
        summary=summary_path.relative_to(folder).as_posix(),
        layers=sum(summary.layers.values()),
        fused_attentions=len(summary.attentions),
        cache_updates=len(summary.cache_updates),
        quantized_products=dict(Counter(summary.quantized_products.values())),
        operations=operation_forms(handed, plugins),
        plugin_caches=caches,
    )


def _configure(
    trt: Any,
    builder: Any,
    network: Any,
    options: EngineOptions,
    wanted: list[Profile],
    *,
    has_states: bool,
) -> Any:
    config, arch = builder.create_builder_config(), options.arch
    if options.library.is_rtx:
        config.num_compute_capabilities = 1
        capability = getattr(trt.ComputeCapability, arch.tensorrt_rtx or "", None)
        if capability is None:
            raise DflashError(
                f"TensorRT-RTX {trt.__version__} does not build for {arch.name}", where="--arch"
            )
        config.set_compute_capability(capability, 0)
        # A step is captured into a CUDA graph, in which nothing may allocate.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if has_states:
        # A state is float32 because it sums up a whole text; TF32 has 10 bits of it.
        config.clear_flag(trt.BuilderFlag.TF32)
    if options.plugins:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    for profile in wanted:
        add_profile(builder, config, network, profile)
    return config
