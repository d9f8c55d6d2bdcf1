"""Probes of a running executor: what must hold for engines on a GPU.

The CPU executor's float32 logits are the reference. A narrow engine differs from them by rounding,
so a probe measures that noise where nothing can be wrong, and holds what it asks about to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from dflash_trt.backends.base import Executor, FloatArray, Int64Array, Scores, TargetCall
from dflash_trt.backends.tensorrt.run.executor import TensorRtExecutor
from dflash_trt.decoding import Generator, GeneratorOptions, RequestResult, SamplingParams
from dflash_trt.decoding.scores import sampling_input
from dflash_trt.proof.gpu_check.calls import Bench, begin_anew, forward, make_step
from dflash_trt.proof.gpu_check.gpu_record import Found, Probe
from dflash_trt.proof.verification import Mode, ModeReport, measure_speed
from dflash_trt.sampling.acceptance import accept_block
from dflash_trt.sampling.choice import choose_tokens

# Two orders of one sum may each be off by the noise.
NOISE_FACTOR = 2.0
TIMED_STEPS = 100


def probe_tokens(bench: Bench) -> Iterator[Probe]:
    """Tokens of every mode against the CPU's, up to ties."""
    requests = bench.requests

    def generate(executor: Executor, mode: Mode) -> list[RequestResult]:
        options = GeneratorOptions(
            speculation=mode.speculation, block_size=mode.block_size, record_logits=True
        )
        generator = Generator(executor, options=options)
        parts = [requests[at : at + mode.batch] for at in range(0, len(requests), mode.batch)]
        return [result for part in parts for result in generator.generate(part)]

    limits = bench.gpu.limits
    block, most = limits.block_size, min(limits.max_batch, len(requests))
    plain = Mode(speculation=False, batch=1, block_size=None)
    drafted = [Mode(speculation=True, batch=one, block_size=block) for one in sorted({1, most})]
    expected = generate(bench.cpu, plain)
    for mode in (plain, *drafted):
        report = ModeReport(mode=str(mode), is_bitwise=False)
        for index, (want, got) in enumerate(zip(expected, generate(bench.gpu, mode), strict=True)):
            report.add(index, want, got)
        gaps = ", ".join(f"{tie.gap:.3g}" for tie in report.ties) or "none"
        yield Probe(
            f"tokens of {mode} are the CPU's",
            report.is_lossless,
            f"{report.tokens} tokens; gaps where they part: {gaps}; noise of a logit "
            f"{report.noise:.3g}",
            {
                "tokens": report.tokens,
                "noise": report.noise,
                "gaps": [tie.gap for tie in report.ties],
                "acceptance_length": report.statistics.acceptance_length,
            },
        )


