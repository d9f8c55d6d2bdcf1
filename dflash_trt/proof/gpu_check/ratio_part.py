"""The parts of the check that time DFlash against `target_only`, end to end or step by step."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median

import numpy as np

from dflash_trt.backends.base import Executor
from dflash_trt.backends.registry import open_executor
from dflash_trt.backends.tensorrt.library import TORCH
from dflash_trt.building.build import build
from dflash_trt.building.spec import BuildSpec, Checkpoints, LimitOptions, PrecisionOptions
from dflash_trt.building.synthetic.qwen3 import write_pair
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.core.progress import SilentProgress
from dflash_trt.decoding import Generator, GeneratorOptions, Request, RequestResult, total
from dflash_trt.decoding.tuning.block_times import StepBench, TuningOptions
from dflash_trt.deploy.planning.known_pairs import find_pair
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.graph.form import Precision
from dflash_trt.hardware.device import Device
from dflash_trt.proof.gpu_check.engine_part import build_pair, find_torch, make_requests, read_demo
from dflash_trt.proof.gpu_check.gpu_record import PartSkippedError, Probe
from dflash_trt.proof.gpu_check.runner import Setting

PRECISION = Precision.BFLOAT16
RUNS, TOKENS = 3, 128
SYNTHETIC = "qwen3-8b"
BATCHES, CONTEXT = (1, 4), 1024
ROOM = 1.1  # beside the weights: caches, masks, logits


def measure_ratio(setting: Setting) -> Iterator[Probe]:
    """The demo pair, decoded with its draft and without in turn; whole answers, prefill included.

    Raises:
        PartSkippedError: PyTorch runs nothing here.
    """
    find_torch(PRECISION)
    bundle = build_pair(None, read_demo(), setting.folder / "bundle", torch=PRECISION)
    requests = [replace(one, max_tokens=TOKENS) for one in make_requests(None, bundle)]
    with closing(open_executor(bundle, graphs=GRAPH_NAMES)) as executor:
        for batch in sorted({1, min(len(requests), executor.limits.max_batch)}):
            rates: dict[bool, list[float]] = {False: [], True: []}
            for run in range(RUNS + 1):  # the first binds shapes and captures graphs
                for speculation, found in rates.items():
                    rate, results = _decode(executor, requests, batch, speculation=speculation)
                    found += [rate] * bool(run)
                    setting.leave_time("the other runs")
            tau = total(one.statistics for one in results).acceptance_length or 1.0
            ratios = [dflash / plain for plain, dflash in zip(*rates.values(), strict=True)]
            plain, dflash = (median(one) for one in rates.values())
            detail = f"{median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f}): "
            detail += f"{dflash:,.0f} tokens/s against {plain:,.0f}, τ {tau:.2f}"
            figures = {"ratios": ratios, "dflash": dflash, "target_only": plain, "tau": tau}
            yield Probe(f"DFlash ÷ target_only, demo pair, {batch} at once", None, detail, figures)


def _decode(
    executor: Executor, requests: Sequence[Request], batch: int, *, speculation: bool
) -> tuple[float, list[RequestResult]]:
    """Tokens per second of all requests, `batch` at a time, and what came of them."""
    chunk, results = executor.limits.prefill_chunk, list[RequestResult]()
    options = GeneratorOptions(speculation=speculation, prefill_chunk=chunk)
    started = time.perf_counter()
    for first in range(0, len(requests), batch):
        generator = Generator(executor, options=options)
        results += generator.generate(requests[first : first + batch])
    seconds = time.perf_counter() - started
    return sum(len(one.token_ids) for one in results) / seconds, results


def time_steps(setting: Setting) -> Iterator[Probe]:
    """Steps of a pair of random weights in a public pair's shapes: synthetic, and called so.

    What it would gain is the τ that is published for the real weights, times the ratio of the
    steps' times.

    Raises:
        PartSkippedError: PyTorch runs nothing here, or the pair does not fit.
    """
    find_torch(PRECISION)
    shape = find_pair(SYNTHETIC)
    with closing(Device()) as device:
        free = device.free_bytes()
    size = write_pair(setting.folder / "sizes", shape, random=False)  # takes no disk
    for room, where in ((free, "GPU"), (shutil.disk_usage(setting.folder).free, "disk")):
        if size * ROOM > room:
            what = f"{size * ROOM:,.0f} bytes do not fit the {where}: {room:,} are free"
            raise PartSkippedError(what)
    write_pair(setting.folder / "pair", shape, random=True)
    source = setting.folder / "pair"
    spec = BuildSpec(
        executor=TORCH,
        checkpoints=Checkpoints(
            target_checkpoint=source / "target", draft_checkpoint=source / "draft"
        ),
        limits=LimitOptions(max_batch=max(BATCHES), max_seq_len=2 * CONTEXT),
        precision=PrecisionOptions(precision="bf16"),
        output=setting.folder / "bundle",
    )
    bundle = open_bundle(build(spec, SilentProgress()).folder)
    block, taus = shape.draft.block_size, shape.own_taus(shape.published[0])
    texts = np.random.default_rng(0).integers(0, shape.target.vocab_size, (max(BATCHES), CONTEXT))
    options = TuningOptions(block_sizes=(block,), batches=BATCHES)
    with closing(open_executor(bundle, graphs=GRAPH_NAMES)) as executor:
        request = Request(prompt_ids=tuple(texts[0].tolist()), max_tokens=1)
        bench = StepBench(executor, request, texts.tolist(), options)
        bench.fill()
        for step in bench.time_steps(lambda batches: None):
            cost = step.blocks[0] / step.target_only
            gains = {name: tau / cost for name, tau in taus.items()}
            said = ", ".join(f"{name} {gain:.2f} ×" for name, gain in gains.items())
            detail = f"a step of {block} rows takes {step.blocks[0] * 1e3:.2f} ms, one token "
            detail += f"{step.target_only * 1e3:.2f}: with the published τ {said}"
            name = f"synthetic pair of {SYNTHETIC}'s shapes, {step.batch} at once, {CONTEXT} tokens"
            yield Probe(name, None, detail, step.model_dump() | {"taus": taus, "gains": gains})
