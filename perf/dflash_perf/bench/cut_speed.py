"""Steps cut by how likely their drafts are, decoded in turn with fixed blocks.

It does what `row-cuts` simulates. A draft graph that also tells the softmax of its drafts' own
logits is opened in memory. Half of the prompts are decoded with whole blocks: what the draft says
of its drafts is set right for each slot by a logistic fit of what came of them. Then the others
are decoded, some at a time, with each of the fixed blocks and with the trained block, of which each
step verifies the rows with most expected tokens a second, by step times taken here. Seconds are
those that this process computed, prompts left out, which with one thread hold on a busy machine.
Greedy, linear caches, no schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import click
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.bundles import open_dflash, requests_of
from dflash_perf.bench.repeat import show, spread, spread_of_ratios, take_turns
from dflash_trt.backends.base import Executor, SpeculationOutput, StepCall, TargetCall
from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.backends.onnxruntime.session import bind_array, open_session
from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import (
    BLOCK_IDS,
    CACHE_START,
    DRAFT_TOKEN_IDS,
    GraphName,
)
from dflash_trt.graph.tensors import cache_layout
from dflash_trt.replay.edits import add_output, draft_logits, load_graph
from dflash_trt.runtime import Generator, GeneratorOptions, Request

Floats = npt.NDArray[np.float64]
Chances = npt.NDArray[np.float32]

CUT = "cut"
_CHANCES = "chances"
_ROUNDS, _SECONDS = 4, 0.04
_LEAST, _PRIOR, _NEWTON_STEPS = 1e-6, 1.0, 25


def tell_chances(model: onnx.ModelProto) -> None:
    """Adds an output to a DFlash `draft.onnx`: the softmax [B·(S-1)] of each draft's own logit."""
    axis = helper.make_tensor("chance_axis", TensorProto.INT64, [1], [-1])
    model.graph.initializer.append(axis)
    shares = helper.make_node("Softmax", [draft_logits(model)], ["shares"], axis=-1)
    most = helper.make_node("ReduceMax", ["shares", "chance_axis"], [_CHANCES], keepdims=0)
    model.graph.node.extend([shares, most])
    add_output(model, _CHANCES)


class CuttingExecutor(OnnxRuntimeExecutor):
    """Verifies as many rows of a block as `choose` says of the chances [B,S-1] of its drafts.

    `log` has the chances and the number of good drafts of every sequence and step.
    """

    def __init__(self, bundle: Bundle) -> None:
        plain, manifest = open_executor(bundle, threads=1), bundle.manifest
        layout = cache_layout(manifest.graph_form, manifest.target.sizes, manifest.draft.sizes)
        super().__init__(bundle.folder, plain.limits, layout, threads=1)
        plain.close()
        self.choose: Callable[[Chances], int] = lambda chances: chances.shape[1] + 1
        self.log: list[tuple[Chances, int]] = []

    def speculate(self, call: StepCall) -> SpeculationOutput:
        ids, chances = self._draft(call)
        rows = self.choose(chances)
        every = np.tile(np.arange(rows, dtype=np.int64), (call.batch, 1))
        ids = ids[:, :rows]
        verified = self.forward(
            TargetCall("target", call.first_slot, ids, call.starts, every, call.scores)
        )
        good = np.cumprod(ids[:, 1:] == verified.choice_ids[:, :-1], axis=1).sum(axis=1)
        self.log += zip(chances, good.tolist(), strict=True)
        return SpeculationOutput(ids, verified.choice_ids, verified.logits)

    def _draft(self, call: StepCall) -> tuple[npt.NDArray[np.int64], Chances]:
        columns = self._hold(self.limits.check(call), call.rows)
        axes = {"B": call.batch, "S": call.rows, "R": call.rows, "C": columns}
        bound = self._bind(("draft",), call, axes, set())
        bound.arrays[BLOCK_IDS][...] = call.block_ids(self.limits.mask_token_id)
        bound.arrays[CACHE_START][...] = call.starts
        ((graph, io),) = bound.passes
        chances = np.empty(call.batch * (call.rows - 1), np.float32)
        bind_array(io.bind_output, _CHANCES, chances)
        self._session(graph).run_with_iobinding(io)
        return bound.arrays[DRAFT_TOKEN_IDS], chances.reshape(call.batch, -1)

    def _session(self, graph: GraphName) -> ort.InferenceSession:
        if graph == "draft" and graph not in self._sessions:
            path = self._folder / "draft.onnx"
            model = load_graph(path)
            tell_chances(model)
            self._sessions[graph] = open_session(path, 1, model.SerializeToString())
        return super()._session(graph)


class LogisticReach:
    """How likely all drafts up to a slot are right: a logistic fit for each slot of a log."""

    def __init__(self, log: Sequence[tuple[Chances, int]]) -> None:
        scores = _score(np.array([chances for chances, _ in log]))
        good = np.array([count for _, count in log])
        self.fits = np.array([_fit(scores[:, j], good > j) for j in range(scores.shape[1])])

    def reach(self, chances: Chances) -> Floats:
        """[B,S-1] of the draft's own [B,S-1]; never rises from slot to slot."""
        offsets, slopes = self.fits.T
        return np.minimum.accumulate(_sigmoid(offsets + slopes * _score(chances)), axis=1)


