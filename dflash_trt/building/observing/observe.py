"""Runs calibration sequences through a model and notes how large each linear's input gets.

These are the ranges of static activation scales (FP8: amax / 448; NVFP4: amax / (6 · 448)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime as ort

from dflash_trt.backends.base import Int64Array
from dflash_trt.backends.onnxruntime.caches import LinearCaches, RecurrentStates
from dflash_trt.backends.onnxruntime.session import bind_array, check_session, open_session
from dflash_trt.bundle.graph_folder import GraphFolder
from dflash_trt.core.free_memory import available_memory
from dflash_trt.core.limits import PREFILL_CHUNK
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError, one_line
from dflash_trt.graph.bindings import (
    BLOCK_IDS,
    CACHE_START,
    LOGIT_ROWS,
    OBSERVED_PREFIX,
    ROWS_END,
    STATE_START,
    TOKEN_IDS,
    GraphName,
    Owner,
    cache_output,
)
from dflash_trt.graph.draft import build_draft
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.rope_tables import compute_tables
from dflash_trt.graph.target import build_target
from dflash_trt.graph.tensors import CacheLayout, cache_layout, graph_tensors
from dflash_trt.models.draft import DraftSpec
from dflash_trt.models.pair_check import Pair
from dflash_trt.models.quantized_weights import count_parameters
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.target import TargetSpec

PairAmax = Mapping[Owner, Mapping[str, float]]
"""The largest magnitude in each linear's input and in each cache, by model and role, in float32.

