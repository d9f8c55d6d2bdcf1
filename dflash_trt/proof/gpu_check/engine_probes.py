"""Probes of a pair's engines: what passes compute, and what they leave in the KV caches.

The CPU executor's float32 logits are the reference, from which a narrow engine differs by rounding.
An output that aliases an input is a promise: TensorRT says nothing of it for plugins. So a cache's
row is looked for where the next pass will read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from onnx import helper

from dflash_trt.backends.base import (
    Executor,
    FloatArray,
    Int64Array,
    Scores,
    StepCall,
    TargetCall,
    TargetGraph,
    hold_positions,
)
from dflash_trt.backends.device.executor import DeviceExecutor
from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.bundle.manifest import Manifest
from dflash_trt.decoding import Generator, GeneratorOptions, Request, SamplingParams
from dflash_trt.decoding.scores import sampling_input
from dflash_trt.graph.tensors import OWNERS, cache_layout
from dflash_trt.proof.gpu_check.gpu_record import Probe
from dflash_trt.proof.gpu_check.runner import Found
from dflash_trt.proof.verification import Mode, verify
from dflash_trt.sampling.choice import choose_tokens

IN_PLACE = "caches are updated where they lie"
NEIGHBOURS = "no row that a sequence holds is written again"
DIRTY = "what an earlier owner left in a page is not seen"
CHANGING = "calls of changing shape give the CPU's logits"
DRAFTS = "drafts are mostly the CPU's"
DRIFT = "changes of shape keep no memory"

# Of rows of K and V through a few layers: bfloat16 makes about 0.02, E4M3's codes up to 0.1; a row
# that is not there is off by 1.
ROW_ERROR = 0.3
CALLS = 40
CHANGES = 1000
SIZES, SAMPLES = 24, 10
# A row is off where a logit differs by more of the logits' spread. Of another sequence, position or
# mask it differs by 4. Rounding to bfloat16 makes about 0.05; over FP8 caches it moves some values
# to the next code, which makes up to 0.4.
ROW_OFF, ROW_OFF_FP8 = 0.4, 1.0
DRAFTS_AGREE = 0.5
# A module of 64 KiB kept at each change would take more; other processes may come and go.
DRIFT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Bench:
    """A pair's engines, whose `manifest` it is, its graphs on the CPU, and what is generated."""

    gpu: DeviceExecutor
    cpu: OnnxRuntimeExecutor
    manifest: Manifest
    requests: Sequence[Request]

    @property
    def prompt(self) -> Int64Array:
        """[1,S], longer than a block and so short that a block has room behind it."""
        limits, ids = self.gpu.limits, self.requests[0].prompt_ids
        most = min(limits.prefill_chunk, limits.max_seq_len - limits.block_size)
        rows = min(max(len(ids), 3 * limits.block_size), most)
        return np.resize(np.array(ids, np.int64), (1, rows))

    def random_ids(self, batch: int, rows: int) -> Int64Array:
        """The same [batch,rows] at every call."""
        return np.random.default_rng(1).integers(0, self.gpu.limits.vocab_size, (batch, rows))


Find = Callable[[Bench], Found | Iterator[Probe]]


def choose_probes(gpu: DeviceExecutor) -> dict[str, Find]:
    """The probes that suit the engines, by what holds if they pass, each after its conditions."""
    draws = gpu.limits.draws
    table: list[tuple[str, Find, bool]] = [
        (IN_PLACE, probe_rows, True),
        (DIRTY, probe_dirty_pages, gpu.limits.page_pool is not None),
        (CHANGING, probe_calls, True),
        (DRAFTS, probe_drafts, True),
        (DRIFT, probe_drift, True),
        ("tokens are the CPU's", probe_tokens, True),
        ("CUDA graphs replay the step", probe_graphs, True),
        ("slots move", probe_move, True),
        ("engines draw what the runtime would", probe_drawing, draws),
        ("looking ahead changes no token", probe_unrecorded, draws),
        ("candidates draw what whole rows draw", probe_unrecorded, not draws),
    ]
    return {name: find for name, find, is_asked in table if is_asked}


def begin_anew(*executors: Executor) -> None:
    """Empties all slots; where caches are paged, each slot gets pages for a full sequence."""
    for executor in executors:
        executor.release_slots(0)
        hold_positions(executor, executor.limits.max_seq_len, executor.limits.max_batch)


