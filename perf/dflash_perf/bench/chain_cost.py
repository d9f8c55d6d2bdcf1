"""What a draft pass of k tokens costs against k passes of one: is a chain unrolled fairly?

Times the bundle's draft graph alone, over random tokens behind `--held` positions, for one sequence
and for several. An EAGLE-3 chain of k steps in one graph should cost at most 1.15 times k chains of
one step; a block of DFlash costs about as much as one.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import click
import numpy as np

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.repeat import show, spread_of_ratios, take_turns
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.replay.edits import Edits
from dflash_trt.replay.graphs import ReplayGraphs

CALLS = 20
"""Passes of a measurement."""


@bench(runs=15, variant="kind")
def measure(
    work: Work,
    bundle: Path,
    *,
    batch: tuple[int, ...] = (1, 8),
    held: Annotated[int, "Positions in the caches."] = 100,
    kind: Annotated[str, "Part of the record's name."] = "",
) -> Figures:
    opened = open_bundle(bundle)
    block = opened.manifest.limits.block_size
    graphs = ReplayGraphs(opened, 1, Edits())
    vocab = opened.manifest.target.vocab_size
    context = graphs.run_target((np.arange(held) % (vocab - 2) + 1).tolist())
    by_batch: Figures = {}
    for size in batch:
        caches = graphs.make_caches(size, held + block)
        for slot in range(size):
            caches.fill(slot, context)
        anchors, starts = np.full(size, 2, np.int64), np.full(size, held, np.int64)

        def seconds(drafts: int) -> float:
            started = time.process_time()
            for _ in range(CALLS):
                graphs.run_draft(caches, 0, anchors, starts, drafts + 1)  # noqa: B023
            return (time.process_time() - started) / CALLS

        counts = range(1, block)
        for count in counts:
            seconds(count)  # shapes are bound, memory is made
        found = take_turns({count: partial(seconds, count) for count in counts}, work.runs)
        by_batch[str(size)] = {
            str(count): {
                "ms": 1e3 * median(found[count]),
                "to_as_many_of_one": spread_of_ratios(
                    found[count], [count * one for one in found[1]]
                ),
            }
            for count in counts
        }
        last = by_batch[str(size)][str(block - 1)]
        click.echo(
            f"{opened.manifest.draft.kind}, batch {size}: {block - 1} drafts in {last['ms']:.3f} "
            f"ms, {show(last['to_as_many_of_one'], '.2f')} of {block - 1} passes of one draft"
        )
    graphs.close()
    figures = {"kind": opened.manifest.draft.kind, "by_batch": by_batch}
    return {"pair": opened.manifest.name, "clock": "of the process, one thread", **figures}