A cache's role is "layers.0.k_cache" or v_cache; K counts as it is kept, rotated. The draft's k_proj
and v_proj read the target's features besides its own blocks. The output head is the target's and
counts what both models give it; tied, its role is the embedding's.
"""
BLOCKS_PER_SEQUENCE = 16
_GIB = 1 << 30


def estimate_memory(target: TargetSpec, draft: DraftSpec | None, positions: int, rows: int) -> int:
    """Bytes that passes of `rows` rows over sequences of `positions` take, the weights in float32.

    What ONNX Runtime was measured to hold on top of the weights is a tenth, and while the second
    session opens, the output head once more.
    """
    specs = (target,) if draft is None else (target, draft)
    weights = sum(count_parameters(spec.weights) for spec in specs)
    head = target.vocab_size * target.hidden_size
    extra_heads = 0 if draft is None else 2  # the draft's session packs a copy of its own
    caches = sum(layer.kv_elements for spec in specs for layer in spec.sizes.layers)
    states = sum(layer.recurrent.state_elements for layer in target.sizes.layers if layer.recurrent)
    rows = min(rows, positions)
    widest = 4 * target.sizes.intermediate_size + 8 * target.hidden_size
    activations = rows * (2 * target.vocab_size + widest + 2 * target.sizes.layer.heads * positions)
    elements = 1.1 * weights + extra_heads * head + caches * positions + states + activations
    return int(elements * np.dtype(np.float32).itemsize)


def observe(
    target: TargetSpec,
    draft: DraftSpec | None,
    sequences: Sequence[Sequence[int]],
    progress: Progress,
    *,
    workspace: Path | None = None,
) -> PairAmax:
    """The largest magnitude in each linear's input and cache of a target, and of its draft.

    The draft reads what it does in use: blocks of the trained size whose anchors are tokens of the
    sequence, with the target's features before them as context.

    Args:
        sequences: token ids, cut to the models' context.
        workspace: where a temporary folder goes, best on the checkpoint's filesystem, for then
            weights are linked and not copied. None takes the system's.

    Raises:
        DflashError: sequences that cannot be used, or are all too short for a block (two tokens
            make one); too little memory; activations that are not finite.
    """
    context = target.max_position_embeddings
    if draft is not None:
        context = min(context, draft.max_position_embeddings)
    texts = check_sequences(sequences, target.vocab_size, context)
    size, anchors = 0, [list[int]()] * len(texts)
    if draft is not None:
        size = draft.block_size
        anchors = [place_anchors(len(one), size, context) for one in texts]
        if not any(anchors):
            what = (
                f"no sequence is long enough for a draft block: it takes two tokens, and {size + 1}"
                f" positions of the context of {context}"
            )
            raise DflashError(what, where="calibration", usage=True)
    lengths = [
        max([len(text), *(anchor + size for anchor in own)])
        for text, own in zip(texts, anchors, strict=True)
    ]
    needed = estimate_memory(target, draft, max(lengths), PREFILL_CHUNK)
    available = available_memory()
    if available is not None and needed > available:
        raise DflashError(
            f"observing activations in float32 needs about {needed / _GIB:.1f} GiB of memory, "
            f"{available / _GIB:.1f} GiB are available",
            fix="close other programs, shorten the calibration sequences, or use a machine with "
            "more memory",
        )
    with TemporaryDirectory(prefix="dflash-trt-", dir=workspace) as temporary:
        graphs = _ObservedGraphs(Path(temporary), target, draft, max(lengths), progress)
        rows = sum(len(one) for one in texts) + size * sum(len(own) for own in anchors)
        progress.stage("observing activations", rows, "tokens")
        for text, own, length in zip(texts, anchors, lengths, strict=True):
            graphs.caches.fit([length])
            for start in range(0, len(text), PREFILL_CHUNK):
                ids = text[start : start + PREFILL_CHUNK][None]
                inputs = {TOKEN_IDS: ids, LOGIT_ROWS: np.arange(ids.size)[None]}
                graphs.run("target_only" if draft is None else "target", inputs, start)
                progress.advance(ids.size)
            # Backwards: a block's rows overwrite features that only later blocks would read.
            for anchor in reversed(own):
                assert draft is not None
                block = np.full((1, size), draft.mask_token_id, np.int64)
                block[0, 0] = text[anchor]
                graphs.run("draft", {BLOCK_IDS: block}, anchor)
                progress.advance(size)
        return graphs.amax


class _ObservedGraphs:
    """The float32 graphs of a target and its draft, run over one sequence at a time.

    Attributes:
        caches: of one sequence.
        amax: what was observed so far.
    """

    def __init__(
        self,
        place: Path,
        target: TargetSpec,
        draft: DraftSpec | None,
        positions: int,
        progress: Progress,
    ) -> None:
        # A sequence is run once, so that no row is taken back.
        form = GraphForm(observe=True, replay=1 if target.sizes.has_state else None)
        folder, names = GraphFolder(place), list[GraphName](["target_only"])
        weights: dict[Owner, Mapping[str, TensorEntry]] = {"target": target.weights}
        if draft is not None:
            names, weights["draft"] = ["target", "draft"], draft.weights
        folder.place_weights(weights, place, progress)
        progress.stage("loading in float32", None)
        tables = folder.write_tables(compute_tables(target, draft, positions))
        folder.write_graph(build_target(target, draft, tables, folder.locate, form))
        if draft is not None:
            folder.write_graph(build_draft(Pair(target, draft), tables, folder.locate, form))
        sizes = None if draft is None else draft.sizes
        self._layout: CacheLayout = cache_layout(form, target.sizes, sizes)
        self._states = RecurrentStates(self._layout.states(), 1, 0, form.replay or 0)
        self.caches = LinearCaches(self._layout.of(), 1, positions)
        self._sessions: dict[GraphName, ort.InferenceSession] = {}
        for name in names:
            path = place / f"{name}.onnx"
            session = self._sessions[name] = open_session(path, None)
            tensors = graph_tensors(name, form, self._layout, target.vocab_size)
            check_session(session, path, tensors)
        self.amax: dict[Owner, dict[str, float]] = {"target": {}, "draft": {}}

    def run(self, graph: GraphName, inputs: Mapping[str, Int64Array], start: int) -> None:
        """Runs `graph` on `inputs` at position `start` and keeps what it tells.

        A target with recurrent layers must be given a sequence's rows in order.

        Raises:
            DflashError: ONNX Runtime failed, or what a linear reads is not finite.
        """
        session, starts = self._sessions[graph], np.array([start])
        readers, io = _readers(session), session.io_binding()
        inputs, states = {**inputs, CACHE_START: starts}, self._layout.states(graph)
        if states:
            self._states.begin(range(1), starts)
            inputs[STATE_START] = self._states.state_start
            inputs[ROWS_END] = self._states.rows_end
        for name, array in inputs.items():
            bind_array(io.bind_input, name, array)
        for name in (*states, *self._layout.of(graph)):
            held = self._states if name in states else self.caches
            shape, address = held.shape(name, 1), held.address(name, 0)
            io.bind_input(name, "cpu", 0, np.float32, shape, address)
            io.bind_output(cache_output(name), "cpu", 0, np.float32, shape, address)
        found = np.empty((len(readers), 1), np.float32)
        for name, value in zip(readers, found, strict=True):
            io.bind_output(name, "cpu", 0, np.float32, [], value.ctypes.data)
        try:
            session.run_with_iobinding(io)
        except Exception as error:
            raise DflashError(one_line(error), where=f"{graph}.onnx") from error
        if states:
            self._states.end(range(1), starts, inputs[TOKEN_IDS].shape[1])
        for linears, amax in zip(readers.values(), found[:, 0].tolist(), strict=True):
            if not math.isfinite(amax):
                raise DflashError(
                    f"the input of {', '.join(linears)} is not finite",
                    where=f"{graph}.onnx",
                    fix="the checkpoint's weights are damaged, or overflow float32",
                )
            for linear in linears:
                owner, _, role = linear.partition("/")
                self._keep(owner, role, amax)
        for name in self._layout.of(graph):
            owner, kind, layer = name.rsplit("_", 2)
            self._keep(owner, f"layers.{layer}.{kind}_cache", self.caches.largest(name))

    def _keep(self, owner: str, role: str, amax: float) -> None:
        kept = self.amax["target" if owner == "target" else "draft"]
        kept[role] = max(amax, kept.get(role, 0.0))


def _readers(session: ort.InferenceSession) -> dict[str, list[str]]:
    """For each observing output, in the graph's order: the linears (owner/role) that read it."""
    outputs: dict[str, str] = session.get_modelmeta().custom_metadata_map
    readers: dict[str, list[str]] = {
        item.name: [] for item in session.get_outputs() if item.name.startswith(OBSERVED_PREFIX)
    }
    for linear in sorted(outputs):  # ONNX Runtime's map has no order
        readers[outputs[linear]].append(linear)
    return readers