def forward(
    executor: Executor,
    ids: Int64Array,
    starts: Sequence[int],
    slot: int,
    rows: int = 1,
    graph: TargetGraph = "target",
) -> FloatArray:
    """Logits [B,rows,V] of the last `rows` rows of ids [B,S], in the slots from `slot` on."""
    picked = np.tile(np.arange(ids.shape[1] - rows, ids.shape[1]), (len(ids), 1))
    sampling = sampling_input(executor.limits, [SamplingParams()] * len(ids))
    call = TargetCall(graph, slot, ids, np.array(starts), picked, Scores.LOGITS, sampling)
    output = executor.forward(call)
    assert output.logits is not None
    return output.logits.copy()


def make_step(executor: Executor, anchors: Int64Array, starts: Int64Array) -> StepCall:
    """A greedy step of the largest block, in the slots from 0 on."""
    sampling = sampling_input(executor.limits, [SamplingParams()] * len(anchors))
    return StepCall(0, anchors, starts, executor.limits.block_size, sampling=sampling)


class _CacheReader:
    """Reads and overwrites rows of an executor's caches on the device."""

    def __init__(self, bench: Bench) -> None:
        form = bench.manifest.graph_form
        target, draft = bench.manifest.target.sizes, bench.manifest.draft.sizes
        self._bench, self._device = bench, bench.gpu.device
        self.shapes = cache_layout(form, target, draft).of()
        self._dtype = np.dtype(helper.tensor_dtype_to_np_dtype(form.cache_type))
        widest = max(shape.head_dim for shape in self.shapes.values())
        self._buffer = self._device.allocate_host(widest * self._dtype.itemsize)

    def read(self, name: str, slot: int, position: int) -> bytes:
        """What the named cache holds of a position, [kv heads, D] as it lies there."""
        memory = self._buffer[: self.shapes[name].head_dim * self._dtype.itemsize]
        rows = []
        for address in self._bench.gpu.caches.row_places(name, slot, position):
            self._device.download(memory, address)
            self._device.synchronize()
            rows.append(memory.tobytes())
        return b"".join(rows)

    def fill(self, name: str, positions: range, byte: int) -> None:
        """Overwrites every byte of positions of the first slot."""
        memory = self._buffer[: self.shapes[name].head_dim * self._dtype.itemsize]
        memory[...] = byte
        for position in positions:
            for address in self._bench.gpu.caches.row_places(name, 0, position):
                self._device.upload(address, memory)
        self._device.synchronize()

    def error(self, name: str, slot: int, positions: range) -> float:
        """How far rows are from the CPU's, over the size of those.

        Codes count as multiples of the scale that suits them best: whether it is the checkpoint's,
        the logits tell.
        """
        rows = [self._bench.cpu.caches.read_row(name, slot, one) for one in positions]
        expected = np.array(rows, np.float64)
        codes = b"".join(self.read(name, slot, position) for position in positions)
        actual = np.frombuffer(codes, self._dtype).astype(np.float64)
        actual = actual.reshape(*expected.shape[:2], -1)[..., : expected.shape[2]]
        if self._bench.manifest.graph_form.holds_codes:
            actual *= (actual * expected).sum() / max(np.square(actual).sum(), 1e-30)
        return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def probe_rows(bench: Bench) -> Iterator[Probe]:
    """Both target graphs: a pass of a block's rows behind the first rows of the prompt.

    All sequences but the last make it, so that batches are padded by an idle one, which runs in the
    last one's slot where caches are linear.
    """
    limits, prompt, reader = bench.gpu.limits, bench.prompt, _CacheReader(bench)
    rows, slots = limits.block_size, limits.max_batch
    batch, start = max(1, slots - 1), prompt.shape[1] - rows
    ids = np.stack([np.roll(prompt[0, start:], slot) for slot in range(batch)])
    # Rows behind what a sequence holds are scratch: those of a padded call may lie there.
    held = [(slot, at) for slot in range(batch) for at in (0, start - 1)]
    held += [(slot, at) for slot in range(batch, slots) for at in range(start)]
    written, strays = dict[str, float](), list[str]()
    graphs: tuple[TargetGraph, ...] = ("target", "target_only")
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
            errors = [reader.error(name, slot, ends) for slot in range(batch)]
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
    gpu, prompt, reader = bench.gpu, bench.prompt, _CacheReader(bench)
    begin_anew(gpu)
    clean = forward(gpu, prompt, [0], 0)
    begin_anew(gpu)
    for name in reader.shapes:
        reader.fill(name, range(min(2 * prompt.shape[1], gpu.limits.max_seq_len)), 0xFF)
    change = float(np.abs(forward(gpu, prompt, [0], 0) - clean).max())
    return change == 0, f"with NaN in rows that were not written, logits differ by {change:.3g}"


