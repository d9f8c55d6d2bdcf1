"""Runs a bundle's graphs on NumPy caches, without an executor: every output is a new array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_trt.backends.onnxruntime.executor import open_session
from dflash_trt.graph.bindings import (
    BLOCK_IDS,
    CACHE_START,
    LOGIT_ROWS,
    TOKEN_IDS,
    GraphName,
)
from dflash_trt.graph.form import CPU_FORM
from dflash_trt.graph.tensors import cache_layout
from tests.pairs import TinyPair
from tests.reference.compare import stack_error

Int64Array = npt.NDArray[np.int64]
Outputs = dict[str, npt.NDArray[Any]]


class GraphRunner:
    """The graphs of `built` over caches of `batch` sequences, `length` positions each."""

    def __init__(self, built: TinyPair, batch: int = 1, length: int = 128) -> None:
        self._built = built
        self._sessions: dict[GraphName, ort.InferenceSession] = {}
        self.caches: Outputs = {}
        layout = cache_layout(CPU_FORM, built.pair.target.sizes, built.pair.draft.sizes)
        for name, one in layout.shapes().items():
            self.caches[name] = np.zeros((batch, one.kv_heads, length, one.head_dim), np.float32)

    def target(
        self,
        ids: Int64Array,
        starts: Sequence[int],
        *,
        graph: GraphName = "target",
        logit_rows: Int64Array | None = None,
    ) -> Outputs:
        """ids [B,S] at positions starts [B] on; all rows' logits unless `logit_rows` says else."""
        if logit_rows is None:
            logit_rows = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        return self._run(graph, {TOKEN_IDS: ids, LOGIT_ROWS: logit_rows}, starts)

    def draft(self, anchors: Sequence[int], starts: Sequence[int], block_size: int) -> Outputs:
        """A block of `block_size` slots from each of anchors [B]; keeps the caches as they were."""
        blocks = np.full((len(anchors), block_size), self._built.pair.draft.mask_token_id, np.int64)
        blocks[:, 0] = anchors
        before = dict(self.caches)
        outputs = self._run("draft", {BLOCK_IDS: blocks}, starts)
        self.caches = before
        return outputs

    def _run(self, graph: GraphName, feeds: Outputs, starts: Sequence[int]) -> Outputs:
        if graph not in self._sessions:
            self._sessions[graph] = open_session(self._built.bundle.folder / f"{graph}.onnx", 1)
        session = self._sessions[graph]
        names = {i.name for i in session.get_inputs()}
        feeds = {name: array for name, array in self.caches.items() if name in names} | feeds
        feeds[CACHE_START] = np.asarray(starts, np.int64)
        outputs = dict(
            zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True)
        )
        self.caches |= {
            name.removesuffix("_out"): array
            for name, array in outputs.items()
            if name.endswith("_out")
        }
        return outputs


def chunks(length: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of consecutive chunks of `sizes`, repeated until `length` is covered."""
    start, index = 0, 0
    while start < length:
        end = min(start + sizes[index % len(sizes)], length)
        yield start, end
        start, index = end, index + 1


BOUND = stack_error(9)
"""Six layers of a target, and three of a draft where it reads them."""


def tokens(vocab: int, batch: int, length: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, vocab, (batch, length))