def check_sequences(
    sequences: Sequence[Sequence[int]], vocab_size: int, context: int
) -> list[Int64Array]:
    """The sequences as arrays [n] of token ids, each cut to its first `context` tokens.

    Raises:
        DflashError: no sequence, an empty one, or an id outside the vocabulary (usage).
    """
    if not sequences:
        raise DflashError("there is no calibration sequence", where="calibration", usage=True)
    for number, sequence in enumerate(sequences, start=1):
        outside = next((one for one in sequence if not 0 <= one < vocab_size), None)
        if len(sequence) and outside is None:
            continue
        what = f"token id {outside} is outside the vocabulary of {vocab_size}"
        if outside is None:
            what = "it holds no token"
        raise DflashError(what, where=f"calibration sequence {number}", usage=True)
    return [np.array(sequence[:context], np.int64) for sequence in sequences]


def place_anchors(
    length: int, block_size: int, context: int, most: int = BLOCKS_PER_SEQUENCE
) -> list[int]:
    """Where draft blocks begin in a sequence of `length` tokens: at most `most` positions.

    Each has context before it and room for its block; they are spread over the sequence, no
    nearer to each other than a block. Empty where a sequence is too short for one.
    """
    last = min(length - 1, context - block_size)
    if last < 1:
        return []
    count = min(most, max(1, (last - 1) // block_size))
    return [last - (last - 1) * index // count for index in reversed(range(count))]
