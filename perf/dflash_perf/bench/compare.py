"""Bundles of one target in turn: acceptance length, and processor time a step by batch and block.

Every NAME=BUNDLE decodes the prompts of the first at each batch and block, and without a draft
(block 1), run after run, each run in another order. A step counts while as many sequences decode as
the batch says; prefill is left out. Seconds are those that this process computed, which with one
thread hold on a busy machine. Ratios are to the first bundle without a draft, run by run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.repeat import requests_of, show, spread_of_ratios, spreads, take_turns
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.decoding import GeneratorOptions, Request
from dflash_trt.decoding.tuning.bundle_schedule import NONE
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.pair import LoadedPair


@bench(runs=5)
def measure(
    work: Work,
    bundle: tuple[str, ...],
    *,
    batch: tuple[int, ...] = (1, 8),
    block: Annotated[tuple[int, ...], "Rows of a verify step; 1 drafts nothing."] = (1, 4, 8),
    max_tokens: int = 96,
    temperature: float = 0.0,
    limit_prompts: int = 16,
) -> Figures:
    pairs = {
        name: LoadedPair(one, threads=1, block_schedule=NONE, graphs=GRAPH_NAMES)
        for name, one in read_named_bundles(bundle, None).items()
    }
    first = next(iter(pairs.values())).bundle
    requests = requests_of(first, max_tokens, temperature)[:limit_prompts]
    if max(batch) > len(requests):
        raise DflashError(f"is more than {len(requests)} prompts", where="--batch", usage=True)
    by_batch: Figures = {}
    for size in batch:
        ways = {
            f"{name}, block {rows}": partial(time_steps, pair, rows, requests, size)
            for name, pair in pairs.items()
            for rows in sorted({1, *block})
            if rows <= pair.bundle.manifest.limits.block_size
        }
        take_turns(ways, 1)  # warms up
        found = take_turns(ways, work.runs, rotate=True)
        by_batch[str(size)] = _summarize(found, next(iter(ways)), size)
    drafts = {name: pair.bundle.manifest.draft.kind for name, pair in pairs.items()}
    return {"drafts": drafts, "prompts": len(requests), "by_batch": by_batch}


def time_steps(
    pair: LoadedPair, block: int, requests: Sequence[Request], batch: int
) -> dict[str, float]:
    """Milliseconds of processor time a step, tokens of a sequence in it, and tokens a second."""
    plain, drafting = GeneratorOptions(speculation=False), GeneratorOptions(block_size=block)
    generator = pair.make_generator(plain if block == 1 else drafting)
    seconds, steps, tokens = 0.0, 0, 0
    for first in range(0, len(requests) - batch + 1, batch):
        for request in requests[first : first + batch]:
            generator.submit(request)
        begun: set[int] = set()
        ended = False
        while generator.has_work:
            is_full = len(begun) == batch and not ended
            started = time.process_time()
            events = generator.step()
            if is_full:
                seconds += time.process_time() - started
                steps += 1
                tokens += sum(len(event.token_ids) for event in events)
            begun |= {event.request_id for event in events}
            ended = ended or any(event.result is not None for event in events)
    if not steps:
        what = f"no step decoded {batch} sequences"
        raise DflashError(what, where=pair.bundle.folder, fix="raise --max-tokens")
    return {
        "ms_per_step": seconds / steps * 1e3,
        "acceptance_length": tokens / steps / batch,
        "tokens_per_cpu_second": tokens / seconds,
    }


def _summarize(found: dict[str, list[dict[str, float]]], baseline: str, batch: int) -> Figures:
    rates = {name: [run["tokens_per_cpu_second"] for run in runs] for name, runs in found.items()}
    figures: Figures = {}
    for name, runs in found.items():
        ratio = spread_of_ratios(rates[name], rates[baseline])
        figures[name] = {**spreads(runs, *runs[0]), "to_baseline": ratio}
        click.echo(
            f"batch {batch}, {name}: {show(figures[name]['ms_per_step'], '.2f')} ms a step, "
            f"τ {runs[-1]['acceptance_length']:.2f}, × {show(ratio, '.2f')}"
        )
    return figures


def read_named_bundles(texts: Sequence[str], target: Bundle | None) -> dict[str, Bundle]:
    """The bundles of NAME=BUNDLE texts, by name.

    Raises:
        DflashError: one that cannot be read, or whose target is not that of `target`, or of the
            first where there is none (usage).
    """
    found: dict[str, Bundle] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name in found:
            raise DflashError(f"{text!r} is not one NAME=BUNDLE", usage=True)
        found[name] = open_bundle(Path(path))
        target = target or found[name]
        if _target_of(found[name]) != _target_of(target):
            what = f"has another target than {target.folder}"
            raise DflashError(what, where=path, usage=True)
    return found


def _target_of(bundle: Bundle) -> list[tuple[int, str | None]]:
    """What tells a bundle's target from others: sizes and headers of its weight files."""
    files = bundle.manifest.files
    return [
        (one.bytes, one.header_sha256) for one in files if one.path.startswith("weights/target/")
    ]
