"""Would as many rows as a step's drafts are worth beat the tuned block? A simulation.

Greedy answers of the bundle's prompts are replayed at every position. The draft's own probability
of what it drafts, multiplied up to each slot and set right by the acceptance that such products had
in every second answer, says how many rows a verify step of several sequences should have: those
with most expected tokens a second, by the step times that `tune` measured. Against it stand the
best fixed number of rows, and one that knows what will be accepted, which no confidence can beat.
A cut step is charged what a whole step of so few rows costs, draft included: that is too little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.bundles import requests_of
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.pair import LoadedPair
from dflash_trt.replay.anchors import every_anchor
from dflash_trt.replay.edits import Edits
from dflash_trt.replay.graphs import ReplayGraphs
from dflash_trt.speculation.prediction import StepPrediction
from dflash_trt.tuning.bundle_schedule import NONE

BINS = 10
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Chain:
    """Of one answer, at each of N anchors: the products [N,S-1] of the drafts' probabilities up to
    each slot, and how many drafts are right [N]."""

    products: Floats
    right: npt.NDArray[np.int64]


class ReachCalibration:
    """How often all drafts up to a slot were right where their product was about as large."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        products = np.concatenate([one.products for one in chains])
        right = np.concatenate([one.right for one in chains])
        slots = products.shape[1]
        happened = right[:, None] > np.arange(slots)
        self._edges = [np.quantile(column, np.arange(1, BINS) / BINS) for column in products.T]
        self._rates = []
        for slot, edges in enumerate(self._edges):
            bins = np.searchsorted(edges, products[:, slot])
            overall = happened[:, slot].mean()
            rates = [
                happened[bins == one, slot].mean() if (bins == one).any() else overall
                for one in range(BINS)
            ]
            self._rates.append(np.array(rates))

    def chances(self, products: Floats) -> Floats:
        """[B,S-1] of products [B,S-1]."""
        columns = [
            rates[np.searchsorted(edges, column)]
            for edges, rates, column in zip(self._edges, self._rates, products.T, strict=True)
        ]
        return np.stack(columns, 1)


Choose = Callable[[Floats, npt.NDArray[np.int64]], int]
"""Rows of a step, from products [B,S-1] and how many drafts are right [B]."""


def simulate(
    chains: Sequence[Chain], batch: int, choose: Choose, seconds: Callable[[int], float]
) -> float:
    """Tokens a second of `batch` sequences that go through `chains` in turn, all of them twice."""
    queue = [one for _ in range(2) for one in range(len(chains))]
    running: list[list[int]] = []
    tokens, spent = 0, 0.0
    while queue or running:
        while queue and len(running) < batch:
            running.append([queue.pop(0), 0])
        if len(running) < batch:
            return tokens / spent  # the ramp down is another batch
        products = np.stack([chains[answer].products[anchor] for answer, anchor in running])
        right = np.array([chains[answer].right[anchor] for answer, anchor in running])
        rows = choose(products, right)
        spent += seconds(rows)
        for place, kept in zip(running, np.minimum(right, rows - 1).tolist(), strict=True):
            left = len(chains[place[0]].right) - place[1]
            tokens += min(kept + 1, left)
            place[1] += kept + 1
        running = [one for one in running if one[1] < len(chains[one[0]].right)]
    return tokens / spent


@bench(runs=1)
def measure(
    work: Work,
    bundle: Path,
    *,
    batch: tuple[int, ...] = (1, 2, 4, 8, 16),
    max_tokens: int = 128,
    limit_prompts: int | None = None,
) -> Figures:
    opened = open_bundle(bundle)
    requests = requests_of(opened, max_tokens)[:limit_prompts]
    with LoadedPair(opened, threads=1, graphs=GRAPH_NAMES) as pair:
        schedule = pair.schedule
        if schedule is None or schedule.measured is None:
            what = "has no schedule"
            raise DflashError(what, where=bundle, fix="`dflash-trt tune` it", usage=True)
    with LoadedPair(opened, threads=1, block_schedule=NONE, graphs=GRAPH_NAMES) as pair:
        answers = [result.token_ids for result in pair.run(requests)]
    block = opened.manifest.limits.block_size
    graphs = ReplayGraphs(opened, 1, Edits())
    chains = [
        _chain(graphs, request.prompt_ids, answer, block)
        for request, answer in zip(requests, answers, strict=True)
        if len(answer) > 1
    ]
    graphs.close()
    calibration, tested = ReachCalibration(chains[::2]), chains[1::2]
    prediction = StepPrediction(schedule.measured, schedule.fallback, block)
    by_batch: Figures = {}
    for size in batch:
        by_batch[str(size)] = _compare(tested, size, calibration, prediction)
        _show(size, by_batch[str(size)])
    kind = opened.manifest.draft.kind
    return {"pair": opened.manifest.name, "kind": kind, "by_batch": by_batch}


def _chain(graphs: ReplayGraphs, prompt: Sequence[int], answer: Sequence[int], block: int) -> Chain:
    products, right = [], []
    for _, logits, wanted in every_anchor(graphs, prompt, answer, block):
        wide = logits.astype(np.float64)
        best = wide.max(axis=1, keepdims=True)
        products.append(np.cumprod(1 / np.exp(wide - best).sum(axis=1)))
        equal = wide[: len(wanted)].argmax(axis=1) == wanted
        right.append(len(wanted) if equal.all() else int(equal.argmin()))
    return Chain(np.stack(products), np.array(right, np.int64))


def _compare(
    chains: Sequence[Chain], batch: int, calibration: ReachCalibration, prediction: StepPrediction
) -> Figures:
    choices = prediction.choices

    def seconds(rows: int) -> float:
        return prediction.seconds(batch, rows)

    def by_confidence(products: Floats, right: npt.NDArray[np.int64]) -> int:
        reach = np.cumsum(calibration.chances(products).sum(axis=0))
        expected = {rows: batch + (reach[rows - 2] if rows > 1 else 0.0) for rows in choices}
        return max(choices, key=lambda rows: expected[rows] / seconds(rows))

    def by_oracle(products: Floats, right: npt.NDArray[np.int64]) -> int:
        emitted = {rows: (np.minimum(right, rows - 1) + 1).sum() for rows in choices}
        return max(choices, key=lambda rows: emitted[rows] / seconds(rows))

    def run(choose: Choose) -> float:
        return simulate(chains, batch, choose, seconds)

    fixed = {rows: run(lambda products, right, rows=rows: rows) for rows in choices}  # type: ignore[misc]
    best = max(fixed, key=fixed.__getitem__)
    return {
        "best_fixed_rows": best,
        "tokens_per_second_fixed": fixed[best],
        "by_confidence": run(by_confidence) / fixed[best],
        "by_knowledge": run(by_oracle) / fixed[best],
    }


def _show(batch: int, figures: Figures) -> None:
    click.echo(
        f"batch {batch}: rows by confidence / the best fixed {figures['best_fixed_rows']}: "
        f"{figures['by_confidence']:.3f}; with knowledge {figures['by_knowledge']:.3f}"
    )
