"""Plain loops over an executor: prefill, decode, speculate; every row's logits are kept."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.backends.base import (
    FloatArray,
    Int64Array,
    Scores,
    StepCall,
    TargetCall,
    TargetGraph,
)
from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.decoding import SamplingParams
from dflash_trt.sampling.params import pack_sampling
from tests.inspection import pools
from tests.reference.compare import assert_bitwise_equal


def one_chunk(
    ids: Int64Array,
    row: int = 0,
    *,
    graph: TargetGraph = "target",
    slot: int = 0,
    start: int = 0,
    **rest: Any,
) -> TargetCall:
    """A pass of one sequence's `ids` [1,S] that wants the choice of one row."""
    return TargetCall(graph, slot, ids, np.array([start]), np.array([[row]]), **rest)


def one_step(rows: int = 4, *, anchor: int = 1, slot: int = 0, start: int = 0) -> StepCall:
    """A step of one sequence."""
    return StepCall(slot, np.array([anchor]), np.array([start]), rows)


def forward_rows(
    executor: OnnxRuntimeExecutor,
    ids: Sequence[Sequence[int]] | Int64Array,
    starts: Sequence[int],
    *,
    graph: TargetGraph = "target",
    first_slot: int = 0,
) -> FloatArray:
    """Logits [B,S,V] of ids [B,S]; checks the choices, drawn greedily or not, against them."""
    token_ids = np.asarray(ids, np.int64)
    rows = np.broadcast_to(np.arange(token_ids.shape[1]), token_ids.shape)
    greedy = pack_sampling([SamplingParams()] * len(token_ids)) if executor.limits.draws else None
    places = np.asarray(starts, np.int64)
    output = executor.forward(
        TargetCall(graph, first_slot, token_ids, places, rows, Scores.LOGITS, greedy)
    )
    assert output.logits is not None
    np.testing.assert_array_equal(output.choice_ids, output.logits.argmax(-1))
    return output.logits.copy()


def run_chunks(
    executor: OnnxRuntimeExecutor,
    ids: Sequence[int],
    sizes: Iterable[int],
    *,
    graph: TargetGraph = "target",
    slot: int = 0,
    start: int = 0,
) -> FloatArray:
    """Logits [T,V] of ids [T] in one slot, in chunks of `sizes` (the last one repeats)."""
    parts: list[FloatArray] = []
    done, size, rest = 0, 1, iter(sizes)
    while done < len(ids):
        size = next(rest, size)
        chunk = ids[done : done + size]
        parts.append(
            forward_rows(executor, [chunk], [start + done], graph=graph, first_slot=slot)[0]
        )
        done += len(chunk)
    return np.concatenate(parts)


@dataclass(slots=True)
class Generated:
    """One sequence being generated: `cached` positions, then the anchor not yet cached."""

    tokens: list[int]
    prompt: int
    logits: list[FloatArray] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def anchor(self) -> int:
        return self.tokens[-1]

    @property
    def start(self) -> int:
        return len(self.tokens) - 1

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


def begin(
    executor: OnnxRuntimeExecutor,
    prompt: Sequence[int],
    slot: int,
    sizes: Iterable[int],
    graph: TargetGraph = "target",
) -> Generated:
    """Prefills `slot` and chooses the first token."""
    row = run_chunks(executor, prompt, sizes, graph=graph, slot=slot)[-1]
    return Generated([*prompt, int(row.argmax())], len(prompt), [row])


def step(
    executor: OnnxRuntimeExecutor, sequences: Sequence[Generated], block_size: int, first_slot: int
) -> None:
    """One speculative step of sequences that sit in the slots from `first_slot` on."""
    anchors = np.array([s.anchor for s in sequences])
    starts = np.array([s.start for s in sequences])
    out = executor.speculate(StepCall(first_slot, anchors, starts, block_size, Scores.LOGITS))
    assert out.logits is not None
    np.testing.assert_array_equal(out.choice_ids, out.logits.argmax(-1))
    assert out.token_ids.shape == out.choice_ids.shape == (len(sequences), block_size)
    for b, sequence in enumerate(sequences):
        assert out.token_ids[b, 0] == sequence.anchor
        drafts, choices = out.token_ids[b, 1:].tolist(), out.choice_ids[b].tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
            accepted += 1
        sequence.accepted.append(accepted)
        sequence.tokens += choices[: accepted + 1]
        sequence.logits += list(out.logits[b, : accepted + 1].copy())


