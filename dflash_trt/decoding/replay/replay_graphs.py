"""ReplayGraphs: the bundle's target and draft, each over caches whose rows can be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_trt.backends.base import FloatArray, Int64Array
from dflash_trt.backends.onnxruntime.caches import (
    RecurrentStates,
    allocate_zeros,
    round_length,
)
from dflash_trt.backends.onnxruntime.session import bind_array, check_session, open_session
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.decoding.replay.edits import (
    Edits,
    GraphEdit,
    add_output,
    add_streams,
    draft_logits,
    load_graph,
)
from dflash_trt.errors import DflashError, one_line
from dflash_trt.graph.bindings import (
    BLOCK_IDS,
    CACHE_START,
    CHOICE_IDS,
    DRAFT_TOKEN_IDS,
    LOGIT_ROWS,
    ROWS_END,
    STATE_START,
    TOKEN_IDS,
    GraphName,
    cache_output,
    page_table_input,
)
from dflash_trt.graph.tensors import CacheShape, cache_layout, graph_tensors
from dflash_trt.models.draft import read_draft

ContextRows = dict[str, FloatArray]
"""What each cache holds of the first n positions of one sequence, [n, kv heads, D]."""


class HostCaches:
    """Caches by graph input name, linear or in pages, as the bundle's graphs want them.

    Each slot has the pages for `positions` positions for itself.
    """

    def __init__(
        self,
        shapes: Mapping[str, CacheShape],
        slots: int,
        positions: int,
        page_size: int | None = None,
    ) -> None:
        self.length = round_length(positions)
        self._page_size = page_size
        self._columns = 0 if page_size is None else -(-self.length // page_size)
        if page_size is None:
            self._arrays = allocate_zeros(
                {n: (slots, one.kv_heads, self.length, one.head_dim) for n, one in shapes.items()}
            )
            self._rows = {name: one.transpose(0, 2, 1, 3) for name, one in self._arrays.items()}
            return
        self.length, pages = self._columns * page_size, slots * self._columns
        self._arrays = allocate_zeros(
            {n: (pages + 1, page_size, one.kv_heads, one.head_dim) for n, one in shapes.items()}
        )
        self._rows = {
            name: pool[:-1].reshape(slots, self.length, *pool.shape[2:])
            for name, pool in self._arrays.items()
        }

    def place(self, name: str, first: int, count: int) -> tuple[list[int], int]:
        """Shape and address that a graph is given for the slots first … first + count - 1."""
        array = self._arrays[name]
        address = int(array.ctypes.data)
        if self._page_size is not None:
            return list(array.shape), address
        return [count, *array.shape[1:]], address + first * int(array.strides[0])

    def page_table(self, first: int, count: int) -> npt.NDArray[np.int32]:
        """int32 [count,C]: the pages of each slot."""
        start = first * self._columns
        pages = np.arange(start, start + count * self._columns, dtype=np.int32)
        return pages.reshape(count, self._columns)

    def read(self, slot: int, length: int) -> ContextRows:
        """A copy of the first `length` positions of a slot."""
        return {name: rows[slot, :length].copy() for name, rows in self._rows.items()}

    def fill(self, slot: int, context: ContextRows) -> None:
        """Gives a slot to a sequence: its context, and zeros behind."""
        for name, rows in self._rows.items():
            length = len(context[name])
            rows[slot, :length] = context[name]
            rows[slot, length:] = 0  # an overflow of the last one must not reach this one

    def restore(self, slot: int, context: ContextRows, start: int, end: int) -> None:
        """Puts back the positions start … end - 1 of a slot, as far as the context reaches."""
        for name, rows in self._rows.items():
            kept = context[name][start:end]
            rows[slot, start : start + len(kept)] = kept


class ReplayGraphs:
    """`target.onnx` over one sequence, `draft.onnx` over several; opened when first used.

    Args:
        bundle: one for the CPU.
        threads: intra-op threads.
        edits: changes to the graphs in memory.

    Raises:
        DflashError: a bundle of engines (usage).
    """

    def __init__(self, bundle: Bundle, threads: int, edits: Edits) -> None:
        manifest = bundle.manifest
        if not manifest.is_on_cpu:
            what = f"was built for {manifest.executor}; answers are replayed on the CPU"
            fix = "build the pair with --executor cpu"
            raise DflashError(what, where=bundle.folder, fix=fix, usage=True)
        self._bundle, self._threads, self._edits = bundle, threads, edits
        self.form = manifest.graph_form
        self.limits, self.drafts_end = manifest.limits, manifest.drafts_end
        self.vocab_size = manifest.target.vocab_size
        self.mask_token_id = manifest.draft.mask_token_id
        self._token_ids = _draft_token_ids(bundle)
        self._is_chain = manifest.draft.traits.is_chain
        self._target_layers = len(manifest.target.sizes.layers)
        self._layout = cache_layout(self.form, manifest.target.sizes, manifest.draft.sizes)
        self._opened: dict[GraphName, tuple[ort.InferenceSession, str]] = {}
        self._staging: HostCaches | None = None
        self._states = RecurrentStates(self._layout.states(), 1, 0, self.limits.block_size)

    def make_caches(self, slots: int, positions: int) -> HostCaches:
        """The draft's caches for `slots` sequences."""
        return HostCaches(self._layout.of("draft"), slots, positions, self.form.page_size)

    def run_target(
        self, ids: Sequence[int], on_features: Callable[[FloatArray], None] | None = None
    ) -> ContextRows:
        """One pass over a sequence, in prefill chunks: what it injects into the draft's caches.

        `on_features` is given the streams of each chunk [rows,(taps + 1)·H] in turn, see
        `edits.add_streams`.

        Raises:
            DflashError: ONNX Runtime failed.
        """
        if self._staging is None or self._staging.length < len(ids):
            shapes = self._layout.of("target")
            self._staging = HostCaches(shapes, 1, len(ids), self.form.page_size)
        caches, chunk = self._staging, self.limits.prefill_chunk
        sequence = np.asarray(ids, np.int64)
        for start in range(0, len(sequence), chunk):
            rows = sequence[start : start + chunk]
            inputs = {
                TOKEN_IDS: rows[None],
                CACHE_START: np.array([start]),
                LOGIT_ROWS: np.array([[len(rows) - 1]]),
            }
            outputs = {CHOICE_IDS: np.empty((1, 1), np.int64)}
            states, places = self._states, inputs[CACHE_START]
            if states:
                states.begin(range(1), places)
                inputs |= {STATE_START: states.state_start, ROWS_END: states.rows_end}
            features = self._run("target", inputs, outputs, caches, 0, 1)
            states.end(range(1), places, len(rows))
            if on_features is not None:
                on_features(features)
        return {
            name: rows
            for name, rows in caches.read(0, len(sequence)).items()
            if name in self._layout.of("draft")
        }

    def run_draft(
        self,
        caches: HostCaches,
        first: int,
        anchors: Int64Array,
        starts: Int64Array,
        rows: int,
        mask_token_id: int | None = None,
    ) -> tuple[Int64Array, FloatArray]:
        """One pass over blocks of `rows` rows in the slots from `first` on.

        Blocks are filled with `mask_token_id`, None for the bundle's. Returns the drafts
        [B,rows-1] and the logits that they are the highest of [B,rows-1,V], minus infinity for
        tokens that the draft does not choose among.

        Raises:
            DflashError: ONNX Runtime failed.
        """
        batch = len(anchors)
        mask = self.mask_token_id if mask_token_id is None else mask_token_id
        blocks = np.full((batch, rows), mask, np.int64)
        blocks[:, 0] = anchors
        tokens = np.empty((batch, rows), np.int64)
        inputs = {BLOCK_IDS: blocks, CACHE_START: np.asarray(starts, np.int64)}
        logits = self._run("draft", inputs, {DRAFT_TOKEN_IDS: tokens}, caches, first, batch)
        if logits.ndim == 4:  # a walk's candidates with their scores
            ids, scores = logits[..., 0].astype(np.int64), logits[..., 1]
            logits = np.full((*ids.shape[:-1], self.vocab_size), -np.inf, np.float32)
            np.put_along_axis(logits, ids, scores, axis=2)
        elif self._token_ids is not None:
            count = len(self._token_ids)
            wide = np.full((logits.size // count, self.vocab_size), -np.inf, np.float32)
            wide[:, self._token_ids] = logits.reshape(-1, count)
            logits = wide.reshape(*logits.shape[:-1], -1)  # which a Markov chain has in one row
        if self._is_chain:  # step by step
            logits = logits.transpose(1, 0, 2)
        logits = logits.reshape(batch, -1, self.vocab_size)  # a chain tells more slots than it has
        return tokens[:, 1:], logits[:, : rows - 1]

    def close(self) -> None:
        """Releases sessions and caches."""
        self._opened.clear()
        self._staging = None

    def _run(
        self,
        graph: GraphName,
        inputs: Mapping[str, npt.NDArray[np.int64]],
        outputs: Mapping[str, npt.NDArray[np.int64]],
        caches: HostCaches,
        first: int,
        batch: int,
    ) -> FloatArray:
        session, told = self._open(graph)
        io = session.io_binding()
        for name, array in inputs.items():
            bind_array(io.bind_input, name, array)
        table = caches.page_table(first, batch)
        layout = self._layout.of(graph)
        if self.form.is_paged:
            for window in {None, *(one.window for one in layout.values())}:
                bind_array(io.bind_input, page_table_input(window), table)
        places = {name: caches.place(name, first, batch) for name in layout}
        for name in self._layout.states(graph):
            places[name] = self._states.shape(name, 1), self._states.address(name, 0)
        for name, (shape, address) in places.items():
            io.bind_input(name, "cpu", 0, np.float32, shape, address)
            io.bind_output(cache_output(name), "cpu", 0, np.float32, shape, address)
        for name, array in outputs.items():
            bind_array(io.bind_output, name, array)
        io.bind_output(told)
        try:
            session.run_with_iobinding(io)
        except Exception as error:
            raise DflashError(one_line(error), where=f"{graph}.onnx") from error
        value: FloatArray = io.get_outputs()[-1].numpy()
        return value

    def _open(self, graph: GraphName) -> tuple[ort.InferenceSession, str]:
        """A graph, and the value that it tells besides its own outputs."""
        if graph not in self._opened:
            path = self._bundle.folder / f"{graph}.onnx"
            model = load_graph(path)
            edits: tuple[GraphEdit, ...] = getattr(self._edits, graph)
            for edit in edits:
                edit(model)
            is_target = graph == "target"
            told = add_streams(model, self._target_layers) if is_target else draft_logits(model)
            add_output(model, told)
            session = open_session(path, self._threads, model.SerializeToString())
            tensors = graph_tensors(graph, self.form, self._layout, self.vocab_size)
            check_session(session, path, tensors, (told,))
            self._opened[graph] = session, told
        return self._opened[graph]


def _draft_token_ids(bundle: Bundle) -> Int64Array | None:
    """The tokens [K] that a bundle's draft chooses among; None where it is all of them."""
    if bundle.manifest.draft.token_count is None:
        return None
    taps = tuple(bundle.manifest.draft.target_layer_ids)
    return np.array(read_draft(bundle.folder / "weights" / "draft", taps).token_ids, np.int64)