def probe_calls(bench: Bench) -> Found:
    """Random calls one after another: batches, rows, first slots and lengths of all sizes."""
    gpu, cpu, limits = bench.gpu, bench.cpu, bench.gpu.limits
    bound = ROW_OFF_FP8 if bench.manifest.graph_form.is_fp8 else ROW_OFF
    generator = np.random.default_rng(0)
    begin_anew(gpu, cpu)
    held = np.zeros(limits.max_batch, np.int64)
    errors: list[float] = []
    wrong: list[str] = []
    for number in range(CALLS):
        is_chunk = number % 4 == 0
        batch = 1 if is_chunk else int(generator.integers(1, limits.max_batch + 1))
        rows = int(generator.integers(1, (limits.prefill_chunk if is_chunk else limits.block_size)))
        slot = int(generator.integers(0, limits.max_batch - batch + 1))
        most = np.minimum(held[slot : slot + batch], limits.max_seq_len - rows)
        starts = generator.integers(0, most + 1)
        ids = generator.integers(0, limits.vocab_size, (batch, rows))
        asked = min(rows, limits.block_size)
        actual, expected = (forward(one, ids, starts.tolist(), slot, asked) for one in (gpu, cpu))
        held[slot : slot + batch] = starts + rows
        off = np.abs(actual - expected).max(axis=-1) / expected.std(axis=-1)
        errors += off.ravel().tolist()
        if not (off <= bound).all():  # NaN is off as well
            wrong.append(f"{batch} × {rows} rows at {starts.tolist()}")
    worst, middle = max(errors), median(errors)
    detail = f"{CALLS} calls: a logit differs by at most {worst:.3f} of the spread, half by "
    detail += f"{middle:.3f}" + (f"; off are {', '.join(wrong[:4])}" if wrong else "")
    return not wrong, detail, {"worst": worst, "median": middle, "bound": bound}


def probe_drafts(bench: Bench) -> Found:
    """The drafter over a context of some length; its rows are near ties more often than not."""
    limits = bench.gpu.limits
    length = min(limits.prefill_chunk, limits.max_seq_len - limits.block_size)
    prompts = bench.random_ids(limits.max_batch, length)
    begin_anew(bench.gpu, bench.cpu)
    drafted: list[Int64Array] = []
    for executor in (bench.gpu, bench.cpu):
        for slot in range(limits.max_batch):
            forward(executor, prompts[slot : slot + 1], [0], slot)
        starts = np.full(limits.max_batch, length)
        step = executor.speculate(make_step(executor, prompts[:, 0], starts))
        drafted.append(step.token_ids[:, 1:].copy())
    same = float((drafted[0] == drafted[1]).mean())
    return same >= DRAFTS_AGREE, f"{same:.0%} of the drafts are the same", {"same": same}