def probe_lengths(bench: Bench) -> Found:
    """Lower-right causality counts from each row's own length, alone and beside a longer one."""
    gpu, cpu, prompt = bench.gpu, bench.cpu, bench.prompt
    begin_anew(gpu, cpu)
    rows, starts = gpu.limits.block_size, [prompt.shape[1], max(1, prompt.shape[1] // 2)]
    block = prompt[:, :1].repeat(rows, axis=1) + np.arange(rows)
    block %= gpu.limits.vocab_size

    def run(executor: Executor, slots: Sequence[int]) -> FloatArray:
        for slot in slots:
            forward(executor, prompt[:, : starts[slot]], [0], slot)
        held = [starts[slot] for slot in slots]
        return forward(executor, block.repeat(len(slots), axis=0), held, slots[0], rows)

    alone = np.concatenate([run(gpu, [0]), run(gpu, [1])])
    exact = np.concatenate([run(cpu, [0]), run(cpu, [1])])
    noise = float(np.abs(alone - exact).max())
    change = float(np.abs(run(gpu, [0, 1]) - alone).max())
    spread = float(exact.std())
    return (
        change <= NOISE_FACTOR * noise and noise < spread,
        f"{starts[0]} and {starts[1]} positions together differ from each alone by "
        f"{change:.3g}; alone from the CPU by {noise:.3g}; logits spread {spread:.3g}",
        {"together": change, "alone": noise, "spread": spread, "lengths": starts},
    )


def probe_graphs(bench: Bench) -> Found:
    """A step is captured at its second call, and replays what it did before."""
    gpu = bench.gpu
    begin_anew(gpu)
    step = make_step(gpu, np.array([1]), np.array([0]))
    answers = [gpu.speculate(step).choice_ids.tolist() for _ in range(5)]
    changed = sum(answer != answers[0] for answer in answers)
    captured, error = gpu.runner.captured, gpu.runner.capture_error
    detail = error or f"{captured} captured; {changed} of 4 repeats differ"
    figures = {"captured": captured, "repeats_that_differ": changed}
    return captured > 0 and error is None and not changed, detail, figures


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
    return change == 0, f"logits differ by {change:.3g} after the move", {"change": change}


def probe_candidates(bench: Bench) -> Found:
    """Drawing from candidates and from whole rows gives the same tokens."""
    sampling = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=1)
    sampled = [replace(request, sampling=sampling) for request in bench.requests]
    outputs = []
    for record_logits in (False, True):
        generator = Generator(bench.gpu, options=GeneratorOptions(record_logits=record_logits))
        outputs.append([generator.generate([one])[0].token_ids for one in sampled])
    same = sum(some == whole for some, whole in zip(*outputs, strict=True))
    detail = f"{same} of {len(sampled)} outputs are the same"
    return same == len(sampled), detail, {"same": same, "outputs": len(sampled)}


def probe_drawing(gpu: Executor, prompt: Int64Array) -> Found:
    """Engines draw what the runtime would from the very logits that they drew from."""
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


def probe_ahead(gpu: TensorRtExecutor, prompt: Int64Array) -> Found:
    """Steps begun ahead settle the same tokens, and are asked for, so that none is in vain."""
    begin_anew(gpu)
    batch = gpu.limits.max_batch
    for slot in range(batch):
        forward(gpu, prompt, [0], slot)
    expected, waiting, _, _ = _decode(gpu, prompt, ahead=False)
    tokens, ahead, begun, lost = _decode(gpu, prompt, ahead=True)
    same = tokens == expected
    figures = {"waiting_steps_per_second": waiting, "ahead_steps_per_second": ahead}
    return (
        same and begun > 0 and not lost,
        f"batch {batch}: {ahead:,.0f} steps/s with {begun} of {TIMED_STEPS} steps begun "
        f"ahead, {lost} of them in vain, {waiting:,.0f} without; tokens are "
        f"{'the same' if same else 'others'}",
        {**figures, "batch": batch, "steps": TIMED_STEPS, "begun": begun, "lost": lost},
    )


def _decode(
    gpu: TensorRtExecutor, prompt: Int64Array, *, ahead: bool
) -> tuple[list[list[int]], float, int, int]:
    """Decodes behind `prompt` in all slots: tokens, steps a second, steps begun ahead, steps lost.

    Where the context ends the sequences begin anew, and no step is begun ahead.
    """
    batch, block = gpu.limits.max_batch, gpu.limits.block_size
    length = prompt.shape[1] - 1
    anchors, starts = np.repeat(prompt[0, -1:], batch), np.full(batch, length)
    first = make_step(gpu, anchors, starts)
    tokens: list[list[int]] = []
    started, before, dropped = 0.0, 0, gpu.lookahead.dropped
    for number in range(TIMED_STEPS + 3):
        if number == 3:  # its graph has been captured
            started, before = time.perf_counter(), gpu.lookahead.started
        goes_on = starts.max() + 2 * block <= gpu.limits.max_seq_len
        step = replace(first, anchors=anchors, starts=starts, ahead=ahead and bool(goes_on))
        output = gpu.speculate(step)
        settled = [
            accept_block(ids[1:].tolist(), own.tolist().__getitem__)
            for ids, own in zip(output.token_ids, output.choice_ids, strict=True)
        ]
        tokens += settled
        anchors = np.array([one[-1] for one in settled])
        starts = starts + np.array([len(one) for one in settled])
        if starts.max() + block > gpu.limits.max_seq_len:
            anchors, starts = np.repeat(prompt[0, -1:], batch), np.full(batch, length)
    seconds = time.perf_counter() - started
    begun, lost = gpu.lookahead.started - before, gpu.lookahead.dropped - dropped
    return tokens, TIMED_STEPS / seconds, begun, lost


def probe_speed(bench: Bench) -> Found:
    """Tokens per second against target_only."""
    gpu = bench.gpu
    speed = measure_speed(gpu, bench.requests, block_size=gpu.limits.block_size, repeats=3).speed()
    if not speed.ratios:
        return None, "no step took time"
    plain, drafted = median(speed.baseline), median(speed.speculative)
    detail = f"target_only {plain:,.0f} tokens/s, DFlash {drafted:,.0f}, ratio {speed.speedup:.2f}"
    figures = {
        "cache_bytes": gpu.caches.nbytes,
        "target_only_tokens_per_second": list(speed.baseline),
        "dflash_tokens_per_second": list(speed.speculative),
    }
    return None, detail, figures
