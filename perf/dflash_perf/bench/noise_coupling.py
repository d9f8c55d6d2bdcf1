"""Would a draft that chooses with the target's own noise be accepted more often? By replay.

Sampled answers of the bundle's prompts are replayed at every position. In place of its likeliest
token, slot k drafts argmax(beta_k log q_k + g), with the very Gumbel noise g by which the target
drew the token there; beta of infinity is the likeliest token. Each slot's beta is fitted on
every second answer, in turn, and the loop is walked over the others. A block's slots do
not see each other's choices, so for DFlash the figures are what the loop would count; a draft that
feeds its choices on (DSpark, EAGLE-3) is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
import numpy as np
import numpy.typing as npt

from dflash_perf.bench.anchors import every_anchor
from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.bundles import requests_of
from dflash_trt.backends.base import FloatArray, Int64Array
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.pair import LoadedPair
from dflash_trt.replay.edits import Edits
from dflash_trt.replay.graphs import ReplayGraphs
from dflash_trt.runtime import Request
from dflash_trt.sampling.noise import draw_gumbel
from dflash_trt.tuning.bundle_schedule import NONE

BETAS = (1.0, 2.0, 4.0, 8.0, math.inf)
PLAIN = len(BETAS) - 1


@dataclass(frozen=True, slots=True)
class Matches:
    """Of one answer: whether the draft of each beta is its token.

    `hits` [N,S-1,len(BETAS)] of N anchors; False behind the answer's end.
    """

    hits: npt.NDArray[np.bool_]

    def tau(self, betas: Sequence[int]) -> tuple[int, int]:
        """Tokens and steps of the loop with the beta of each slot, by its index."""
        slots = np.arange(self.hits.shape[1])
        kept = np.cumprod(self.hits[:, slots, list(betas)], axis=1).sum(axis=1)
        anchor = tokens = steps = 0
        while anchor < len(kept):
            steps += 1
            emitted = min(int(kept[anchor]) + 1, len(kept) - anchor)
            tokens += emitted
            anchor += emitted
        return tokens, steps


def coupled(logits: FloatArray, seed: int, position: int) -> Int64Array:
    """What slots [S-1,V], of which the first drafts `position`, choose with each of BETAS."""
    found = np.empty((len(logits), len(BETAS)), np.int64)
    for slot, row in enumerate(logits):
        ids = np.flatnonzero(np.isfinite(row))
        noise = draw_gumbel(seed, position + slot, ids)
        own = row[ids].astype(np.float64)
        for index, beta in enumerate(BETAS[:PLAIN]):
            found[slot, index] = ids[np.argmax(beta * own + noise)]
        found[slot, PLAIN] = ids[np.argmax(own)]
    return found


def replay(graphs: ReplayGraphs, request: Request, answer: Sequence[int], block: int) -> Matches:
    """Drafts at every anchor of one answer."""
    hits = np.zeros((len(answer) - 1, block - 1, len(BETAS)), np.bool_)
    for index, (anchor, logits, wanted) in enumerate(
        every_anchor(graphs, request.prompt_ids, answer, block)
    ):
        drafts = coupled(logits[: len(wanted)], request.sampling.seed, anchor + 1)
        hits[index, : len(wanted)] = drafts == wanted[:, None]
    return Matches(hits)


def fit(answers: Sequence[Matches], slots: int) -> list[int]:
    """The beta of each slot, by its index: the one that is right most often where all before it
    are. An equal one that is sharper is taken."""
    hits = np.concatenate([one.hits for one in answers])
    reached = np.ones(len(hits), np.bool_)
    chosen: list[int] = []
    for slot in range(slots):
        counts = hits[reached, slot].sum(axis=0)
        best = int(len(BETAS) - 1 - np.argmax(counts[::-1]))
        chosen.append(best)
        reached &= hits[:, slot, best]
    return chosen


def mean_tau(answers: Sequence[Matches], betas: Sequence[int]) -> float:
    tokens, steps = np.sum([one.tau(betas) for one in answers], axis=0)
    return float(tokens / steps)


@bench(runs=1)
def measure(
    work: Work,
    bundle: Path,
    *,
    temperature: Annotated[tuple[float, ...], "Of the answers."] = (0.7, 1.0),
    max_tokens: int = 128,
    limit_prompts: Annotated[int | None, "Take the first of the bundle's."] = None,
) -> Figures:
    opened = open_bundle(bundle)
    draft = opened.manifest.draft
    if draft.kind != "DFlash":
        what = f"has a {draft.kind} draft, whose slots go on from what was chosen before"
        raise DflashError(what, where=bundle, fix="take a DFlash draft", usage=True)
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
        by_temperature[str(heat)] = _compare(found[::2], found[1::2], block - 1)
        _show(heat, by_temperature[str(heat)])
    graphs.close()
    return {"pair": opened.manifest.name, "block": block, "by_temperature": by_temperature}


def _compare(half: Sequence[Matches], other: Sequence[Matches], slots: int) -> Figures:
    betas = fit(half, slots)
    plain = mean_tau(other, [PLAIN] * slots)
    every = {_name(i): mean_tau(other, [i] * slots) for i in range(len(BETAS))}
    reached = np.concatenate([one.hits for one in other])
    return {
        "answers": [len(half), len(other)],
        "betas": [_name(index) for index in betas],
        "tau_likeliest": plain,
        "tau_fitted": mean_tau(other, betas),
        "gain": mean_tau(other, betas) / plain - 1,
        "tau_by_one_beta": every,
        "accepted_in_slot_1": dict(
            zip(map(_name, range(len(BETAS))), reached[:, 0].mean(axis=0).tolist(), strict=True)
        ),
    }


def _name(index: int) -> str:
    return f"{BETAS[index]:g}"


def _show(heat: float, figures: Figures) -> None:
    click.echo(
        f"T {heat:g}: tau {figures['tau_likeliest']:.2f} by the likeliest token, "
        f"{figures['tau_fitted']:.2f} with betas {', '.join(figures['betas'])} "
        f"({100 * figures['gain']:+.1f} %); one beta for all slots: "
        + ", ".join(f"{name} {tau:.2f}" for name, tau in figures["tau_by_one_beta"].items())
    )
