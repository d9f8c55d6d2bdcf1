"""How sharply each draft of a block should follow its logits where it shares the target's noise.

Sampled answers are replayed at every position: which tokens would the draft have chosen with each
of SHARPNESS (see sampling/coupling.py), and which of them are the answer's? A block's slots do not
see each other's choices, so the loop walked over them counts what decoding would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_trt.backends.base import FloatArray, Int64Array
from dflash_trt.core.progress import Progress
from dflash_trt.replay.anchors import every_anchor, mean_tau, walk_loop
from dflash_trt.replay.graphs import ReplayGraphs
from dflash_trt.sampling.coupling import LIKELIEST, DraftCoupling
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.speculation.coupling import Coupling, CouplingGain

SHARPNESS = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0, LIKELIEST)
"""Those that are tried, ascending."""


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """Tokens that the target drew, and with what."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    sampling: SamplingParams


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


def fit_coupling(
    graphs: ReplayGraphs,
    answers: Mapping[float, Sequence[SampledAnswer]],
    block: int,
    pair: str,
    progress: Progress,
) -> Coupling:
    """The sharpness that is right for `answers`, by the temperature that they were drawn at.

    What it brings is measured on every second answer with what the others say.

    Raises:
        DflashError: ONNX Runtime failed.
    """
    progress.stage("replaying", sum(map(len, answers.values())), "steps")
    found: dict[float, list[Hits]] = {}
    for temperature, some in answers.items():
        found[temperature] = []
        for one in some:
            found[temperature].append(replay(graphs, one, block))
            progress.advance(1)
    halves = [[one for hits in found.values() for one in hits[part::2]] for part in (0, 1)]
    fits = [fit(half) for half in halves]
    gains = [
        CouplingGain(
            temperature=temperature,
            answers=len(hits),
            tau_likeliest=mean_tau([one.walk([len(SHARPNESS) - 1] * (block - 1)) for one in hits]),
            tau_coupled=mean_tau(
                [one.walk(fits[1 - number % 2]) for number, one in enumerate(hits)]
            ),
        )
        for temperature, hits in found.items()
    ]
    chosen = fit([one for hits in found.values() for one in hits])
    sharpness = [SHARPNESS[index] for index in chosen]
    return Coupling(pair=pair, sharpness=sharpness, measured=gains)


def choose(logits: FloatArray, sampling: SamplingParams, position: int) -> Int64Array:
    """What slots [n,V], of which the first drafts `position`, choose with each of SHARPNESS."""
    likeliest = logits.argmax(axis=1)
    couplings = [DraftCoupling((sharp,) * len(logits)) for sharp in SHARPNESS]
    return np.stack(
        [one.choose(logits, likeliest, sampling, position) for one in couplings], axis=1
    )


def replay(graphs: ReplayGraphs, answer: SampledAnswer, block: int) -> Hits:
    """Drafts at every anchor of one answer of at least two tokens."""
    right = np.zeros((len(answer.token_ids) - 1, block - 1, len(SHARPNESS)), np.bool_)
    anchors = every_anchor(graphs, answer.prompt_ids, answer.token_ids, block)
    for index, (anchor, logits, wanted) in enumerate(anchors):
        drafts = choose(logits[: len(wanted)], answer.sampling, anchor + 1)
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
        best = int(len(SHARPNESS) - 1 - np.argmax(counts[::-1]))
        chosen.append(best)
        reached &= right[:, slot, best]
    return chosen