def speculate_until(
    executor: OnnxRuntimeExecutor,
    sequences: Sequence[Generated],
    tokens: int,
    block_sizes: Sequence[int],
    first_slot: int = 0,
) -> None:
    """Steps all sequences together, block sizes in turn, until each has `tokens` more tokens."""
    index = 0
    while min(len(s.output) for s in sequences) < tokens:
        step(executor, sequences, block_sizes[index % len(block_sizes)], first_slot)
        index += 1


def decode_plainly(
    executor: OnnxRuntimeExecutor, prompt: Sequence[int], tokens: int
) -> tuple[list[int], FloatArray]:
    """The baseline: `target_only`, one row at a time, in slot 0; tokens and their logits."""
    sequence = begin(executor, prompt, 0, (1,), "target_only")
    while len(sequence.output) < tokens:
        row = forward_rows(executor, [[sequence.anchor]], [sequence.start], graph="target_only")[
            0, 0
        ]
        sequence.logits.append(row)
        sequence.tokens.append(int(row.argmax()))
    return sequence.output, np.stack(sequence.logits)


def poison(executor: OnnxRuntimeExecutor) -> None:
    """NaN in every page but the one that is nobody's."""
    for pool in pools(executor).values():
        pool[:-1] = np.nan


def bind_shuffled(executor: OnnxRuntimeExecutor, seed: int = 0) -> list[list[int]]:
    """Binds every slot to pages of its own, in no order; those of windows in turn."""
    limits, pool = executor.limits, executor.limits.page_pool
    assert pool is not None
    columns = pool.cover(limits.max_seq_len)
    bound = _deal(pool.pages, columns, limits.max_batch, seed)
    for slot, page_ids in enumerate(bound):
        executor.bind_pages(slot, page_ids)
    for kind in pool.windowed:
        each = limits.window_pages(kind.window, pool.page_size)
        for slot, page_ids in enumerate(_deal(kind.pages, each, limits.max_batch, seed)):
            in_turn = [page_ids[column % each] for column in range(columns)]
            executor.bind_pages(slot, in_turn, kind.window)
    return bound


def _deal(pages: int, each: int, slots: int, seed: int) -> list[list[int]]:
    ids = list(range(pages))
    random.Random(seed).shuffle(ids)
    return [ids[slot * each : (slot + 1) * each] for slot in range(slots)]


def random_ids(vocab: int, *shape: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, vocab, shape)


SLIDING = {
    "num_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 16,
}


@dataclass(frozen=True)
class Baseline:
    """ids [T] and their logits [T,V]."""

    ids: Int64Array
    logits: FloatArray

    def others(self, seed: int) -> Int64Array:
        """Other ids [T]."""
        return random_ids(self.logits.shape[1], len(self.ids), seed=seed)

    def check_among_others(
        self,
        executor: OnnxRuntimeExecutor,
        starts: list[int],
        rows: int,
        graph: TargetGraph = "target",
    ) -> None:
        """These ids beside sequences of other tokens, at other positions: the same bits."""
        batch, mine, first = len(starts), len(starts) // 2, 96
        sequences = [np.tile(self.others(7 + slot), 3) for slot in range(batch)]
        starts[mine], sequences[mine] = first, self.ids
        for slot, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
            run_chunks(executor, ids[:start].tolist(), (50,), slot=slot)
        for offset in range(0, 40, rows):
            positions = [start + offset for start in starts]
            parts = [s[p : p + rows] for s, p in zip(sequences, positions, strict=True)]
            logits = forward_rows(executor, np.stack(parts), positions, graph=graph)[mine]
            expected = self.logits[first + offset :][:rows]
            assert_bitwise_equal(logits, expected, f"batch {batch}, rows {rows}, {offset}")
