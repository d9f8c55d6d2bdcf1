"""Probes of what passes leave in the KV caches, read from the device memory that is their input.

An output that aliases an input is a promise: TensorRT says nothing of it for plugins. So a row is
looked for where the next pass will read it, and held to the row that the CPU's executor cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from onnx import helper

from dflash_trt.backends.base import TargetGraph
from dflash_trt.backends.tensorrt.run.executor import TensorRtExecutor
from dflash_trt.bundle.manifest import Manifest
from dflash_trt.errors import DflashError
from dflash_trt.graph.tensors import OWNERS, cache_layout
from dflash_trt.proof.gpu_check.calls import Bench, begin_anew, forward
from dflash_trt.proof.gpu_check.gpu_record import Found, Probe

IN_PLACE = "caches are updated where they lie"
NEIGHBOURS = "no row that a sequence holds is written again"
# Of rows of K and V through a few layers: bfloat16 makes about 0.02, E4M3's codes up to 0.1; a row
# that is not there is off by 1.
ROW_ERROR = 0.3


class _CacheReader:
    """Reads and overwrites rows of an executor's caches on the device."""

    def __init__(self, gpu: TensorRtExecutor, manifest: Manifest) -> None:
        form, target, draft = manifest.graph_form, manifest.target.sizes, manifest.draft.sizes
        self._gpu = gpu
        self.shapes = cache_layout(form, target, draft).of()
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

    def error(self, bench: Bench, name: str, slot: int, positions: range) -> float:
        """How far rows are from the CPU's, over the size of those.

        Codes count as multiples of the scale that suits them best: whether it is the checkpoint's,
        the logits tell.
        """
        rows = [bench.cpu.caches.read_row(name, slot, one) for one in positions]
        expected = np.array(rows, np.float64)
        codes = b"".join(self.read(name, slot, position) for position in positions)
        actual = np.frombuffer(codes, self._dtype).astype(np.float64)
        actual = actual.reshape(*expected.shape[:2], -1)[..., : expected.shape[2]]
        if self._holds_codes:
            actual *= (actual * expected).sum() / max(np.square(actual).sum(), 1e-30)
        return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@contextmanager
def _open_reader(bench: Bench) -> Iterator[_CacheReader]:
    """Frees its buffer once nothing is under way, even if what was has failed."""
    reader = _CacheReader(bench.gpu, bench.manifest)
    try:
        yield reader
    finally:
        with suppress(DflashError):
            bench.gpu.device.synchronize()
        bench.gpu.device.free_host(reader.buffer)


def probe_rows(bench: Bench) -> Iterator[Probe]:
    """Both target graphs: a pass of a block's rows behind the first rows of the prompt.

    All sequences but the last make it, so that batches are padded by an idle one, which runs in the
    last one's slot where caches are linear.
    """
    limits, prompt = bench.gpu.limits, bench.prompt
    rows, slots = limits.block_size, limits.max_batch
    batch, start = max(1, slots - 1), prompt.shape[1] - rows
    ids = np.stack([np.roll(prompt[0, start:], slot) for slot in range(batch)])
    # Rows behind what a sequence holds are scratch: those of a padded call may lie there.
    held = [(slot, at) for slot in range(batch) for at in (0, start - 1)]
    held += [(slot, at) for slot in range(batch, slots) for at in range(start)]
    written, strays = dict[str, float](), list[str]()
    graphs: tuple[TargetGraph, ...] = ("target", "target_only")
    with _open_reader(bench) as reader:
        for graph in graphs:
            begin_anew(bench.gpu, bench.cpu)
            for executor in (bench.gpu, bench.cpu):
                for slot in range(slots):
                    forward(executor, prompt[:, :start], [0], slot, graph=graph)
            names = [name for name in reader.shapes if name.startswith(OWNERS[graph])]
            before = {(name, *one): reader.read(name, *one) for name in names for one in held}
            for executor in (bench.gpu, bench.cpu):
                forward(executor, ids, [start] * batch, 0, graph=graph)
            ends = range(start, start + rows)
            for name in names:
                errors = [reader.error(bench, name, slot, ends) for slot in range(batch)]
                written[f"{graph}: {name}"] = max(errors)
            strays += [
                f"{graph}: {name}, position {at} of slot {slot}"
                for (name, slot, at), was in before.items()
                if reader.read(name, slot, at) != was
            ]
    missed = [f"{name} ({error:.2f})" for name, error in written.items() if error > ROW_ERROR]
    detail = f"rows of {len(written)} caches differ from the CPU's by {max(written.values()):.3f} "
    detail += "of their size" + (f", not in place: {', '.join(missed[:4])}" if missed else "")
    yield Probe(IN_PLACE, not missed, detail, {"relative_errors": written, "bound": ROW_ERROR})
    detail = f"all held rows are as before, but for {', '.join(strays[:4]) or 'none'}"
    yield Probe(NEIGHBOURS, not strays, detail)


def probe_dirty_pages(bench: Bench) -> Found:
    """Bytes of NaN in every row that a sequence has not written change nothing."""
    gpu, prompt = bench.gpu, bench.prompt
    begin_anew(gpu)
    clean = forward(gpu, prompt, [0], 0)
    begin_anew(gpu)
    with _open_reader(bench) as reader:
        for name in reader.shapes:
            reader.fill(name, 0, range(min(2 * prompt.shape[1], gpu.limits.max_seq_len)), 0xFF)
    change = float(np.abs(forward(gpu, prompt, [0], 0) - clean).max())
    detail = f"with NaN in all rows that were not written, logits differ by {change:.3g}"
    return change == 0, detail, {"change": change}