def probe_drift(bench: Bench) -> Found:
    """Free device memory while prefill chunks of other sizes follow each other.

    The executor keeps a context for each size, since one that changes its shape may load the
    machine code of plugins anew (NVIDIA/TensorRT #4849).
    """
    gpu, limits = bench.gpu, bench.gpu.limits
    longest = min(limits.prefill_chunk, limits.max_seq_len)
    sizes = np.unique(np.linspace(limits.block_size + 1, longest, SIZES, dtype=int)).tolist()
    ids = bench.random_ids(1, longest)
    begin_anew(gpu)
    for size in [*sizes, *sizes]:  # what a size needs once, it has by then
        forward(gpu, ids[:, :size], [0], 0)
    free: list[int] = []
    for number in range(CHANGES + 1):
        if number % (CHANGES // SAMPLES) == 0:
            gpu.device.synchronize()
            free.append(gpu.device.free_bytes())
        forward(gpu, ids[:, : sizes[number % len(sizes)]], [0], 0)
    lost = free[0] - min(free)
    detail = f"{lost:,} bytes fewer are free after {CHANGES} changes between {len(sizes)} sizes, "
    detail += f"{lost / CHANGES:,.0f} a change; {DRIFT_BYTES:,} may be"
    return lost <= DRIFT_BYTES, detail, {"lost_bytes": lost, "changes": CHANGES}


def probe_tokens(bench: Bench) -> Iterator[Probe]:
    """Tokens of every mode against the CPU's, up to ties."""
    limits = bench.gpu.limits
    block, most = limits.block_size, min(limits.max_batch, len(bench.requests))
    modes = [Mode(speculation=False, batch=1, block_size=None)]
    modes += [Mode(speculation=True, batch=one, block_size=block) for one in sorted({1, most})]
    for report in verify(bench.gpu, bench.requests, modes, baseline=bench.cpu):
        gaps = ", ".join(f"{tie.gap:.3g}" for tie in report.ties) or "none"
        detail = f"{report.tokens} tokens; gaps where they part: {gaps}; noise of a logit "
        figures = {"tokens": report.tokens, "noise": report.noise, "gaps": gaps}
        name = f"tokens of {report.mode} are the CPU's"
        yield Probe(name, report.is_lossless, f"{detail}{report.noise:.3g}", figures)


def probe_graphs(bench: Bench) -> Found:
    """A step is captured at its second call, and replays what it did before."""
    gpu = bench.gpu
    begin_anew(gpu)
    step = make_step(gpu, np.array([1]), np.array([0]))
    answers = [gpu.speculate(step).choice_ids.tolist() for _ in range(5)]
    changed = sum(answer != answers[0] for answer in answers)
    captured, error = gpu.runner.captured, gpu.runner.capture_error
    detail = error or f"{captured} captured; {changed} of 4 repeats differ"
    return captured > 0 and error is None and not changed, detail


def probe_move(bench: Bench) -> Found:
    """A sequence goes on where its slot was moved to."""
    gpu = bench.gpu
    begin_anew(gpu)
    head, tail = bench.prompt[:, :-1], bench.prompt[:, -1:]
    forward(gpu, head, [0], 1)
    stayed = forward(gpu, tail, [head.shape[1]], 1)
    forward(gpu, head, [0], 1)
    gpu.move_slot(1, 0, head.shape[1])
    moved = forward(gpu, tail, [head.shape[1]], 0)
    change = float(np.abs(moved - stayed).max())
    return change == 0, f"logits differ by {change:.3g} after the move"


def probe_drawing(bench: Bench) -> Found:
    """Engines draw what the runtime would from the very logits that they drew from."""
    gpu, prompt = bench.gpu, bench.prompt
    begin_anew(gpu)
    rows, start = min(gpu.limits.block_size, prompt.shape[1]), np.array([0])
    picked = np.arange(rows)[None]
    same = drawn = 0
    for seed, (temperature, top_k, top_p) in enumerate(
        [(0.0, None, 1.0), (0.8, None, 1.0), (0.7, 20, 1.0), (1.0, None, 0.9), (1.3, 50, 0.8)] * 4
    ):
        # Seeds of all 64 bits.
        sampling = SamplingParams(temperature, top_k, top_p, (seed * 0x9E3779B97F4A7C15) % 2**64)
        packed = sampling_input(gpu.limits, [sampling])
        ids = prompt[:, :rows]
        output = gpu.forward(TargetCall("target", 0, ids, start, picked, Scores.LOGITS, packed))
        assert output.logits is not None
        expected = choose_tokens(output.logits[0], picked[0] + 1, sampling)
        same += int((output.choice_ids[0] == expected).sum())
        drawn += rows
    return same == drawn, f"{same} of {drawn} tokens are the same", {"same": same, "tokens": drawn}


def probe_unrecorded(bench: Bench) -> Found:
    """Tokens are the same without whole rows of logits: from candidates, or of steps begun ahead.

    Those are asked for, so that none is in vain but the last of a sequence.
    """
    ahead, limits = bench.gpu.lookahead, bench.gpu.limits
    sampling = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=1)
    sampled = [replace(one, sampling=sampling) for one in bench.requests[: limits.max_batch]]
    before = ahead.started, ahead.dropped
    outputs = []
    for record_logits in (False, True):
        generator = Generator(bench.gpu, options=GeneratorOptions(record_logits=record_logits))
        outputs.append([one.token_ids for one in generator.generate(sampled)])
    same = sum(some == whole for some, whole in zip(*outputs, strict=True))
    begun, lost = ahead.started - before[0], ahead.dropped - before[1]
    detail = f"{same} of {len(sampled)} outputs are the same"
    detail += f"; {begun} steps were begun ahead, {lost} of them in vain" * limits.draws
    is_ahead = not limits.draws or (begun > 0 and lost <= len(sampled))
    return same == len(sampled) and is_ahead, detail, {"begun": begun, "lost": lost}
