"""Probes of calls whose shapes change: what they compute, and what they leave of the memory."""

from __future__ import annotations

import numpy as np

from dflash_trt.backends.base import Int64Array
from dflash_trt.proof.gpu_check.calls import Bench, begin_anew, forward, make_step, random_ids
from dflash_trt.proof.gpu_check.gpu_record import Found

CALLS = 40
CHANGES = 1000
SIZES, SAMPLES = 24, 10
# A row is off where a logit differs by more of the logits' spread. Of another sequence, position or
# mask it differs by 4. Rounding to bfloat16 makes about 0.05; over FP8 caches it moves some values
# to the next code, which makes up to 0.4.
ROW_OFF, ROW_OFF_FP8 = 0.4, 1.0
DRAFTS_AGREE = 0.5
# cudaMalloc hands out memory in pieces of 2 MiB, and other processes may come and go. A module kept
# at each of a thousand changes would take more, were it a kernel of 64 KiB.
DRIFT_BYTES = 32 << 20


def probe_calls(bench: Bench) -> Found:
    """Random calls one after another: batches, rows, first slots and positions of all sizes."""
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
    worst, median = max(errors), float(np.median(errors))
    detail = f"{CALLS} calls, {len(errors)} rows: a logit differs by at most {worst:.3f} of "
    detail += f"the spread, half of the rows by {median:.3f}"
    detail += f"; off are {', '.join(wrong[:4])}" if wrong else ""
    return not wrong, detail, {"worst": worst, "median": median, "bound": bound}


def probe_drafts(bench: Bench) -> Found:
    """The drafter over a context of some length; its rows are near ties more often than not."""
    limits = bench.gpu.limits
    length = min(limits.prefill_chunk, limits.max_seq_len - limits.block_size)
    prompts = random_ids(limits.vocab_size, limits.max_batch, length)
    begin_anew(bench.gpu, bench.cpu)
    drafted: list[Int64Array] = []
    for executor in (bench.gpu, bench.cpu):
        for slot in range(limits.max_batch):
            forward(executor, prompts[slot : slot + 1], [0], slot)
        starts = np.full(limits.max_batch, length)
        step = executor.speculate(make_step(executor, prompts[:, 0], starts))
        drafted.append(step.token_ids[:, 1:].copy())
    same, count = float((drafted[0] == drafted[1]).mean()), drafted[0].size
    detail = f"{same:.0%} of {count} drafts are the same"
    return same >= DRAFTS_AGREE, detail, {"same": same, "drafts": count}


def probe_drift(bench: Bench) -> Found:
    """Free device memory while prefill chunks of other sizes follow each other.

    The executor keeps a context for each size, since one that changes its shape may load the
    machine code of plugins anew (NVIDIA/TensorRT #4849).
    """
    gpu, limits = bench.gpu, bench.gpu.limits
    longest = min(limits.prefill_chunk, limits.max_seq_len)
    sizes = np.unique(np.linspace(limits.block_size + 1, longest, SIZES, dtype=int)).tolist()
    ids = random_ids(limits.vocab_size, 1, longest)
    begin_anew(gpu)
    for size in [*sizes, *sizes]:  # what a size needs once, it has by then
        forward(gpu, ids[:, :size], [0], 0)
    gpu.device.synchronize()
    free = [gpu.device.free_bytes()]
    for number in range(CHANGES):
        forward(gpu, ids[:, : sizes[number % len(sizes)]], [0], 0)
        if (number + 1) % max(1, CHANGES // SAMPLES) == 0:
            gpu.device.synchronize()
            free.append(gpu.device.free_bytes())
    lost = free[0] - min(free)
    detail = f"{lost:,} bytes fewer are free after {CHANGES} changes between {len(sizes)} sizes, "
    detail += f"{lost / CHANGES:,.0f} a change; {DRIFT_BYTES:,} may be"
    figures = {"free_bytes": free, "lost_bytes": lost, "changes": CHANGES, "sizes": len(sizes)}
    return lost <= DRIFT_BYTES, detail, figures
