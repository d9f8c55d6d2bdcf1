"""What the runtime asks of an executor; it never knows which one it has.

Shapes: B sequences in a call, S rows each, R logit rows, V vocabulary.
Sequences live in slots 0 … max_batch-1; a call covers a contiguous range of slots. In linear
caches a slot is a stretch of memory, in paged ones the pages that `bind_pages` gave it.
Positions are `starts[b] + row`; a call writes the rows it computes at those positions, so rows
at or past a sequence's accepted length are scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Literal, Protocol, cast

import numpy as np

from dflash_trt.backends.state_positions import StatePositions
from dflash_trt.core.arrays import FloatArray as FloatArray
from dflash_trt.core.arrays import Int64Array as Int64Array
from dflash_trt.core.limits import Limits, PagePool

TargetGraph = Literal["target", "target_only"]


class Scores(IntEnum):
    """What a caller needs of the logits behind the choices; an executor may hand out more."""

    NONE = 0
    CANDIDATES = 1
    LOGITS = 2


class _Call:
    """B sequences in slots first_slot … first_slot+B-1, from the cache positions `starts` on."""

    __slots__ = ()
    first_slot: int
    starts: Int64Array

    @property
    def batch(self) -> int:
        """B."""
        return len(self.starts)

    @property
    def slots(self) -> range:
        """The slots of the sequences."""
        return range(self.first_slot, self.first_slot + self.batch)


@dataclass(slots=True, eq=False)
class TargetCall(_Call):
    """Rows for the target.

    `token_ids` [B,S] stand at the cache positions from `starts` [B] on; `logit_rows` [B,R] are
    the rows (0 … S-1) whose choice is wanted. "target" also injects the rows into the draft's
    cache; "target_only" is the autoregressive baseline and leaves the draft's cache alone.
    `sampling` [B,4] (see pack_sampling) is there if and only if `limits.draws`.
    `is_chunk` says that the rows are a prompt's: with one row, they are no step that comes again
    and again.
    """

    graph: TargetGraph
    first_slot: int
    token_ids: Int64Array
    starts: Int64Array
    logit_rows: Int64Array
    scores: Scores = Scores.NONE
    sampling: Int64Array | None = None
    is_chunk: bool = False

    @property
    def rows(self) -> int:
        """S."""
        return self.token_ids.shape[1]

    @property
    def is_step(self) -> bool:
        """Whether it is a decode step without drafts."""
        return self.rows == 1 and not self.is_chunk


@dataclass(slots=True, eq=False)
class StepCall(_Call):
    """A block to draft and to verify.

    `starts` [B] are the cache positions of the `anchors` [B], which are not yet cached.
    `block_size` is 2 … limits.block_size; `sampling` is as in TargetCall.

    `ahead` says that the caller expects to go on with the same slots, block size and sampling
    from the tokens that this step settles. The executor may begin to; results never depend on it.

    `revise` changes the drafts where it can do better: it is given the token ids [B,S], anchors
    first, before they are verified. Executors that hand them over on the device do without.
    """

    first_slot: int
    anchors: Int64Array
    starts: Int64Array
    block_size: int
    scores: Scores = Scores.NONE
    sampling: Int64Array | None = None
    ahead: bool = False
    revise: Callable[[Int64Array], None] | None = None
    is_step: ClassVar[bool] = True

    @property
    def rows(self) -> int:
        """S."""
        return self.block_size

    def block_ids(self, mask_token_id: int) -> Int64Array:
        """What the draft is given [B,S]: the anchors, and masks behind them."""
        blocks = np.full((self.batch, self.block_size), mask_token_id, np.int64)
        blocks[:, 0] = self.anchors
        return blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits(Limits):
    """A bundle's limits, and what else whoever calls its executor must know.

    `takes_any_chunk` says that calls with one sequence may have more rows than `prefill_chunk`,
    unless windowed layers have pages of their own, and ask for all their logits; `page_pool` is
    that of a PagedExecutor, None where caches are linear; `draws` says that choices are drawn with
    each sequence's own sampling, and that calls are given it. `has_state`: the target has recurrent
    layers, so that a sequence goes on where its last call's rows end, or takes back at most
    `block_size` of them. What it has written before cannot be run again, and is shared only with a
    copy of the state behind it, of which a StatefulExecutor has `state_copies`. `longest`: the
    positions that the target was trained for; `drafts_end`: the one that no block reaches.
    """

    vocab_size: int
    mask_token_id: int
    takes_any_chunk: bool = False
    page_pool: PagePool | None = None
    draws: bool = False
    has_state: bool = False
    state_copies: int = 0
    longest: int | None = None
    drafts_end: int | None = None

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows of layers that keep only the pages that rows to come see."""
        return () if self.page_pool is None else self.page_pool.windows

    def chunk(self, wanted: int) -> int:
        """Rows of a prefill pass where `wanted` are asked for."""
        any_chunk = self.takes_any_chunk and not self.windows
        return wanted if any_chunk else min(wanted, self.prefill_chunk)

    def check(self, call: TargetCall | StepCall) -> dict[int, int]:
        """Where the rows of `call` end, by slot.

        Raises:
            ValueError: logit rows, block size, sampling, slots or positions outside the limits;
                a write past a slot would land in the neighbour's, and TensorRT does not define it.
        """
        rows = call.rows
        if isinstance(call, StepCall):
            if not 2 <= call.block_size <= self.block_size:
                raise ValueError(f"block size {call.block_size} is not 2 … {self.block_size}")
        else:
            picked = call.logit_rows.ravel().tolist()
            if not 0 <= min(picked) <= max(picked) < rows:
                raise ValueError(f"logit rows {picked} are not within {rows} rows")
        if self.windows and rows > self.most_rows:
            raise ValueError(f"{rows} rows are more than windows have pages for")
        given = None if call.sampling is None else call.sampling.shape
        wanted = (call.batch, 4) if self.draws else None
        if given != wanted:
            raise ValueError(f"sampling has shape {given}, not {wanted}")
        ends = [start + rows for start in call.starts.tolist()]
        if call.first_slot < 0 or call.first_slot + len(ends) > self.max_batch:
            raise ValueError(f"slots {call.slots} are not within {self.max_batch}")
        if min(ends) < rows or max(ends) > self.max_seq_len:
            raise ValueError(f"rows end at {ends}, past {self.max_seq_len} or before 0")
        return dict(zip(call.slots, ends, strict=True))


