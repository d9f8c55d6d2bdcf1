"""Which back end runs a bundle; its library is imported when one is opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from dflash_trt.backends.base import Executor, ExecutorLimits
from dflash_trt.backends.tensorrt.library import TORCH
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.bundle.memory.cache_bytes import state_copies
from dflash_trt.errors import import_extra
from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.form import CPU_FORM, GraphForm
from dflash_trt.graph.tensors import cache_layout


def check_runnable(bundle: Bundle) -> None:
    """Raises DflashError when this machine cannot run the bundle; loads nothing of it."""
    if bundle.manifest.executor == TORCH:
        check_torch(bundle.manifest.graph_form)
    if bundle.manifest.engines is not None:
        from dflash_trt.backends.tensorrt.run.open_engines import open_device

        open_device(bundle).close()


def check_torch(form: GraphForm = CPU_FORM) -> str:
    """What PyTorch runs graphs of `form` on here.

    Raises:
        DflashError: PyTorch is missing, the GPU is too old, or kernels cannot be compiled for it.
    """
    version = import_extra("torch", TORCH, "--executor torch").__version__
    from dflash_trt.backends.torch.open_torch import open_place

    device, _ = open_place(has_kernels=form.has_kernels)
    device.close()
    return f"torch {version} on {device.name}"


def executor_limits(bundle: Bundle) -> ExecutorLimits:
    """Those of the executor that `open_executor` opens; loads nothing."""
    manifest = bundle.manifest
    target = manifest.target
    return ExecutorLimits(
        **asdict(manifest.limits),
        vocab_size=target.vocab_size,
        mask_token_id=manifest.draft.mask_token_id,
        takes_any_chunk=manifest.is_on_cpu,
        page_pool=manifest.page_pool,
        draws=manifest.draws,
        longest=manifest.longest,
        drafts_end=manifest.drafts_end,
        has_state=target.sizes.has_state,
        state_copies=state_copies(target.sizes, manifest.limits, manifest.page_pool),
    )


def open_executor(
    bundle: Bundle, *, threads: int | None = None, graphs: Iterable[GraphName] = ()
) -> Executor:
    """The executor that the bundle was built for.

    `threads` bounds a CPU executor's intra-op threads; None leaves it to the library. `graphs`
    are opened now, the others when they are first used.

    Raises:
        DflashError: this machine cannot run the bundle, or a file is not what the manifest says.
    """
    manifest, limits = bundle.manifest, executor_limits(bundle)
    layout = cache_layout(manifest.graph_form, manifest.target.sizes, manifest.draft.sizes)
    # Imported here: a command needs one library or the other, or only reads a bundle.
    if manifest.engines is not None:
        from dflash_trt.backends.tensorrt.run.open_engines import open_engines

        return open_engines(bundle, limits, layout, graphs)
    if manifest.executor == TORCH:
        import_extra("torch", TORCH, "running the bundle")
        from dflash_trt.backends.torch.open_torch import open_programs

        return open_programs(bundle.folder, manifest.graph_form, limits, layout, graphs, threads)
    from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor

    executor = OnnxRuntimeExecutor(bundle.folder, limits, layout, threads=threads)
    executor.preload(graphs)
    return executor
