"""What drafts cost and bring without a schedule, in the first tokens of a generator's life.

For every group of `--batch` prompts three new generators decode it, each with an executor of its
own: without drafts, drafting always, and leaving drafts out while they do not pay (live). The one
that is behind makes the next step, so that a machine that is now fast and now slow disturbs all
alike. Steps are timed before a live generator's life, as when a pair is opened. With `--draft
useless` the draft's weights are shuffled: right by chance alone. Processor time (`--clock cpu`)
holds on a busy machine, with one thread.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import click
import numpy as np

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.bundles import requests_of
from dflash_perf.bench.repeat import show, spread, spread_of_ratios
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.pair import LoadedPair
from dflash_trt.runtime import Generator, GeneratorOptions, Request, RequestResult, total
from dflash_trt.runtime.opening import time_opening
from dflash_trt.tuning.bundle_schedule import NONE

PLAIN, ALWAYS, LIVE = "target_only", "dflash", "live"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Life:
    """A new generator that decodes `requests` together, step by step.

    `tokens` of all requests so far, `seconds` in its steps.
    """

    def __init__(
        self, pair: LoadedPair, requests: Sequence[Request], way: str, clock: Callable[[], float]
    ) -> None:
        ratios: tuple[tuple[int, float], ...] = ()
        if way == LIVE:
            ratios = time_opening(pair.executor, GeneratorOptions(live=True), clock)
        options = GeneratorOptions(speculation=way != PLAIN, live=way == LIVE, step_ratios=ratios)
        eos = pair.bundle.manifest.target.eos_token_ids
        self._generator = Generator(pair.executor, eos_token_ids=eos, options=options, clock=clock)
        self._clock = clock
        self._results: dict[int, RequestResult | None] = {
            self._generator.submit(one): None for one in requests
        }
        self.step_ratios = dict(ratios)
        self.tokens, self.seconds = 0, 0.0

    @property
    def has_work(self) -> bool:
        return self._generator.has_work

    def step(self) -> None:
        began = self._clock()
        events = self._generator.step()
        self.seconds += self._clock() - began
        for event in events:
            self.tokens += len(event.token_ids)
            if event.result is not None:
                self._results[event.request_id] = event.result

    def figures(self) -> Figures:
        results = [result for result in self._results.values() if result is not None]
        summary = total((result.statistics for result in results), self.seconds)
        return {
            "seconds": self.seconds,
            "step_ratios": self.step_ratios,
            "acceptance_length": summary.acceptance_length or 1.0,
            "tokens": [result.token_ids for result in results],
        }


def decode(
    pairs: Mapping[str, LoadedPair],
    requests: Sequence[Request],
    clock: Callable[[], float],
) -> dict[str, Figures]:
    """Decodes `requests` in every way, by turns: seconds, steps' ratios, acceptance."""
    lives = {way: Life(pair, requests, way, clock) for way, pair in pairs.items()}
    working = list(lives.values())
    while working:
        min(working, key=lambda life: life.tokens).step()
        working = [life for life in working[1:] + working[:1] if life.has_work]
    return {way: life.figures() for way, life in lives.items()}


@bench(variant="draft")
def measure(
    work: Work,
    bundle: Path,
    *,
    batch: tuple[int, ...] = (1, 8),
    limit_prompts: Annotated[int | None, "Take the first of the bundle's."] = None,
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
    requests = requests_of(opened, max_tokens)[:limit_prompts]
    pairs = {
        way: LoadedPair(opened, threads=threads, block_schedule=NONE, graphs=GRAPH_NAMES)
        for way in (PLAIN, ALWAYS, LIVE)
    }
    by_batch: Figures = {}
    for size in batch:
        if size > len(requests):
            what = f"{size} sequences need as many prompts, and there are {len(requests)}"
            raise DflashError(what, where="--batch", fix="take fewer", usage=True)
        groups = [requests[at : at + size] for at in range(0, len(requests) - size + 1, size)]
        decode(pairs, groups[0], CLOCKS[clock])  # what is allocated at first is nobody's
        found: dict[str, list[Figures]] = {way: [] for way in pairs}
        for group in groups * work.runs:
            for way, figures in decode(pairs, group, CLOCKS[clock]).items():
                found[way].append(figures)
        by_batch[str(size)] = _summarize(found)
        _show(size, by_batch[str(size)])
    for pair in pairs.values():
        pair.close()
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
