"""What a draft says behind every token of a known answer, and the loop over what was right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dflash_trt.backends.base import FloatArray, Int64Array
from dflash_trt.replay.graphs import ReplayGraphs

TOGETHER = 16
"""Anchors of one answer in a draft pass."""


def every_anchor(
    graphs: ReplayGraphs, prompt_ids: Sequence[int], answer: Sequence[int], block: int
) -> Iterator[tuple[int, FloatArray, Int64Array]]:
    """Position, the draft's logits [S-1,V] and the answer's tokens behind it [≤ S-1], of every
    token of `answer` that has one behind it: wherever the loop may put an anchor."""
    ids = np.array([*prompt_ids, *answer], np.int64)
    context = graphs.run_target(ids[:-1].tolist())
    caches = graphs.make_caches(TOGETHER, len(ids) + block)
    for slot in range(TOGETHER):
        caches.fill(slot, context)
    anchors = np.arange(len(prompt_ids), len(ids) - 1)
    for begin in range(0, len(anchors), TOGETHER):
        some = anchors[begin : begin + TOGETHER]
        _, logits = graphs.run_draft(caches, 0, ids[some], some, block)
        for slot, anchor in enumerate(some.tolist()):
            yield anchor, logits[slot], ids[anchor + 1 : anchor + block]
            # The block's own rows lie where the target's features were.
            caches.restore(slot, context, anchor, anchor + block)


def walk_loop(right: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Tokens and steps of the loop over an answer: `right` [N,S-1] of each slot at each anchor."""
    kept = np.cumprod(right, axis=1).sum(axis=1)
    anchor = tokens = steps = 0
    while anchor < len(kept):
        steps += 1
        emitted = min(int(kept[anchor]) + 1, len(kept) - anchor)
        tokens += emitted
        anchor += emitted
    return tokens, steps


def mean_tau(walks: Sequence[tuple[int, int]]) -> float:
    """Tokens of a step over all answers, of their tokens and steps."""
    tokens, steps = np.sum(walks, axis=0)
    return float(tokens / steps)
