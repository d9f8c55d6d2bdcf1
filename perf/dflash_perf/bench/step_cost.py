"""What a step costs when the cache could be long but is not.

The demo pair's shape with random weights, built for 512 and for 4096 positions; 100 tokens
held; a verify of 8 rows and a plain step of each in turn.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import click
import numpy as np

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.process import build_synthetic
from dflash_perf.bench.repeat import show, spread, spread_of_ratios, take_turns
from dflash_trt.backends.base import Executor, StepCall, TargetCall, hold_positions
from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.checkpoints.sizes import DecoderSizes, LayerSizes
from dflash_trt.planning.known_pairs import find_pair
from dflash_trt.synthetic.qwen3 import resize, write_pair

HELD = 100
LENGTHS = (512, 4096)
BLOCK_SIZE = 8
LAYER = LayerSizes(heads=2, kv_heads=1, head_dim=32)
PAIR = resize(
    find_pair("qwen3-8b"),
    DecoderSizes(hidden_size=64, intermediate_size=192, layers=(LAYER,) * 32),
    draft_layers=2,
    block_size=BLOCK_SIZE,
    vocab_size=512,
    max_position_embeddings=max(LENGTHS),
)
WAYS = {"target_only": False, "dflash": True}
"""Ways of decoding by name, and whether each speculates."""
PER_RUN = "How long one measurement takes."


def open_synthetic(folder: Path, max_seq_len: int, held: int, layout: str = "linear") -> Executor:
    """Builds and opens the synthetic pair for `max_seq_len` positions, `held` tokens cached."""
    bundle = folder / f"{layout}-{max_seq_len}"
    options = ("--max-seq-len", str(max_seq_len), "--kv-layout", layout, "--overwrite")
    build_synthetic(folder, bundle, *options)
    executor = open_executor(open_bundle(bundle), threads=1)
    hold_positions(executor, max_seq_len)
    ids = np.arange(held, dtype=np.int64)[None] % PAIR.target.vocab_size
    zero, last = np.zeros(1, np.int64), np.array([[held - 1]])
    executor.forward(TargetCall("target", 0, ids, zero, last))
    executor.forward(TargetCall("target_only", 0, ids, zero, last))
    return executor


def time_steps(executor: Executor, *, speculative: bool, seconds: float, held: int) -> float:
    """Milliseconds per step at `held` tokens, averaged over `seconds`."""
    start = np.array([held])
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        if speculative:
            executor.speculate(StepCall(0, np.array([7]), start, BLOCK_SIZE))
        else:
            token, row = np.array([[7]]), np.zeros((1, 1), np.int64)
            executor.forward(TargetCall("target_only", 0, token, start, row))
        count += 1
    return (time.perf_counter() - started) / count * 1e3


def compare_steps(
    executors: dict[str, Executor], held: int, work: Work, seconds: float
) -> dict[str, Figures]:
    """Milliseconds per step of two executors and their ratio, for each way of decoding."""
    first, second = executors
    figures: dict[str, Figures] = {}
    for name, speculative in WAYS.items():
        step = partial(time_steps, speculative=speculative, seconds=seconds, held=held)
        steps = {key: partial(step, executor) for key, executor in executors.items()}
        times = take_turns(steps, work.runs)
        ratio = spread_of_ratios(times[second], times[first])
        figures[name] = {
            "ms_per_step": {key: spread(each) for key, each in times.items()},
            f"ratio_{second}_to_{first}": ratio,
        }
        click.echo(
            f"{name} at {held} tokens: {first} {min(times[first]):.2f} ms, "
            f"{second} {min(times[second]):.2f} ms, ratio {show(ratio, '.2f')}"
        )
    return figures


@bench(runs=9)
def measure(work: Work, *, seconds: Annotated[float, PER_RUN] = 0.5) -> Figures:
    write_pair(work.folder, PAIR, dtype="F32", random=True)
    executors = {str(length): open_synthetic(work.folder, length, HELD) for length in LENGTHS}
    return {"tokens_held": HELD, "by_graph": compare_steps(executors, HELD, work, seconds)}
