"""Schedules with invented measurements, for the tests."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from dflash_trt.decoding import GeneratorOptions
from dflash_trt.decoding.schedule import BlockSchedule, Measurements, StepSeconds, merge_ranges


def invent_measurements(
    block_sizes: Sequence[int],
    *,
    rate: float = 0.8,
    plain: float = 1.0,
    feeding: float = 1.2,
    per_row: float = 0.3,
    batches: Sequence[int] = (1, 8),
) -> Measurements:
    """Seconds per sequence: `plain` and `feeding` without drafts, `per_row` per row of a block."""
    return Measurements(
        prompts=4,
        max_tokens=32,
        threads=1,
        positions=20,
        block_sizes=list(block_sizes),
        steps=[
            StepSeconds(
                batch=batch,
                target_only=plain * batch,
                target=feeding * batch,
                blocks=[(0.5 + per_row * block) * batch for block in block_sizes],
            )
            for batch in batches
        ],
        prefill_seconds=0.2,
        acceptance=[[rate] * (block - 1) for block in block_sizes],
        acceptance_lengths=[float(block) / 2 + 0.5 for block in block_sizes],
    )


def schedules(largest_block: int, max_batch: int) -> st.SearchStrategy[BlockSchedule]:
    """Any schedule over up to `max_batch` sequences, with and without measurements."""
    sizes = range(2, largest_block + 1)
    blocks = st.lists(st.sampled_from([1, 1, *sizes]), min_size=1, max_size=max_batch)
    measured = st.builds(
        invent_measurements,
        st.just(sizes),
        rate=st.sampled_from([0.1, 0.5, 0.95]),
        plain=st.sampled_from([0.2, 1.0, 3.0]),
    )

    def build(sizes: list[int], known: Measurements | None) -> BlockSchedule:
        return BlockSchedule(blocks=merge_ranges(sizes), executor="fake", measured=known)

    return st.builds(build, blocks, st.one_of(measured, measured, measured, st.none()))


EOS = 14
VOCAB_SIZE = 16
MAX_SEQ_LEN = 40
TRAINED_BLOCK = 8


options = st.builds(
    GeneratorOptions,
    speculation=st.sampled_from([True, True, True, False]),
    block_size=st.none() | st.integers(2, TRAINED_BLOCK),
    prefill_chunk=st.sampled_from([1, 2, 3, 7, 16, 512]),
    record_logits=st.booleans(),
)


scheduled_options = st.builds(
    GeneratorOptions,
    schedule=schedules(TRAINED_BLOCK, 5),
    prefill_chunk=st.sampled_from([1, 2, 3, 7, 16, 512]),
    record_logits=st.just(True),
)
