"""Probes of what passes leave in the KV caches, read from the device memory that is their input.

An output that aliases an input is a promise: TensorRT says nothing of it for plugins. So a row is
looked for where the next pass will read it, and held to the row that the CPU's executor cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from onnx import helper

from dflash_trt.backends.base import FloatArray, Int64Array, TargetGraph
from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.backends.tensorrt.run.executor import TensorRtExecutor
from dflash_trt.checkpoints.decoder import DecoderSpec
from dflash_trt.checkpoints.pair import Pair
from dflash_trt.checkpoints.quantized_weights import read_kv_scales
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import KV, Owner, cache_input
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.tensors import OWNERS, CacheShape, cache_layout
from dflash_trt.proof.gpu_check.calls import begin_anew, forward
from dflash_trt.proof.gpu_check.probe import Probe, attempt

IN_PLACE = "caches are updated where they lie"
NEIGHBOURS = "no row that a sequence holds is written again"
DIRTY_PAGES = "what an earlier owner left in a page is not seen"

# Of rows of K and V through a few layers: bfloat16 makes about 0.02, E4M3's codes up to 0.1; a row
# that is not there is off by 1.
ROW_ERROR = 0.3


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What a bundle's caches hold.

    Args:
        shapes: of each cache by its graph input's name, wider than the model's where there is room
            for a sink.
        scales: what each cache's codes are multiples of; 1 where it holds values.
    """

    form: GraphForm
    shapes: Mapping[str, CacheShape]
    scales: Mapping[str, float]

    @classmethod
    def of(cls, pair: Pair, form: GraphForm) -> CacheFacts:
        layout = cache_layout(form, pair.target.sizes, pair.draft.sizes)
        scales = dict.fromkeys(layout.shapes(), 1.0)
        specs: dict[Owner, DecoderSpec] = {"target": pair.target, "draft": pair.draft}
        for owner, spec in specs.items():
            for layer in range(spec.num_layers if form.holds_codes else 0):
                found = read_kv_scales(
                    spec.checkpoint.tensors, spec.weights, spec.quantization, layer
                )
                scales |= {
                    cache_input(owner, kv, layer): scale
                    for kv, scale in zip(KV, found, strict=True)
                }
        return cls(form, layout.shapes(), scales)

    def of_graph(self, graph: TargetGraph) -> list[str]:
        """The caches that `graph` writes."""
        return [name for name in self.shapes if name.startswith(OWNERS[graph])]


class CacheReader:
    """Reads rows of an executor's caches from the device; close it to free its buffer."""

    def __init__(self, gpu: TensorRtExecutor, facts: CacheFacts) -> None:
        self._gpu, self._facts = gpu, facts
        self._dtype = np.dtype(helper.tensor_dtype_to_np_dtype(facts.form.cache_type))
        widest = max(shape.head_dim for shape in facts.shapes.values())
        self._buffer = gpu.device.allocate_host(widest * self._dtype.itemsize)

    def read(self, name: str, slot: int, position: int) -> FloatArray:
        """What the named cache holds of a position, [kv heads, D] in float32."""
        codes = np.frombuffer(self.read_bytes(name, slot, position), self._dtype)
        heads = self._facts.shapes[name].kv_heads
        return codes.reshape(heads, -1).astype(np.float32) * np.float32(self._facts.scales[name])

    def read_bytes(self, name: str, slot: int, position: int) -> bytes:
        """The same, as it lies there."""
        memory = self._buffer[: self._facts.shapes[name].head_dim * self._dtype.itemsize]
        rows = []
        for address in self._gpu.caches.row_places(name, slot, position):
            self._gpu.device.download(memory, address)
            self._gpu.device.synchronize()
            rows.append(memory.tobytes())
        return b"".join(rows)

    def fill(self, name: str, slot: int, positions: Iterable[int], byte: int) -> None:
        """Overwrites every byte of positions."""
        memory = self._buffer[: self._facts.shapes[name].head_dim * self._dtype.itemsize]
        memory[...] = byte
        for position in positions:
            for address in self._gpu.caches.row_places(name, slot, position):
                self._gpu.device.upload(address, memory)
        self._gpu.device.synchronize()

    def close(self) -> None:
        """Frees the buffer once nothing is under way, even if what was has failed."""
        with suppress(DflashError):
            self._gpu.device.synchronize()
        self._gpu.device.free_host(self._buffer)


