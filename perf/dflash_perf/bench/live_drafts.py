"""What drafts cost and bring without a schedule, in the first tokens of a generator's life.

For every group of `--batch` prompts three new generators decode it, one after the other and each
time in another order: without drafts, drafting always, and leaving drafts out while they do not pay
(live). All prompts are used once a run. Steps are timed before a live generator's life, as when a
pair is opened. With `--draft useless` the draft's weights are shuffled: right by chance alone.
Processor time (`--clock cpu`) holds on a busy machine, with one thread.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import click
import numpy as np

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.bundles import requests_of
from dflash_perf.bench.repeat import show, spread, spread_of_ratios, take_turns
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.pair import LoadedPair
from dflash_trt.runtime import Generator, GeneratorOptions, Request, total
from dflash_trt.runtime.opening import time_opening
from dflash_trt.tuning.bundle_schedule import NONE

PLAIN, ALWAYS, LIVE = "target_only", "dflash", "live"


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def decode(
    pair: LoadedPair, requests: Sequence[Request], way: str, clock: Callable[[], float]
) -> Figures:
    """Decodes `requests` together with a new generator: seconds, steps' ratios, acceptance."""
    ratios: tuple[tuple[int, float], ...] = ()
    if way == LIVE:
        ratios = time_opening(pair.executor, GeneratorOptions(live=True), clock)
    options = GeneratorOptions(speculation=way != PLAIN, live=way == LIVE, step_ratios=ratios)
    eos = pair.bundle.manifest.target.eos_token_ids
    generator = Generator(pair.executor, eos_token_ids=eos, options=options, clock=clock)
    began = clock()
    results = generator.generate(requests)
    seconds = clock() - began
    summary = total((result.statistics for result in results), seconds)
    return {
        "seconds": seconds,
        "step_ratios": dict(ratios),
        "acceptance_length": summary.acceptance_length or 1.0,
        "tokens": [result.token_ids for result in results],
    }


@bench(variant="draft")
def measure(
    work: Work,
    bundle: Path,
    *,
    batch: tuple[int, ...] = (1, 8),
    max_tokens: int = 200,
    threads: int = 1,
    draft: Annotated[
        Literal["good", "useless"], "useless: a copy whose weights are shuffled."
    ] = "good",
    clock: Annotated[Literal["wall", "cpu"], "cpu: what this process computed."] = "wall",
) -> Figures:
    opened = open_bundle(
        shuffle_draft(bundle, work.folder / "useless") if draft == "useless" else bundle
    )
    requests = requests_of(opened, max_tokens)
    pair = LoadedPair(opened, threads=threads, block_schedule=NONE, graphs=GRAPH_NAMES)
    by_batch: Figures = {}
    for size in batch:
        groups = [requests[at : at + size] for at in range(0, len(requests) - size + 1, size)]
        found: dict[str, list[Figures]] = {PLAIN: [], ALWAYS: [], LIVE: []}
        for way in found:  # what is allocated at first is nobody's
            decode(pair, groups[0], way, CLOCKS[clock])
        for run in range(work.runs):
            for number, group in enumerate(groups):
                names = list(found)
                first = (run + number) % len(names)
                order = names[first:] + names[:first]
                for way, each in take_turns(
                    {way: partial(decode, pair, group, way, CLOCKS[clock]) for way in order}, 1
                ).items():
                    found[way] += each
        by_batch[str(size)] = _summarize(found)
        _show(size, by_batch[str(size)])
    return {"pair": opened.manifest.name, "prompts": len(requests), "by_batch": by_batch}


def shuffle_draft(bundle: Path, folder: Path) -> Path:
    """Copies a bundle to `folder`; the elements of its draft's 16-bit tensors change places."""
    shutil.copytree(bundle, folder)
    chance = np.random.default_rng(0)
    for shard in (folder / "weights" / "draft").glob("*.safetensors"):
        content = bytearray(shard.read_bytes())
        header_size = int.from_bytes(content[:8], "little")
        start = 8 + header_size
        for name, tensor in json.loads(content[8:start]).items():
            if name != "__metadata__" and tensor["dtype"] in ("BF16", "F16"):
                begin, end = tensor["data_offsets"]
                size = (end - begin) // 2
                chance.shuffle(np.frombuffer(content, np.uint16, size, start + begin))
        shard.write_bytes(content)
    return folder


def _summarize(found: dict[str, list[Figures]]) -> Figures:
    for one, other in zip(found[PLAIN], found[LIVE], strict=True):
        assert one["tokens"] == other["tokens"], "drafts changed a token"
    seconds = {way: [one["seconds"] for one in each] for way, each in found.items()}
    live = [one["step_ratios"] for one in found[LIVE]]
    return {
        "live_to_target_only": spread_of_ratios(seconds[PLAIN], seconds[LIVE]),
        "live_to_dflash": spread_of_ratios(seconds[ALWAYS], seconds[LIVE]),
        "dflash_to_target_only": spread_of_ratios(seconds[PLAIN], seconds[ALWAYS]),
        "acceptance_length": median(one["acceptance_length"] for one in found[ALWAYS]),
        "step_ratios": {
            str(size): spread([one[size] for one in live if size in one]) for size in live[-1]
        },
        "seconds": {way: spread(each) for way, each in seconds.items()},
    }


def _show(batch: int, figures: Figures) -> None:
    click.echo(
        f"batch {batch}: acceptance length {figures['acceptance_length']:.2f}; always drafting / "
        f"target_only {show(figures['dflash_to_target_only'], '.2f')}"
    )
    for other in (PLAIN, ALWAYS):
        kept = figures[f"live_to_{other}"]
        click.echo(f"batch {batch}: live / {other} {show(kept, '.3f')}, {kept['runs']} pairs")
