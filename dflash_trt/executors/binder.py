"""Binds calls: which device address every tensor of an engine has, for one shape and slot range."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_trt.executors.base import Scores, TargetGraph
from dflash_trt.executors.buckets import Bucket, Field, Layout, Pass
from dflash_trt.executors.device_caches import DeviceCaches
from dflash_trt.executors.device_pages import DevicePages
from dflash_trt.graph.bindings import (
    BLOCK_IDS,
    CACHE_START,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    CHOICE_IDS,
    DRAFT_TOKEN_IDS,
    LOGIT_ROWS,
    LOGITS,
    PAGE_TABLE,
    TOKEN_IDS,
    GraphName,
)

Shapes = dict[str, tuple[int, ...]]
Addresses = dict[str, int]


def lay_out(
    ids: str, batch: int, rows: int, picked: int, kept: int, columns: int
) -> tuple[Layout, Layout]:
    """Inputs and outputs of a call whose ids are called `ids`, with `kept` candidates a row.

    Paged caches have a table of `columns`, 0 is none. What every call copies back comes first.
    """
    table = [Field(PAGE_TABLE, (batch, columns), np.int32)] if columns else []
    inputs = Layout(
        [
            Field(ids, (batch, rows), np.int64),
            Field(CACHE_START, (batch,), np.int64),
            Field(LOGIT_ROWS, (batch, picked), np.int64),
            *table,
        ]
    )
    outputs = Layout(
        [
            Field(DRAFT_TOKEN_IDS, (batch, rows), np.int64),
            Field(CHOICE_IDS, (batch, picked), np.int64),
            Field(CANDIDATE_IDS, (batch, picked, kept), np.int64),
            Field(CANDIDATE_LOGITS, (batch, picked, kept), np.float32),
        ]
    )
    return inputs, outputs


class Binder:
    """Makes buckets over buffers that never move.

    Args:
        caches: the KV caches.
        graph_caches: (input, output) names of each graph's caches.
        inputs, outputs, logits: device addresses of the buffers.
        kept: candidates a row.
    """

    def __init__(
        self,
        caches: DeviceCaches | DevicePages,
        graph_caches: dict[GraphName, list[tuple[str, str]]],
        *,
        inputs: int,
        outputs: int,
        logits: int,
        kept: int,
    ) -> None:
        self._caches = caches
        self._graph_caches = graph_caches
        self._inputs = inputs
        self._outputs = outputs
        self._logits = logits
        self._kept = kept

    def bind_call(
        self,
        graph: TargetGraph,
        first_slot: int,
        batch: int,
        rows: int,
        picked: int,
        scores: Scores,
    ) -> Bucket:
        """A target graph alone, on token ids that the host sends."""
        inputs, outputs = self._lay_out(TOKEN_IDS, batch, rows, picked)
        sent = self._inputs + inputs.offset(TOKEN_IDS)
        target = self._bind_target(graph, first_slot, sent, rows, inputs, outputs)
        return Bucket((target,), inputs, outputs, _copied(outputs, scores))

    def bind_step(self, first_slot: int, batch: int, rows: int, scores: Scores) -> Bucket:
        """A draft pass, and a verify pass that reads the draft's output where it lies."""
        inputs, outputs = self._lay_out(BLOCK_IDS, batch, rows, rows)
        drafted = self._outputs + outputs.offset(DRAFT_TOKEN_IDS)
        shapes, addresses = self._bind("draft", first_slot, inputs, (BLOCK_IDS, CACHE_START))
        addresses[DRAFT_TOKEN_IDS] = drafted
        draft = Pass("draft", {"B": batch, "S": rows}, shapes, addresses)
        verify = self._bind_target("target", first_slot, drafted, rows, inputs, outputs)
        return Bucket((draft, verify), inputs, outputs, _copied(outputs, scores))

    def _lay_out(self, ids: str, batch: int, rows: int, picked: int) -> tuple[Layout, Layout]:
        return lay_out(ids, batch, rows, picked, self._kept, self._caches.columns)

    def _bind_target(
        self,
        graph: TargetGraph,
        first_slot: int,
        token_ids: int,
        rows: int,
        inputs: Layout,
        outputs: Layout,
    ) -> Pass:
        """A target pass over the token ids at device address `token_ids`."""
        batch, picked = inputs.shape(LOGIT_ROWS)
        shapes, addresses = self._bind(graph, first_slot, inputs, (CACHE_START, LOGIT_ROWS))
        shapes[TOKEN_IDS], addresses[TOKEN_IDS] = (batch, rows), token_ids
        for name in (CHOICE_IDS, CANDIDATE_IDS, CANDIDATE_LOGITS):
            addresses[name] = self._outputs + outputs.offset(name)
        addresses[LOGITS] = self._logits
        return Pass(graph, {"B": batch, "S": rows, "R": picked}, shapes, addresses)

    def _bind(
        self, graph: GraphName, first_slot: int, inputs: Layout, names: Sequence[str]
    ) -> tuple[Shapes, Addresses]:
        """The caches of a slot range, and the inputs called `names`."""
        (batch,) = inputs.shape(CACHE_START)
        names = (*names, PAGE_TABLE) if PAGE_TABLE in inputs else names
        shapes: Shapes = {name: inputs.shape(name) for name in names}
        addresses: Addresses = {name: self._inputs + inputs.offset(name) for name in names}
        for name, updated in self._graph_caches[graph]:
            shapes[name] = self._caches.shape(name, batch)
            addresses[name] = addresses[updated] = self._caches.address(name, first_slot)
        return shapes, addresses


def _copied(outputs: Layout, scores: Scores) -> int:
    """Bytes of the outputs that a call brings to the host."""
    return outputs.size if scores is Scores.CANDIDATES else outputs.offset(CANDIDATE_IDS)