@dataclass(frozen=True, slots=True)
class Candidates:
    """The K highest logits of every row: enough to draw from with a small top-k.

    `token_ids` and `logits` [B,R,K], highest first; among equal logits in any order, and which
    of them are left out at the end is not said. `read_row(b, r)` gives the whole row [V] for
    whoever has to know. Valid until the executor's next call.
    """

    token_ids: Int64Array
    logits: FloatArray
    read_row: Callable[[int, int], FloatArray]


@dataclass(slots=True, eq=False)
class TargetOutput:
    """`choice_ids` [B,R] is the argmax per logit row, or what was drawn from it (limits.draws).

    Executors that draw choose -1 in a row whose logits are not finite.
    `logits` [B,R,V] or `candidates` are there when asked for (see Scores). Arrays are valid
    until the executor's next call; copy what must live longer.
    """

    choice_ids: Int64Array
    logits: FloatArray | None
    candidates: Candidates | None = None


@dataclass(slots=True, eq=False)
class SpeculationOutput:
    """One draft pass and one verify pass.

    `token_ids` [B,S]: column 0 the anchor, then the drafts. `choice_ids` [B,S]: the
    target's choice after each of them, as in TargetOutput. `logits` [B,S,V] or `candidates` are
    there when asked for (see Scores). Arrays are valid until the executor's next call.
    """

    token_ids: Int64Array
    choice_ids: Int64Array
    logits: FloatArray | None
    candidates: Candidates | None = None


class Executor(Protocol):
    """Runs the three graphs of a bundle over its own caches."""

    @property
    def limits(self) -> ExecutorLimits: ...

    @property
    def is_bitwise(self) -> bool:
        """Whether a row's logits have the same bits whatever runs beside it."""
        ...

    def warm_up(self, rows: Mapping[int, int], plain: TargetGraph) -> None:
        """Gets ready for prompts and steps, so that no request waits for what a first call takes.

        `rows` are a step's by its batch; 1 is a pass of `plain`. What slots hold stays.
        """
        ...

    def forward(self, call: TargetCall) -> TargetOutput:
        """Runs rows through the target; every one must end within `limits.max_seq_len`.

        Rows may be run again: what a slot holds behind them stays until it is released.
        """
        ...

    def speculate(self, call: StepCall) -> SpeculationOutput:
        """Drafts a block and verifies it."""
        ...

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` cached positions of slot `source` to slot `destination`."""
        ...

    def release_slots(self, first_free: int) -> None:
        """Says that slots first_free … hold nothing, so that caches may shrink or be cleared."""
        ...

    def close(self) -> None:
        """Releases sessions and caches; the executor cannot be used afterwards."""
        ...


class PagedExecutor(Executor, Protocol):
    """An executor whose `limits.page_pool` is set.

    A page holds the rows of every layer of target and draft, so that who shares a page shares the
    drafter's context as well. Slots have no pages until they are bound; `move_slot` moves the
    binding and copies nothing, and `release_slots` forgets bindings and leaves rows where they are.
    """

    def bind_pages(self, slot: int, page_ids: Sequence[int], window: int | None = None) -> None:
        """Says which pages hold the positions of `slot`, in order; they cover its next call's rows.

        `window` is that of the layers, where the pool has pages of their own for these. There
        HANDED_BACK (page_bindings.py) stands for pages that no row of the next calls sees.

        Pages before that call's rows are only read, and may be bound to other slots too. Pages that
        the slot already has, at the head of the list, keep what its sequence wrote there; a slot
        is bound to none before it goes to another sequence.
        """
        ...


class StatefulExecutor(PagedExecutor, Protocol):
    """A paged executor of a target with recurrent layers, which copies their states.

    There are `limits.state_copies`. With the pages of its prefix, a state is all that a sequence
    needs to go on.
    """

    @property
    def states(self) -> StatePositions:
        """What slots and copies have, and where they may go on."""
        ...


def hold_positions(executor: Executor, positions: int, slots: int = 1) -> None:
    """Gives the first `slots` slots pages for `positions` positions each, where there are pages.

    In a small pool slots share some. Of layers with a window each has what its rows see, in turn.
    """
    limits, pool = executor.limits, executor.limits.page_pool
    if pool is None:
        return
    bind, columns = cast(PagedExecutor, executor).bind_pages, pool.cover(positions)
    for slot in range(slots):
        pages = [(slot * columns + column) % pool.pages for column in range(columns)]
        bind(slot, pages)
        for kind in pool.windowed:
            each = min(limits.window_pages(kind.window, pool.page_size), columns)
            pages = [(slot * each + column % each) % kind.pages for column in range(columns)]
            bind(slot, pages, kind.window)
