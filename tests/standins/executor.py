"""An executor without a network: token ids as its cache, a hash of the history as its model.

It holds the runtime to the executor's contract: no read of a row that was never written, of a
slot that was moved away or of a drafter's context that was never injected; no row past the
end of the cache; no use of an output after the next call (old arrays are overwritten).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from dflash_trt.backends.base import (
    ExecutorLimits,
    FloatArray,
    Int64Array,
    SpeculationOutput,
    StepCall,
    TargetCall,
    TargetGraph,
    TargetOutput,
)
from dflash_trt.backends.page_bindings import HANDED_BACK
from dflash_trt.core.limits import PagePool
from dflash_trt.sampling.choice import choose_tokens
from dflash_trt.sampling.params import SamplingParams

NEVER_WRITTEN = -7777


@lru_cache(maxsize=1 << 16)
def score_next(history: tuple[int, ...], vocab_size: int) -> FloatArray:
    """Logits [V] after `history`: a pure function of it, spread like a small model's."""
    # The hash of a tuple of integers is the same in every process.
    generator = np.random.Generator(np.random.SFC64(hash(history) % 2**64))
    logits = generator.normal(0, 2.0, vocab_size).astype(np.float32)
    logits.flags.writeable = False
    return logits


@lru_cache(maxsize=1 << 16)
def draw_luck(history: tuple[int, ...]) -> float:
    """In [0, 1): whether a draft after `history` is a good one."""
    return np.random.Generator(np.random.SFC64(hash((17, history)) % 2**64)).random()


