"""Runs calibration sequences through a model and notes how large each linear's input gets.

These are the ranges of static activation scales (FP8: amax / 448; NVFP4: amax / (6 · 448)).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from dflash_trt.backends.base import Int64Array
from dflash_trt.building.observing.observed_graphs import ObservedGraphs
from dflash_trt.bundle.graph_folder import GraphFolder
from dflash_trt.core.free_memory import available_memory
from dflash_trt.core.limits import PREFILL_CHUNK
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import BLOCK_IDS, CACHE_START, LOGIT_ROWS, TOKEN_IDS, Owner
from dflash_trt.graph.draft import build_draft
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.rope_tables import compute_tables
from dflash_trt.graph.target import build_target
from dflash_trt.graph.tensors import cache_layout
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.draft import DraftSpec
from dflash_trt.models.pair_check import Pair
from dflash_trt.models.quantized_weights import count_parameters
from dflash_trt.models.target import TargetSpec

_GIB = 1 << 30


def check_memory(needed: int) -> None:
    """Refuses what the machine has no room for.

    Raises:
        DflashError: `needed` bytes exceed what Linux, or the container's limit, leaves.
    """
    available = available_memory()
    if available is not None and needed > available:
        raise DflashError(
            f"observing activations in float32 needs about {needed / _GIB:.1f} GiB of memory, "
            f"{available / _GIB:.1f} GiB are available",
            fix="close other programs, shorten the calibration sequences, or use a machine with "
            "more memory",
        )


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


BLOCKS_PER_SEQUENCE = 16


@dataclass(frozen=True, slots=True)
class ActivationAmax:
    """The largest magnitude in each linear's input and in each cache, by role, in float32.

    A cache's role is "layers.0.k_cache" or v_cache; K counts as it is kept, rotated. The draft's
    k_proj and v_proj read the target's features besides its own blocks. The output head is the
    target's and counts what both models give it; tied, its role is the embedding's.
    """

    target: dict[str, float]
    draft: dict[str, float]


def observe_target(
    target: TargetSpec,
    sequences: Sequence[Sequence[int]],
    progress: Progress,
    *,
    prefill_chunk: int = PREFILL_CHUNK,
    workspace: Path | None = None,
) -> dict[str, float]:
    """The largest magnitude in each linear's input and cache of `target`; see `ActivationAmax`.

    Args:
        sequences: token ids, cut to the model's context.
        prefill_chunk: rows of one pass; the result does not depend on it.
        workspace: where a temporary folder goes, best on the checkpoint's filesystem, for then
            weights are linked and not copied. None takes the system's.

    Raises:
        DflashError: sequences that cannot be used, too little memory, or activations that are
            not finite.
    """
    context = target.max_position_embeddings
    plans = [_Plan(one, []) for one in check_sequences(sequences, target.vocab_size, context)]
    return _observe(target, None, plans, progress, prefill_chunk, workspace).target


def observe_pair(
    pair: Pair,
    sequences: Sequence[Sequence[int]],
    progress: Progress,
    *,
    prefill_chunk: int = PREFILL_CHUNK,
    workspace: Path | None = None,
) -> ActivationAmax:
    """The largest magnitude in each linear's input of both models.

    The draft reads what it does in use: blocks of the trained size whose anchors are tokens of the
    sequence, with the target's features before them as context. Arguments and errors as for
    `observe_target`, and sequences that are all too short for a block (two tokens make one).
    """
    target, draft = pair.target, pair.draft
    size = draft.block_size
    context = min(target.max_position_embeddings, draft.max_position_embeddings)
    plans = [
        _Plan(one, place_anchors(len(one), size, context, BLOCKS_PER_SEQUENCE))
        for one in check_sequences(sequences, target.vocab_size, context)
    ]
    if not any(plan.anchors for plan in plans):
        raise DflashError(
            f"no sequence is long enough for a draft block: it takes two tokens, and {size + 1} "
            f"positions of the context of {context}",
            where="calibration",
            usage=True,
        )
    return _observe(target, draft, plans, progress, prefill_chunk, workspace)


@dataclass(frozen=True, slots=True)
class _Plan:
    """One sequence [n], and the positions at which draft blocks are run over it."""

    sequence: Int64Array
    anchors: list[int]

    def positions(self, block_size: int) -> int:
        """Cache positions that it takes."""
        return max([len(self.sequence), *(anchor + block_size for anchor in self.anchors)])


def _observe(
    target: TargetSpec,
    draft: DraftSpec | None,
    plans: Sequence[_Plan],
    progress: Progress,
    prefill_chunk: int,
    workspace: Path | None,
) -> ActivationAmax:
    # A sequence is run once, so that no row is taken back.
    form = GraphForm(observe=True, replay=1 if target.sizes.has_state else None)
    block_size = 0 if draft is None else draft.block_size
    positions = max(plan.positions(block_size) for plan in plans)
    check_memory(estimate_memory(target, draft, positions, prefill_chunk))
    specs: dict[Owner, DecoderSpec] = {"target": target}
    specs |= {} if draft is None else {"draft": draft}
    with TemporaryDirectory(prefix="dflash-trt-", dir=workspace) as temporary:
        folder = GraphFolder(Path(temporary))
        weights = {owner: spec.weights for owner, spec in specs.items()}
        folder.place_weights(weights, folder.folder, progress)
        progress.stage("loading in float32", None)
        _write_graphs(folder, target, draft, positions, form)
        sizes = None if draft is None else draft.sizes
        layout = cache_layout(form, target.sizes, sizes)
        graphs = ObservedGraphs(folder.folder, form, layout, target.vocab_size, positions)
        rows = sum(len(plan.sequence) + block_size * len(plan.anchors) for plan in plans)
        progress.stage("observing activations", rows, "tokens")
        for plan in plans:
            graphs.make_room(plan.positions(block_size))
            for inputs in _chunks(plan.sequence, prefill_chunk):
                graphs.run("target_only" if draft is None else "target", inputs)
                progress.advance(inputs[TOKEN_IDS].size)
            # Backwards: a block's rows overwrite features that only later blocks would read.
            for anchor in reversed(plan.anchors):
                assert draft is not None
                graphs.run("draft", _block(plan.sequence, anchor, draft))
                progress.advance(block_size)
        return ActivationAmax(graphs.amax("target"), graphs.amax("draft"))


def _write_graphs(
    folder: GraphFolder,
    target: TargetSpec,
    draft: DraftSpec | None,
    positions: int,
    form: GraphForm,
) -> None:
    tables = folder.write_tables(compute_tables(target, draft, positions))
    folder.write_graph(build_target(target, draft, tables, folder.locate, form))
    if draft is not None:
        pair = Pair(target, draft)
        folder.write_graph(build_draft(pair, tables, folder.locate, form))


def _chunks(sequence: Int64Array, size: int) -> Iterator[dict[str, Int64Array]]:
    """The target's inputs for a sequence, `size` rows at a time, all of them logit rows."""
    for start in range(0, len(sequence), size):
        ids = sequence[start : start + size]
        yield {
            TOKEN_IDS: ids[None],
            CACHE_START: np.array([start]),
            LOGIT_ROWS: np.arange(len(ids))[None],
        }