def _fit(score: Floats, happened: npt.NDArray[np.bool_]) -> Floats:
    """Offset and slope by Newton's method, drawn towards 0 and 1."""
    design, prior = np.stack([np.ones_like(score), score], axis=1), np.array([0.0, 1.0])
    weights = prior
    for _ in range(_NEWTON_STEPS):
        found = _sigmoid(design @ weights)
        gradient = design.T @ (found - happened) + _PRIOR * (weights - prior)
        spread_of = (design * (found * (1 - found))[:, None]).T @ design + _PRIOR * np.eye(2)
        weights = weights - np.linalg.solve(spread_of, gradient)
    return weights


def _score(chances: Chances) -> Floats:
    product = np.clip(np.cumprod(chances, axis=1, dtype=np.float64), _LEAST, 1 - _LEAST)
    return np.asarray(np.log(product / (1 - product)))


def _sigmoid(score: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-score)))


@bench(runs=15)
def measure(
    work: Work,
    bundle: Path,
    *,
    concurrency: tuple[int, ...] = (1, 2),
    block: Annotated[tuple[int, ...], "A fixed block to compare with; repeatable."] = (3, 4, 5, 6),
    max_tokens: int = 48,
) -> Figures:
    opened = open_dflash(bundle, "chances are told otherwise")
    if opened.manifest.page_pool is not None or opened.manifest.engines is not None:
        what = "is no bundle for the CPU with linear caches"
        raise DflashError(what, where=bundle, fix="build one", usage=True)
    requests = requests_of(opened, max_tokens)
    cutting, fixed = CuttingExecutor(opened), open_executor(opened, threads=1)
    whole = opened.manifest.limits.block_size
    Generator(cutting, options=GeneratorOptions(block_size=whole)).generate(requests[::2])
    reach, steps = LogisticReach(cutting.log), len(cutting.log)
    by_concurrency: Figures = {}
    for level in concurrency:
        seconds = _time_cuts(cutting, level, whole)
        cutting.log.clear()
        cutting.choose = partial(_choose, reach, seconds)
        ways: dict[str, tuple[Executor, int]] = {CUT: (cutting, whole)}
        ways |= {f"block {rows}": (fixed, rows) for rows in block}
        turns = {
            name: partial(_run, executor, rows, _groups(requests[1::2], level))
            for name, (executor, rows) in ways.items()
        }
        for one in turns.values():
            one()
        rates = take_turns(turns, work.runs, rotate=True)
        best = max(list(rates)[1:], key=lambda name: median(rates[name]))
        ratio = spread_of_ratios(rates[CUT], rates[best])
        by_concurrency[str(level)] = {
            "best_fixed": best,
            "cut_to_best_fixed": ratio,
            "tokens_per_cpu_second": {name: spread(values) for name, values in rates.items()},
            "seconds_of_a_cut_step": seconds,
        }
        click.echo(f"concurrency {level}: cut / {best} {show(ratio, '.3f')}")
        cutting.choose = lambda chances: chances.shape[1] + 1
    fits = reach.fits.tolist()
    return {
        "pair": opened.manifest.name,
        "fitted_steps": steps,
        "offset_and_slope_by_draft": fits,
        "by_concurrency": by_concurrency,
    }


def _choose(reach: LogisticReach, seconds: dict[int, float], chances: Chances) -> int:
    expected = len(chances) + np.cumsum(reach.reach(chances).sum(axis=0))
    return max(seconds, key=lambda rows: expected[rows - 2] / seconds[rows])


def _time_cuts(executor: CuttingExecutor, batch: int, whole: int) -> dict[int, float]:
    """Seconds of a step of `batch` sequences by the rows that are verified: the least of rounds."""
    anchors, starts = np.full(batch, 7), np.full(batch, 100)
    ids = np.full((1, 100), 7)
    for slot in range(batch):
        start, row = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
        executor.forward(TargetCall("target", slot, ids, start, row, is_chunk=True))
    found: dict[int, list[float]] = {rows: [] for rows in range(2, whole + 1)}
    for _ in range(_ROUNDS):
        for rows, taken in found.items():
            executor.choose = lambda chances, rows=rows: rows  # type: ignore[misc]
            executor.speculate(StepCall(0, anchors, starts, whole))
            count, began = 0, time.process_time()
            while (spent := time.process_time() - began) < _SECONDS or not count:
                executor.speculate(StepCall(0, anchors, starts, whole))
                count += 1
            taken.append(spent / count)
    executor.release_slots(0)
    return {rows: min(taken) for rows, taken in found.items()}


def _groups(requests: Sequence[Request], size: int) -> Callable[[], list[Request]]:
    """Gives `size` requests at each call, which go on where those of the call before ended."""
    place = 0

    def following() -> list[Request]:
        nonlocal place
        some = [requests[(place + one) % len(requests)] for one in range(size)]
        place += size
        return some

    return following


def _run(executor: Executor, rows: int, following: Callable[[], list[Request]]) -> float:
    """Tokens a second of requests that decode together, from when all of them do."""
    generator = Generator(executor, options=GeneratorOptions(block_size=rows))
    waiting = {generator.submit(request) for request in following()}
    while waiting:
        waiting -= {event.request_id for event in generator.step()}
    tokens, began = 0, time.process_time()
    while generator.has_work:
        tokens += sum(len(event.token_ids) for event in generator.step())
    return tokens / (time.process_time() - began)
