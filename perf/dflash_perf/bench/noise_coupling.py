"""Would a draft that chooses with the target's own noise be accepted more often? By replay.

Sampled answers of the bundle's prompts are replayed at every position. In place of its likeliest
token, slot k drafts argmax(s_k logit / T + g), with the very Gumbel noise g by which the target
drew the token there; a sharpness of – is the likeliest token. Each slot's is fitted to every second
answer, and the loop is walked over the others; then the other way round. A block's slots do not see
each other's choices, so for DFlash the figures are what the loop would count; a draft that feeds
its choices on (DSpark, EAGLE-3) is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
import numpy as np
import numpy.typing as npt

from dflash_perf.bench.anchors import every_anchor, mean_tau, open_dflash, walk_loop
from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.bundles import requests_of
from dflash_trt.backends.base import FloatArray, Int64Array
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.pair import LoadedPair
from dflash_trt.replay.edits import Edits
from dflash_trt.replay.graphs import ReplayGraphs
from dflash_trt.runtime import Request
from dflash_trt.sampling.noise import draw_gumbel
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.tuning.bundle_schedule import NONE

SHARPNESS = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0, None)
"""Ascending; None is the likeliest token."""
NAMES = tuple("–" if one is None else f"{one:g}" for one in SHARPNESS)
LIKELIEST = len(SHARPNESS) - 1


@dataclass(frozen=True, slots=True)
class Hits:
    """Of one answer: whether the draft of each of SHARPNESS is its token.

    `right` [N,S-1,len(SHARPNESS)] of N anchors; False behind the answer's end.
    """

    right: npt.NDArray[np.bool_]

    def walk(self, chosen: Sequence[int]) -> tuple[int, int]:
        """Tokens and steps of the loop with the sharpness of each slot, by its index."""
        slots = np.arange(self.right.shape[1])
        return walk_loop(self.right[:, slots, list(chosen)])


def choose(logits: FloatArray, sampling: SamplingParams, position: int) -> Int64Array:
    """What slots [n,V], of which the first drafts `position`, choose with each of SHARPNESS."""
    found = np.empty((len(logits), len(SHARPNESS)), np.int64)
    for slot, row in enumerate(logits):
        ids = np.flatnonzero(np.isfinite(row))
        noise = draw_gumbel(sampling.seed, position + slot, ids)
        scaled = row[ids].astype(np.float64) / sampling.temperature
        for index, sharp in enumerate(SHARPNESS):
            score = scaled if sharp is None else sharp * scaled + noise
            found[slot, index] = ids[np.argmax(score)]
    return found


def replay(graphs: ReplayGraphs, request: Request, answer: Sequence[int], block: int) -> Hits:
    """Drafts at every anchor of one answer."""
    right = np.zeros((len(answer) - 1, block - 1, len(SHARPNESS)), np.bool_)
    anchors = every_anchor(graphs, request.prompt_ids, answer, block)
    for index, (anchor, logits, wanted) in enumerate(anchors):
        drafts = choose(logits[: len(wanted)], request.sampling, anchor + 1)
        right[index, : len(wanted)] = drafts == wanted[:, None]
    return Hits(right)


def fit(answers: Sequence[Hits]) -> list[int]:
    """The sharpness of each slot, by its index: the one that is right most often where all before
    it are. An equal one that is sharper is taken."""
    right = np.concatenate([one.right for one in answers])
    reached = np.ones(len(right), np.bool_)
    chosen: list[int] = []
    for slot in range(right.shape[1]):
        counts = right[reached, slot].sum(axis=0)
        best = int(LIKELIEST - np.argmax(counts[::-1]))
        chosen.append(best)
        reached &= right[:, slot, best]
    return chosen


@bench(runs=1)
def measure(
    work: Work,
    bundle: Path,
    *,
    temperature: Annotated[tuple[float, ...], "Of the answers."] = (0.7, 1.0),
    max_tokens: int = 128,
    limit_prompts: Annotated[int | None, "Take the first of the bundle's."] = None,
) -> Figures:
    opened = open_dflash(bundle, "slots go on from what was chosen before")
    if min(temperature) <= 0:
        raise DflashError("noise decides nothing at 0", where="--temperature", usage=True)
    block = opened.manifest.limits.block_size
    graphs = ReplayGraphs(opened, 1, Edits())
    by_temperature: Figures = {}
    for heat in temperature:
        requests = requests_of(opened, max_tokens, heat)[:limit_prompts]
        with LoadedPair(opened, threads=1, block_schedule=NONE, graphs=GRAPH_NAMES) as pair:
            answers = [result.token_ids for result in pair.run(requests)]
        found = [
            replay(graphs, request, answer, block)
            for request, answer in zip(requests, answers, strict=True)
            if len(answer) > 1
        ]
        by_temperature[str(heat)] = _compare(found, block - 1)
        _show(heat, by_temperature[str(heat)])
    graphs.close()
    return {"pair": opened.manifest.name, "block": block, "by_temperature": by_temperature}


def _compare(answers: Sequence[Hits], slots: int) -> Figures:
    halves = answers[::2], answers[1::2]
    fitted = [one.walk(fit(other)) for mine, other in (halves, halves[::-1]) for one in mine]
    first = np.concatenate([one.right[:, 0] for one in answers]).mean(axis=0)
    every = {
        name: mean_tau([one.walk([index] * slots) for one in answers])
        for index, name in enumerate(NAMES)
    }
    return {
        "answers": len(answers),
        "sharpness": [NAMES[index] for index in fit(answers)],
        "tau_likeliest": every[NAMES[LIKELIEST]],
        "tau_fitted": mean_tau(fitted),
        "gain": mean_tau(fitted) / every[NAMES[LIKELIEST]] - 1,
        "tau_by_one_sharpness": every,
        "accepted_in_slot_1": dict(zip(NAMES, first.tolist(), strict=True)),
    }


def _show(heat: float, figures: Figures) -> None:
    click.echo(
        f"T {heat:g}: tau {figures['tau_likeliest']:.2f} by the likeliest token, "
        f"{figures['tau_fitted']:.2f} with a sharpness by slot fitted to the other half "
        f"({100 * figures['gain']:+.1f} %), to all: {', '.join(figures['sharpness'])}; one for all "
        "slots: "
        + ", ".join(f"{name} {tau:.2f}" for name, tau in figures["tau_by_one_sharpness"].items())
    )