def run_cache_probes(
    gpu: TensorRtExecutor, cpu: OnnxRuntimeExecutor, facts: CacheFacts, prompt: Int64Array
) -> Iterator[Probe]:
    """All probes of the caches; `prompt` [1,S] is longer than a block."""
    reader = CacheReader(gpu, facts)
    try:
        yield from attempt(IN_PLACE, lambda: _probe_rows(gpu, cpu, facts, reader, prompt))
        if gpu.limits.page_pool is not None:
            yield from attempt(DIRTY_PAGES, lambda: _probe_dirty_pages(gpu, facts, reader, prompt))
    finally:
        reader.close()


def _probe_rows(
    gpu: TensorRtExecutor,
    cpu: OnnxRuntimeExecutor,
    facts: CacheFacts,
    reader: CacheReader,
    prompt: Int64Array,
) -> Iterator[Probe]:
    """Both target graphs: a pass of a block's rows behind the first rows of `prompt`.

    All sequences but the last make it, so that batches are padded by an idle one, which runs in the
    last one's slot where caches are linear.
    """
    rows, slots = gpu.limits.block_size, gpu.limits.max_batch
    batch, start = max(1, slots - 1), prompt.shape[1] - rows
    ids = np.stack([np.roll(prompt[0, start:], slot) for slot in range(batch)])
    written, missed, strays = dict[str, float](), list[str](), list[str]()
    graphs: tuple[TargetGraph, ...] = ("target", "target_only")
    for graph in graphs:
        begin_anew(gpu, cpu)
        for executor in (gpu, cpu):
            for slot in range(slots):
                forward(executor, prompt[:, :start], [0], slot, graph=graph)
        # Rows behind what a sequence holds are scratch: those of a padded call may lie there.
        others = [(slot, at) for slot in range(batch) for at in (0, start - 1)]
        others += [(slot, at) for slot in range(batch, slots) for at in range(start)]
        names = facts.of_graph(graph)
        before = {(name, *one): reader.read_bytes(name, *one) for name in names for one in others}
        for executor in (gpu, cpu):
            forward(executor, ids, [start] * batch, 0, graph=graph)
        for name in names:
            error = max(
                _row_error(cpu, reader, name, slot, range(start, start + rows))
                for slot in range(batch)
            )
            written[f"{graph}: {name}"] = error
            missed += [f"{graph}: {name} ({error:.2f})"] * (error > ROW_ERROR)
            strays += [
                f"{graph}: {name}, position {at} of slot {slot}"
                for slot, at in others
                if reader.read_bytes(name, slot, at) != before[name, slot, at]
            ]
    worst = max(written.values())
    yield Probe(
        name=IN_PLACE,
        passed=not missed,
        detail=f"rows of {len(written)} caches differ from the CPU's by {worst:.3f} of their size"
        + (f", not in place: {', '.join(missed[:4])}" if missed else ""),
        figures={"relative_errors": written, "bound": ROW_ERROR},
    )
    yield Probe(
        name=NEIGHBOURS,
        passed=not strays,
        detail=f"all held rows are as before, but for {', '.join(strays[:4]) or 'none'}",
    )


def _row_error(
    cpu: OnnxRuntimeExecutor, reader: CacheReader, name: str, slot: int, positions: Iterable[int]
) -> float:
    """How far the rows are from the CPU's, over the length of those."""
    missing = size = 0.0
    for position in positions:
        expected = cpu.caches.read_row(name, slot, position)
        actual = reader.read(name, slot, position)[:, : expected.shape[1]]
        missing += float(np.square(actual - expected).sum(dtype=np.float64))
        size += float(np.square(expected).sum(dtype=np.float64))
    return float(np.sqrt(missing / size))


def _probe_dirty_pages(
    gpu: TensorRtExecutor, facts: CacheFacts, reader: CacheReader, prompt: Int64Array
) -> Probe:
    """Bytes of NaN in every row that a sequence has not written change nothing."""
    begin_anew(gpu)
    clean = forward(gpu, prompt, [0], 0)
    begin_anew(gpu)
    for name in facts.shapes:
        reader.fill(name, 0, range(min(2 * prompt.shape[1], gpu.limits.max_seq_len)), 0xFF)
    dirty = forward(gpu, prompt, [0], 0)
    change = float(np.abs(dirty - clean).max())
    return Probe(
        name=DIRTY_PAGES,
        passed=change == 0,
        detail=f"with NaN in all rows that were not written, logits differ by {change:.3g}",
        figures={"change": change},
    )
