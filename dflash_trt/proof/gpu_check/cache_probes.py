"""Probes of what passes leave in the KV caches, read from the device memory that is their input.

An output that aliases an input is a promise: TensorRT says nothing of it for plugins. So a row is
looked for where the next pass will read it, and held to the row that the CPU's executor cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from onnx import helper

from dflash_trt.backends.base import Int64Array, TargetGraph
from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.backends.tensorrt.run.executor import TensorRtExecutor
from dflash_trt.bundle.manifest import Manifest
from dflash_trt.errors import DflashError
from dflash_trt.graph.tensors import OWNERS, cache_layout
from dflash_trt.proof.gpu_check.calls import begin_anew, forward
from dflash_trt.proof.gpu_check.record import Probe, attempt

IN_PLACE = "caches are updated where they lie"
NEIGHBOURS = "no row that a sequence holds is written again"
DIRTY_PAGES = "what an earlier owner left in a page is not seen"

# Of rows of K and V through a few layers: bfloat16 makes about 0.02, E4M3's codes up to 0.1; a row
# that is not there is off by 1.
ROW_ERROR = 0.3


class CacheReader:
    """Reads and overwrites rows of an executor's caches on the device."""

    def __init__(self, gpu: TensorRtExecutor, manifest: Manifest) -> None:
        form, target, draft = manifest.graph_form, manifest.target.sizes, manifest.draft.sizes
        self._gpu = gpu
        self.shapes = cache_layout(form, target, draft).shapes()
        self._dtype = np.dtype(helper.tensor_dtype_to_np_dtype(form.cache_type))
        self._holds_codes = form.holds_codes
        widest = max(shape.head_dim for shape in self.shapes.values())
        self.buffer = gpu.device.allocate_host(widest * self._dtype.itemsize)

    def read(self, name: str, slot: int, position: int) -> bytes:
        """What the named cache holds of a position, [kv heads, D] as it lies there."""
        memory = self.buffer[: self.shapes[name].head_dim * self._dtype.itemsize]
        rows = []
        for address in self._gpu.caches.row_places(name, slot, position):
            self._gpu.device.download(memory, address)
            self._gpu.device.synchronize()
            rows.append(memory.tobytes())
        return b"".join(rows)

    def fill(self, name: str, slot: int, positions: range, byte: int) -> None:
        """Overwrites every byte of positions."""
        memory = self.buffer[: self.shapes[name].head_dim * self._dtype.itemsize]
        memory[...] = byte
        for position in positions:
            for address in self._gpu.caches.row_places(name, slot, position):
                self._gpu.device.upload(address, memory)
        self._gpu.device.synchronize()

    def error(self, cpu: OnnxRuntimeExecutor, name: str, slot: int, positions: range) -> float:
        """How far rows are from the CPU's, over the size of those.

        Codes count as multiples of the scale that suits them best: whether it is the checkpoint's,
        the logits tell.
        """
        expected = np.array([cpu.caches.read_row(name, slot, one) for one in positions], np.float64)
        codes = b"".join(self.read(name, slot, position) for position in positions)
        actual = np.frombuffer(codes, self._dtype).astype(np.float64)
        actual = actual.reshape(*expected.shape[:2], -1)[..., : expected.shape[2]]
        if self._holds_codes:
            actual *= (actual * expected).sum() / max(np.square(actual).sum(), 1e-30)
        return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@contextmanager
def _open_reader(gpu: TensorRtExecutor, manifest: Manifest) -> Iterator[CacheReader]:
    """Frees its buffer once nothing is under way, even if what was has failed."""
    reader = CacheReader(gpu, manifest)
    try:
        yield reader
    finally:
        with suppress(DflashError):
            gpu.device.synchronize()
        gpu.device.free_host(reader.buffer)


def run_cache_probes(
    gpu: TensorRtExecutor, cpu: OnnxRuntimeExecutor, manifest: Manifest, prompt: Int64Array
) -> Iterator[Probe]:
    """All probes of the caches; `prompt` [1,S] is longer than a block."""
    with _open_reader(gpu, manifest) as reader:
        yield from attempt(IN_PLACE, lambda: _probe_rows(gpu, cpu, reader, prompt))
        if gpu.limits.page_pool is not None:
            yield from attempt(DIRTY_PAGES, lambda: _probe_dirty_pages(gpu, reader, prompt))


def _probe_rows(
    gpu: TensorRtExecutor, cpu: OnnxRuntimeExecutor, reader: CacheReader, prompt: Int64Array
) -> Iterator[Probe]:
    """Both target graphs: a pass of a block's rows behind the first rows of `prompt`.

    All sequences but the last make it, so that batches are padded by an idle one, which runs in the
    last one's slot where caches are linear.
    """
    rows, slots = gpu.limits.block_size, gpu.limits.max_batch
    batch, start = max(1, slots - 1), prompt.shape[1] - rows
    ids = np.stack([np.roll(prompt[0, start:], slot) for slot in range(batch)])
    written, strays = dict[str, float](), list[str]()
    graphs: tuple[TargetGraph, ...] = ("target", "target_only")
    for graph in graphs:
        begin_anew(gpu, cpu)
        for executor in (gpu, cpu):
            for slot in range(slots):
                forward(executor, prompt[:, :start], [0], slot, graph=graph)
        # Rows behind what a sequence holds are scratch: those of a padded call may lie there.
        others = [(slot, at) for slot in range(batch) for at in (0, start - 1)]
        others += [(slot, at) for slot in range(batch, slots) for at in range(start)]
        names = [name for name in reader.shapes if name.startswith(OWNERS[graph])]
        before = {(name, *one): reader.read(name, *one) for name in names for one in others}
        for executor in (gpu, cpu):
            forward(executor, ids, [start] * batch, 0, graph=graph)
        for name in names:
            ends = range(start, start + rows)
            errors = [reader.error(cpu, name, slot, ends) for slot in range(batch)]
            written[f"{graph}: {name}"] = max(errors)
        strays += [
            f"{graph}: {name}, position {at} of slot {slot}"
            for (name, slot, at), was in before.items()
            if reader.read(name, slot, at) != was
        ]
    missed = [f"{name} ({error:.2f})" for name, error in written.items() if error > ROW_ERROR]
    yield Probe(
        IN_PLACE,
        not missed,
        f"rows of {len(written)} caches differ from the CPU's by {max(written.values()):.3f} of "
        "their size" + (f", not in place: {', '.join(missed[:4])}" if missed else ""),
        {"relative_errors": written, "bound": ROW_ERROR},
    )
    detail = f"all held rows are as before, but for {', '.join(strays[:4]) or 'none'}"
    yield Probe(NEIGHBOURS, not strays, detail)


def _probe_dirty_pages(gpu: TensorRtExecutor, reader: CacheReader, prompt: Int64Array) -> Probe:
    """Bytes of NaN in every row that a sequence has not written change nothing."""
    begin_anew(gpu)
    clean = forward(gpu, prompt, [0], 0)
    begin_anew(gpu)
    for name in reader.shapes:
        reader.fill(name, 0, range(min(2 * prompt.shape[1], gpu.limits.max_seq_len)), 0xFF)
    change = float(np.abs(forward(gpu, prompt, [0], 0) - clean).max())
    detail = f"with NaN in all rows that were not written, logits differ by {change:.3g}"
    return Probe(DIRTY_PAGES, change == 0, detail, {"change": change})
