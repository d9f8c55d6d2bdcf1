"""Binds calls: which device address every tensor of an engine has, for one shape and slot range."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_trt.backends.base import Scores, TargetGraph
from dflash_trt.backends.tensorrt.run.buckets import Bucket, Field, Layout, Pass
from dflash_trt.backends.tensorrt.run.device_caches import DeviceCaches
from dflash_trt.backends.tensorrt.run.device_pages import DevicePages
from dflash_trt.graph.bindings import (
    ACCEPTED,
    BLOCK_IDS,
    CACHE_START,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    CHOICE_IDS,
    DRAFT_TOKEN_IDS,
    LOGIT_ROWS,
    LOGITS,
    NEW_START,
    NEW_TOKENS,
    NEXT_BLOCK_IDS,
    PAGE_TABLE,
    SAMPLING,
    TOKEN_IDS,
    GraphName,
)

Shapes = dict[str, tuple[int, ...]]
Addresses = dict[str, int]


def lay_out(
    ids: str, batch: int, rows: int, picked: int, *, kept: int, columns: int, draws: bool
) -> tuple[Layout, Layout]:
    """Inputs and outputs of a call whose ids are called `ids`, with `kept` candidates a row.

    Paged caches have a table of `columns`, 0 is none. What every call copies back comes first.
    Where the engine `draws` there are no candidates, and the next step's ids and starts lie beside
    each other as they do among the inputs of a step.
    """
    starts = (batch,)
    inputs = [
        Field(ids, (batch, rows), np.int64),
        Field(CACHE_START, starts, np.int64),
        Field(LOGIT_ROWS, (batch, picked), np.int64),
    ]
    outputs = [
        Field(DRAFT_TOKEN_IDS, (batch, rows), np.int64),
        Field(CHOICE_IDS, (batch, picked), np.int64),
    ]
    if columns:
        inputs.append(Field(PAGE_TABLE, (batch, columns), np.int32))
    if draws:
        inputs.append(Field(SAMPLING, (batch, 4), np.int64))
        outputs += [
            Field(NEXT_BLOCK_IDS, (batch, picked), np.int64),
            Field(NEW_START, starts, np.int64),
            Field(NEW_TOKENS, (batch, picked), np.int64),
            Field(ACCEPTED, starts, np.int32),
        ]
    else:
        outputs += [
            Field(CANDIDATE_IDS, (batch, picked, kept), np.int64),
            Field(CANDIDATE_LOGITS, (batch, picked, kept), np.float32),
        ]
    return Layout(inputs), Layout(outputs)


class Binder:
    """Makes buckets over buffers that never move.

    Args:
        caches: the KV caches.
        graph_caches: (input, output) names of each graph's caches.
        inputs, outputs, logits: device addresses of the buffers.
        kept: candidates a row.
        draws: whether the engines draw tokens themselves.
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
        draws: bool,
    ) -> None:
        self._caches = caches
        self._graph_caches = graph_caches
        self._inputs = inputs
        self._outputs = outputs
        self._logits = logits
        self._kept = kept
        self._draws = draws

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
        return Bucket((target,), inputs, outputs, self._copied(outputs, scores))

    def bind_step(self, first_slot: int, batch: int, rows: int, scores: Scores) -> Bucket:
        """A draft pass, and a verify pass that reads the draft's output where it lies."""
        inputs, outputs = self._lay_out(BLOCK_IDS, batch, rows, rows)
        drafted = self._outputs + outputs.offset(DRAFT_TOKEN_IDS)
        shapes, addresses = self._bind("draft", first_slot, inputs, (BLOCK_IDS, CACHE_START))
        addresses[DRAFT_TOKEN_IDS] = drafted
        draft = Pass("draft", {"B": batch, "S": rows}, shapes, addresses)
        verify = self._bind_target("target", first_slot, drafted, rows, inputs, outputs)
        return Bucket((draft, verify), inputs, outputs, self._copied(outputs, scores))

    def _lay_out(self, ids: str, batch: int, rows: int, picked: int) -> tuple[Layout, Layout]:
        columns, draws = self._caches.columns, self._draws
        return lay_out(ids, batch, rows, picked, kept=self._kept, columns=columns, draws=draws)

    def _copied(self, outputs: Layout, scores: Scores) -> int:
        """Bytes of the outputs that a call brings to the host."""
        if scores is Scores.CANDIDATES:
            return outputs.size
        return outputs.offset(NEW_TOKENS if self._draws else CANDIDATE_IDS)

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
        names = [CACHE_START, LOGIT_ROWS]
        told = [CHOICE_IDS]
        if self._draws:
            names.append(SAMPLING)
            if graph == "target":
                told += [NEXT_BLOCK_IDS, NEW_START, NEW_TOKENS, ACCEPTED]
        else:
            told += [CANDIDATE_IDS, CANDIDATE_LOGITS]
        shapes, addresses = self._bind(graph, first_slot, inputs, names)
        shapes[TOKEN_IDS], addresses[TOKEN_IDS] = (batch, rows), token_ids
        for name in told:
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