def draw(logits: FloatArray, positions: Int64Array, packed: Int64Array) -> list[int]:
    """What an executor that draws makes of rows [R,V] of one sequence; -1 where it cannot."""
    seed, temperature, top_k, top_p = struct.unpack("=QdQd", packed.tobytes())
    params = SamplingParams(temperature, top_k or None, top_p, seed)
    finite = np.isfinite(logits).any(axis=1) & (logits < np.inf).all(axis=1)
    return [
        int(choose_tokens(row[None], position[None], params)[0]) if is_finite else -1
        for row, position, is_finite in zip(logits, positions, finite, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its kind, its slots and rows."""

    kind: str
    first_slot: int
    sequences: int
    rows: int


class FakeExecutor:
    """`draft_skill` of the drafts, chosen by a hash, are the target's own greedy choice."""

    def __init__(
        self,
        *,
        max_batch: int = 4,
        max_seq_len: int = 64,
        block_size: int = 8,
        vocab_size: int = 16,
        draft_skill: float = 0.8,
        draws: bool = False,
        prefill_chunk: int | None = None,
    ) -> None:
        self._limits = ExecutorLimits(
            max_batch=max_batch,
            max_seq_len=max_seq_len,
            block_size=block_size,
            prefill_chunk=prefill_chunk or max_seq_len,
            vocab_size=vocab_size,
            mask_token_id=vocab_size - 1,
            takes_any_chunk=True,
            draws=draws,
        )
        self._draft_skill = draft_skill
        shape = (max_batch, max_seq_len)
        self._cached = np.full(shape, NEVER_WRITTEN, dtype=np.int64)
        self._injected = np.zeros(shape, dtype=bool)
        self._last_output: list[np.ndarray] = []
        self.calls: list[Call] = []
        self.warmed: list[tuple[dict[int, int], TargetGraph]] = []
        self.error: Exception | None = None  # raised by every pass while it is set
        self.closed = False

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    @property
    def is_bitwise(self) -> bool:
        return True

    def warm_up(self, rows: Mapping[int, int], plain: TargetGraph) -> None:
        self.warmed.append((dict(rows), plain))

    def forward(self, call: TargetCall) -> TargetOutput:
        self._begin(call.graph, call)
        assert call.logit_rows.shape[0] == call.batch
        logits = self._run(call, call.token_ids, call.graph == "target")
        logits = np.take_along_axis(logits, call.logit_rows[:, :, None], axis=1)
        positions = call.starts[:, None] + call.logit_rows + 1
        return TargetOutput(*self._hand_out(logits, call, positions))

    def speculate(self, call: StepCall) -> SpeculationOutput:
        self._begin("speculate", call)
        places = zip(call.anchors.tolist(), call.starts.tolist(), strict=True)
        token_ids = np.array(
            [
                self._draft(slot, anchor, start, call.rows)
                for slot, (anchor, start) in enumerate(places, start=call.first_slot)
            ],
            dtype=np.int64,
        )
        logits = self._run(call, token_ids, injects=True)
        self._last_output.append(token_ids)
        positions = call.starts[:, None] + np.arange(1, call.rows + 1)
        return SpeculationOutput(token_ids, *self._hand_out(logits, call, positions))

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self._note("move", destination, 1, length)
        assert source != destination
        for cache, empty in ((self._cached, NEVER_WRITTEN), (self._injected, False)):
            cache[destination, :length] = cache[source, :length]
            cache[destination, length:] = empty

    def release_slots(self, first_free: int) -> None:
        """Whoever still reads a released slot reads nothing."""
        self._cached[first_free:] = NEVER_WRITTEN
        self._injected[first_free:] = False

    def close(self) -> None:
        self.closed = True

    def _begin(self, kind: str, call: TargetCall | StepCall) -> None:
        self._limits.check(call)
        self._note(kind, call.first_slot, call.batch, call.rows)

    def _note(self, kind: str, first_slot: int, sequences: int, rows: int) -> None:
        for array in self._last_output:
            array[...] = -1
        self._last_output = []
        self.calls.append(Call(kind, first_slot, sequences, rows))

    def _draft(self, slot: int, anchor: int, start: int, block_size: int) -> list[int]:
        assert self._is_injected(slot, start), f"slot {slot}: the drafter's context has holes"
        history = self._read(slot, start) + (anchor,)
        for _ in range(block_size - 1):
            token_id = int(score_next(history, self._limits.vocab_size).argmax())
            if draw_luck(history) >= self._draft_skill:
                token_id = (token_id + 1) % self._limits.vocab_size
            history += (token_id,)
        return list(history[start:])

    def _run(self, call: TargetCall | StepCall, token_ids: Int64Array, injects: bool) -> FloatArray:
        """Writes the rows, then reads each row's history back: logits [B,S,V]."""
        if self.error is not None:
            raise self.error
        rows, starts = call.rows, call.starts
        assert starts.shape == (len(token_ids),)
        assert token_ids.dtype == starts.dtype == np.int64
        assert ((token_ids >= 0) & (token_ids < self._limits.vocab_size)).all()
        logits = np.empty((*token_ids.shape, self._limits.vocab_size), dtype=np.float32)
        for index, start in enumerate(starts.tolist()):
            slot = call.first_slot + index
            self._write(slot, start, token_ids[index], injects)
            history = self._read(slot, start + rows)
            for row in range(rows):
                logits[index, row] = score_next(history[: start + row + 1], self._limits.vocab_size)
        return logits

    def _write(self, slot: int, start: int, token_ids: Int64Array, injects: bool) -> None:
        if start == 0 and (self._cached[slot, : len(token_ids)] != token_ids).any():
            self._cached[slot] = NEVER_WRITTEN
            self._injected[slot] = False
        self._cached[slot, start : start + len(token_ids)] = token_ids
        self._injected[slot, start : start + len(token_ids)] = injects

    def _is_injected(self, slot: int, length: int) -> bool:
        return bool(self._injected[slot, :length].all())

    def _cached_ids(self, slot: int, length: int) -> tuple[int, ...]:
        return tuple(self._cached[slot, :length].tolist())

    def _read(self, slot: int, length: int) -> tuple[int, ...]:
        history = self._cached_ids(slot, length)
        assert NEVER_WRITTEN not in history, f"slot {slot}: a row was read before it was written"
        return history

    def _hand_out(
        self,
        logits: FloatArray,
        call: TargetCall | StepCall,
        positions: Int64Array,
    ) -> tuple[Int64Array, FloatArray | None]:
        choice_ids = logits.argmax(axis=-1)
        if call.sampling is not None:
            drawn = zip(logits, positions, call.sampling, strict=True)
            choice_ids = np.array([draw(*rows) for rows in drawn])
        self._last_output += [choice_ids, logits]
        return choice_ids, logits if call.scores else None


def check_step_calls(calls: Sequence[Call]) -> None:
    """One generator step: passes cover slots 0 … n-1 once, then moves, then at most one chunk."""
    passes = 0
    next_slot = 0
    for call in calls:
        if call.kind == "move" or call.first_slot != next_slot:
            break
        passes += 1
        next_slot += call.sequences
    chunks = [call for call in calls[passes:] if call.kind != "move"]
    assert len(chunks) <= 1 and all(chunk.sequences == 1 for chunk in chunks), calls


class PagedFakeExecutor(FakeExecutor):
    """Holds the runtime to the contract of a paged executor; see `FakeExecutor` for the rest."""

    def __init__(self, pool: PagePool, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self._limits = replace(self._limits, page_pool=pool)
        self._size = pool.page_size
        shapes = {window: (pages, pool.page_size) for window, pages in pool.kinds.items()}
        self._page_ids = {
            window: np.full(shape, NEVER_WRITTEN, np.int64) for window, shape in shapes.items()
        }
        self._page_injected = {window: np.zeros(shape, bool) for window, shape in shapes.items()}
        slots = self._limits.max_batch
        self._bound: dict[int | None, list[list[int]]] = {
            window: [[] for _ in range(slots)] for window in pool.kinds
        }

    def bind_pages(self, slot: int, page_ids: Sequence[int], window: int | None = None) -> None:
        assert window is not None or HANDED_BACK not in page_ids
        held = [page for page in page_ids if page != HANDED_BACK]
        assert len(set(held)) == len(held)
        # Another sequence's pages come after none: its rows are not those that the slot held.
        kept = zip(self._bound[window][slot], page_ids, strict=False)
        assert all(page in (was, HANDED_BACK) for was, page in kept)
        self._bound[window][slot] = list(page_ids)

    def held(self, slot: int) -> int:
        """Positions that a slot has pages for."""
        return len(self._bound[None][slot]) * self._size

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self._note("move", destination, 1, length)
        assert source != destination and length <= self.held(source)
        for bound in self._bound.values():
            bound[destination], bound[source] = bound[source], []

    def release_slots(self, first_free: int) -> None:
        for bound in self._bound.values():
            for slot in range(first_free, len(bound)):
                bound[slot] = []

    def poison(self, pages: Iterable[int], window: int | None = None) -> None:
        """Whoever still reads one of these pages reads nothing."""
        for page in pages:
            self._page_ids[window][page] = NEVER_WRITTEN
            self._page_injected[window][page] = False

    def _write(self, slot: int, start: int, token_ids: Int64Array, injects: bool) -> None:
        end = start + len(token_ids)
        for window, bound in self._bound.items():
            assert end <= len(bound[slot]) * self._size
            for position, token_id in enumerate(token_ids.tolist(), start=start):
                page, place = bound[slot][position // self._size], position % self._size
                assert page != HANDED_BACK
                self._page_ids[window][page, place] = token_id
                self._page_injected[window][page, place] = injects
            if window is not None:
                seen = slice(max(0, start - window + 1), end)
                rows = self._rows(self._page_ids[window], window, slot, seen)
                assert rows == list(self._cached_ids(slot, end))[seen], f"slot {slot}: {window}"

    def _is_injected(self, slot: int, length: int) -> bool:
        return all(
            all(self._rows(pages, window, slot, slice(max(0, length - (window or length)), length)))
            for window, pages in self._page_injected.items()
        )

    def _cached_ids(self, slot: int, length: int) -> tuple[int, ...]:
        return tuple(self._rows(self._page_ids[None], None, slot, slice(length)))

    def _rows(
        self, pages: np.ndarray, window: int | None, slot: int, positions: slice
    ) -> list[Any]:
        """What pages hold of these positions of a slot; HANDED_BACK where it has none."""
        bound = self._bound[window][slot]
        places = (divmod(position, self._size) for position in range(positions.stop)[positions])
        return [
            HANDED_BACK if bound[column] == HANDED_BACK else pages[bound[column], place].item()
            for column, place in places
        ]
