"""Training batches: rows, anchors drawn in their answers, and the tokens each block must say.

Shapes: R rows, T tokens of the longest, A anchors a row, S slots a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_trt.training.features import FeatureStore

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a step, padded to the longest.

    Args:
        features: [R, T, (taps + 1) · hidden] bfloat16, as in the store.
        anchors: [R, A] int64, positions of the blocks' first slots. A row with fewer repeats its
            last one, with labels that are all ignored.
        anchor_ids: [R, A] int64, the tokens there.
        labels: [R, A, S] int64: slot j's own token, the one at anchor + j; IGNORED for slot 0 and
            behind the row's end.
        tokens: [R, T] int64, the rows' own; 0 behind their ends.
    """

    features: Tensor
    anchors: Tensor
    anchor_ids: Tensor
    labels: Tensor
    tokens: Tensor


def order_rows(store: FeatureStore, rows: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch, `rows` indices each: shuffled, rows of like length together.

    Rows too short for an anchor and a label are left out. The last batch may be smaller.
    """
    lengths = store.rows[:, 2] - store.rows[:, 1]
    usable = np.flatnonzero((lengths >= 2) & (store.rows[:, 1] >= 1))
    generator = np.random.default_rng([seed, epoch])
    generator.shuffle(usable)
    batches: list[list[int]] = []
    together = rows * 16
    for first in range(0, len(usable), together):
        some = usable[first : first + together]
        some = some[np.argsort(store.rows[some, 2], kind="stable")]
        batches += [some[i : i + rows].tolist() for i in range(0, len(some), rows)]
    order = generator.permutation(len(batches))
    return [batches[i] for i in order]


def draw_batch(
    store: FeatureStore, rows: Sequence[int], anchors: int, block_size: int, seed: int, step: int
) -> Batch:
    """The batch of `step`; its anchors depend on seed, step and rows alone.

    An anchor is any token of the answer that has one after it (arXiv 2602.06036, section 4.2).
    """
    generator = np.random.default_rng([seed, step, 1])
    spans = [tuple(map(int, store.rows[row])) for row in rows]
    longest = max(length for _, _, length in spans)
    parts = [store.features[offset : offset + length] for offset, _, length in spans]
    features = np.zeros((len(rows), longest, parts[0].shape[1]), np.uint16)
    ids = np.zeros((len(rows), longest), np.int64)
    most = min(anchors, max(length - 1 - prompt for _, prompt, length in spans))
    places = np.zeros((len(rows), most), np.int64)
    anchor_ids = np.zeros((len(rows), most), np.int64)
    labels = np.full((len(rows), most, block_size), IGNORED, np.int64)
    for row, (offset, prompt, length) in enumerate(spans):
        tokens = store.tokens[offset : offset + length]
        features[row, :length] = parts[row]
        ids[row, :length] = tokens
        count = min(most, length - 1 - prompt)
        drawn = prompt + np.sort(generator.choice(length - 1 - prompt, count, replace=False))
        places[row] = drawn[-1]
        places[row, :count] = drawn
        anchor_ids[row] = tokens[places[row]]
        for slot in range(1, block_size):
            inside = drawn + slot < length
            labels[row, :count, slot][inside] = tokens[drawn[inside] + slot]
    return Batch(
        features=torch.from_numpy(features).view(torch.bfloat16),
        anchors=torch.from_numpy(places),
        anchor_ids=torch.from_numpy(anchor_ids),
        labels=torch.from_numpy(labels),
        tokens=torch.from_numpy(ids),
    )


def common_tokens(store: FeatureStore, count: int) -> Tensor:
    """The `count` commonest token ids of all rows, ascending [≤ count] int64."""
    ids, times = np.unique(store.tokens, return_counts=True)
    order = np.lexsort((ids, -times))[:count]
    return torch.from_numpy(np.sort(ids[order]).astype(np.int64))
