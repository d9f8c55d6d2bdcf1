"""Builds graphs of any form, and runs them on NumPy caches: every output is a new array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from dflash_trt.backends.onnxruntime.session import open_session
from dflash_trt.graph.bindings import (
    BLOCK_IDS,
    CACHE_START,
    LOGIT_ROWS,
    PAGE_TABLE,
    TOKEN_IDS,
    GraphName,
)
from dflash_trt.graph.draft import build_draft
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.target import build_target
from dflash_trt.models.safetensors_header import read_header
from tests.graph.functions import FLOAT8, Array, run_session
from tests.pairs import TinyPair
from tests.reference.compare import stack_error

Int64Array = npt.NDArray[np.int64]
Arrays = dict[str, Array]
KINDS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
KINDS["tensor(float8e4m3fn)"] = FLOAT8


def build(built: TinyPair, graph: GraphName, form: GraphForm) -> onnx.ModelProto:
    """A graph over the bundle's own files."""
    folder = built.bundle.folder
    tables = read_header(folder / "weights" / "tables.safetensors")
    sources = (built.pair.target.weights, built.pair.draft.weights)
    shards = {
        entry.file: f"weights/{owner}/shard-00000.safetensors"
        for owner, weights in zip(("target", "draft"), sources, strict=True)
        for entry in weights.values()
    }
    shards |= {entry.file: "weights/tables.safetensors" for entry in tables.values()}
    arguments = (tables, lambda entry: shards[entry.file], form)
    if graph == "draft":
        return build_draft(built.pair, *arguments)
    draft = built.pair.draft if graph == "target" else None
    return build_target(built.pair.target, draft, *arguments)


def open_model(built: TinyPair, model: onnx.ModelProto) -> ort.InferenceSession:
    """A session of a graph that `build` made, for one thread."""
    path = built.bundle.folder / "opened.onnx"  # external data lies beside it
    path.write_bytes(model.SerializeToString())
    session = open_session(path, 1)
    path.unlink()
    return session


class GraphRunner:
    """Graphs of `built`, or `models`, over caches of `batch` sequences, `length` positions each.

    Caches begin as `fill`; a `page_table` [B,C] says that they are pools.
    """

    def __init__(
        self,
        built: TinyPair,
        batch: int = 1,
        length: int = 128,
        models: Mapping[GraphName, onnx.ModelProto] | None = None,
        *,
        page_table: Array | None = None,
        fill: float = 0,
    ) -> None:
        self._built = built
        self._batch, self._length = batch, length
        self._page_table, self._fill = page_table, fill
        self._models = models or {}
        self._sessions: dict[GraphName, ort.InferenceSession] = {}
        self.caches: Arrays = {}

    def target(
        self,
        ids: Int64Array,
        starts: Sequence[int],
        *,
        graph: GraphName = "target",
        logit_rows: Int64Array | None = None,
    ) -> Arrays:
        """ids [B,S] at positions starts [B] on; all rows' logits unless `logit_rows` says else."""
        if logit_rows is None:
            logit_rows = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        return self._run(graph, {TOKEN_IDS: ids, LOGIT_ROWS: logit_rows}, starts)

    def draft(self, anchors: Sequence[int], starts: Sequence[int], block_size: int) -> Arrays:
        """A block of `block_size` slots from each of anchors [B]; keeps the caches as they were."""
        blocks = np.full((len(anchors), block_size), self._built.pair.draft.mask_token_id, np.int64)
        blocks[:, 0] = anchors
        before = dict(self.caches)
        outputs = self._run("draft", {BLOCK_IDS: blocks}, starts)
        self.caches |= before
        return outputs

    def _run(self, graph: GraphName, feeds: Arrays, starts: Sequence[int]) -> Arrays:
        if graph not in self._sessions:
            self._sessions[graph] = self._open(graph)
        session = self._sessions[graph]
        names = {value.name for value in session.get_inputs()}
        feeds = {name: array for name, array in self.caches.items() if name in names} | feeds
        feeds[CACHE_START] = np.asarray(starts, np.int64)
        if self._page_table is not None:
            feeds[PAGE_TABLE] = self._page_table
        outputs = run_session(session, feeds)
        updated = {name.removesuffix("_out"): array for name, array in outputs.items()}
        self.caches |= {name: array for name, array in updated.items() if name in self.caches}
        return outputs

    def _open(self, graph: GraphName) -> ort.InferenceSession:
        """The session of a graph; makes its caches."""
        if graph in self._models:
            session = open_model(self._built, self._models[graph])
        else:
            session = open_session(self._built.bundle.folder / f"{graph}.onnx", 1)
        for value in session.get_inputs():
            if "_k_" in value.name or "_v_" in value.name:
                shape = value.shape
                if self._page_table is None:
                    shape = (self._batch, shape[1], self._length, shape[3])
                cache = np.full(shape, self._fill, np.float32).astype(KINDS[value.type])
                self.caches.setdefault(value.name, cache)
        return session


def chunks(length: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of consecutive chunks of `sizes`, repeated until `length` is covered."""
    start, index = 0, 0
    while start < length:
        end = min(start + sizes[index % len(sizes)], length)
        yield start, end
        start, index = end, index + 1


BOUND = stack_error(9)
"""Six layers of a target, and three of a draft where it reads them."""


def tokens(vocab: int, batch: int, length: int, seed: int = 0) -> Int64Array:
    return np.random.default_rng(seed).integers(0, vocab, (batch, length))