def _block(sequence: Int64Array, anchor: int, draft: DraftSpec) -> dict[str, Int64Array]:
    """The draft's inputs for the block that begins at position `anchor`."""
    ids = np.full((1, draft.block_size), draft.mask_token_id, np.int64)
    ids[0, 0] = sequence[anchor]
    return {BLOCK_IDS: ids, CACHE_START: np.array([anchor])}


def check_sequences(
    sequences: Sequence[Sequence[int]], vocab_size: int, context: int
) -> list[Int64Array]:
    """The sequences as arrays [n] of token ids, each cut to its first `context` tokens.

    Raises:
        DflashError: no sequence, an empty one, or an id outside the vocabulary (usage).
    """
    if not sequences:
        raise _unusable("there is no calibration sequence", None)
    checked: list[Int64Array] = []
    for number, sequence in enumerate(sequences, start=1):
        if not len(sequence):
            raise _unusable("it holds no token", number)
        outside = next((one for one in sequence if not 0 <= one < vocab_size), None)
        if outside is not None:
            raise _unusable(f"token id {outside} is outside the vocabulary of {vocab_size}", number)
        checked.append(np.array(sequence[:context], np.int64))
    return checked


def place_anchors(length: int, block_size: int, context: int, most: int) -> list[int]:
    """Where draft blocks begin in a sequence of `length` tokens: at most `most` positions.

    Each has context before it and room for its block; they are spread over the sequence, no
    nearer to each other than a block. Empty where a sequence is too short for one.
    """
    last = min(length - 1, context - block_size)
    if last < 1:
        return []
    count = min(most, max(1, (last - 1) // block_size))
    return [last - (last - 1) * index // count for index in reversed(range(count))]


def _unusable(what: str, number: int | None) -> DflashError:
    where = "calibration" if number is None else f"calibration sequence {number}"
    return DflashError(what, where=where, usage=True)
