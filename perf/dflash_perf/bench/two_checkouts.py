"""Two checkouts of this project decode the same prompts in turn: is the later one slower?

A process of each builds the demo bundle with its own code, or opens the bundle that is named, and
decodes its prompts with DFlash at the trained block, one sequence at a time and eight together, on
one thread. Seconds are those that the process computed, so that a busy machine disturbs little.
Told are the median of after / before in tokens/s, pair by pair, and a 95 % interval of it by
bootstrap.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.repeat import Worker, interval, take_turns
from dflash_trt.errors import DflashError

_WORKER = """
import json, sys, time
from itertools import islice
import dflash_trt
from pathlib import Path
folder, max_tokens, is_built = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "built"
if not is_built:
    dflash_trt.build("demo", folder, overwrite=True)
prompts = [json.loads(line)["prompt"] for line in (Path(folder) / "prompts.jsonl").open()]
with dflash_trt.load(folder, threads=1, block_schedule="none") as pair:
    for line in sys.stdin:
        batch, count = json.loads(line)
        asked = prompts[:count]
        started, tokens = time.process_time(), 0
        for first in range(0, count, batch):
            results = pair.generate(asked[first:first + batch], max_tokens=max_tokens)
            tokens += sum(len(one.token_ids) for one in results)
        print(json.dumps([tokens, time.process_time() - started]), flush=True)
"""


def open_checkout(folder: Path, bundle: Path, max_tokens: int, is_built: bool) -> Worker:
    """A process that runs the code in `folder` on `bundle`, which it makes unless it `is_built`."""
    if not (folder / "dflash_trt" / "__init__.py").is_file():
        raise DflashError("is no checkout of this project", where=folder, usage=True)
    root, state = folder.resolve(), "built" if is_built else "to build"
    command = [sys.executable, "-c", _WORKER, str(bundle), str(max_tokens), state]
    paths = f"{root}{os.pathsep}{root / 'plugins'}"
    return Worker(command, cwd=root, env={**os.environ, "PYTHONPATH": paths})


def _decode(worker: Worker, batch: int, count: int) -> tuple[int, float]:
    """Tokens, and tokens a second of the process's own."""
    tokens, seconds = worker.ask([batch, count])
    return tokens, tokens / seconds


@bench(runs=15)
def measure(
    work: Work,
    *,
    before: Annotated[Path, "A checkout."],
    after: Annotated[Path, "A later one."],
    bundle: Annotated[Path | None, "Decoded by both; else each builds the demo pair."] = None,
    batch: tuple[int, ...] = (1, 8),
    prompts: int = 8,
    max_tokens: int = 96,
) -> Figures:
    folders = {"before": before, "after": after}
    built = None if bundle is None else bundle.resolve()
    running = {
        name: open_checkout(folder, built or work.folder / name, max_tokens, built is not None)
        for name, folder in folders.items()
    }
    by_batch: dict[str, Any] = {}
    for size in batch:
        ways = {name: partial(_decode, one, size, prompts) for name, one in running.items()}
        found = take_turns(ways, work.runs, warm_up=True)
        if len({tokens for runs in found.values() for tokens, _ in runs}) > 1:
            raise AssertionError("the checkouts differ in their outputs")
        rates = {name: [rate for _, rate in runs] for name, runs in found.items()}
        ratios = [a / b for a, b in zip(rates["after"], rates["before"], strict=True)]
        low, high = interval(ratios)
        by_batch[str(size)] = {
            "after_to_before": median(ratios),
            "interval_95": [low, high],
            "pairs": len(ratios),
            "ratios": ratios,
            "tokens_per_cpu_second": {name: median(each) for name, each in rates.items()},
        }
        click.echo(
            f"batch {size}: after / before {median(ratios):.3f} ({low:.3f} … {high:.3f}) in "
            f"{len(ratios)} pairs"
        )
    for one in running.values():
        one.close()
    return {"clock": "of the processes, one thread each", "by_batch": by_batch}
