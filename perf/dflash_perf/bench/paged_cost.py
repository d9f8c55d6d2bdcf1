"""What paged KV caches cost a step on the CPU, and what a shared prefix saves.

The demo pair's shape with random weights, linear and paged in turn: a verify of 8 rows and a plain
step at several numbers of tokens held, then the time to the first token of a prompt whose prefix
the generator has seen, against one that it has not.
"""

from __future__ import annotations

from typing import Annotated

import click
import numpy as np

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.repeat import spread
from dflash_perf.bench.step_cost import PAIR, PER_RUN, compare_steps, open_synthetic
from dflash_trt.backends.base import Executor
from dflash_trt.core.limits import PAGE_SIZE
from dflash_trt.runtime import Generator, Request
from dflash_trt.synthetic.qwen3 import write_pair

POSITIONS = PAIR.target.max_position_embeddings
HELD = (100, 1000, 3000)
LAYOUTS = ("linear", "paged")
PREFIX, QUESTION = 2048, 32


def measure_first_token(executor: Executor, runs: int) -> Figures:
    """Milliseconds to the first token of a new prompt, and of one whose prefix is cached."""
    generator = Generator(executor)
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"new": [], "shared": []}
    for _ in range(runs):
        prefix = rng.integers(0, PAIR.target.vocab_size, PREFIX).tolist()
        for name in times:
            question = rng.integers(0, PAIR.target.vocab_size, QUESTION).tolist()
            request = Request(prompt_ids=(*prefix, *question), max_tokens=1)
            statistics = generator.generate([request])[0].statistics
            assert statistics.cached_prompt_tokens == (PREFIX if name == "shared" else 0)
            times[name].append((statistics.time_to_first_token_s or 0.0) * 1e3)
    click.echo(
        f"first token after {PREFIX} + {QUESTION} tokens: {min(times['new']):.1f} ms, with the "
        f"first {PREFIX} on shared pages {min(times['shared']):.1f} ms"
    )
    return {name: spread(each) for name, each in times.items()}


@bench(runs=9)
def measure(work: Work, *, seconds: Annotated[float, PER_RUN] = 0.5) -> Figures:
    write_pair(work.folder, PAIR, dtype="F32", random=True)
    steps: Figures = {}
    for held in HELD:
        executors = {
            layout: open_synthetic(work.folder, POSITIONS, held, layout) for layout in LAYOUTS
        }
        for name, figures in compare_steps(executors, held, work, seconds).items():
            steps[f"{name} at {held} tokens"] = figures
        for executor in executors.values():
            executor.close()
    executor = open_synthetic(work.folder, POSITIONS, 1, "paged")
    first_token = measure_first_token(executor, work.runs)
    executor.close()
    return {
        "page_size": PAGE_SIZE,
        "steps": steps,
        "prefix_tokens": PREFIX,
        "question_tokens": QUESTION,
        "ms_to_first_token": first_token,
    }
