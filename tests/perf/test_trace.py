"""Pieces of a stream: new parts or all so far, counted the same."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from dflash_perf.harness.records import GrownBytes, ServerCounts, Trace
from hypothesis import given, settings
from hypothesis import strategies as st

PIECES = st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=12)


@settings(deadline=None)
@given(PIECES)
def test_told_or_not_cumulative_pieces_are_their_last(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    told, untold = GrownBytes("cumulative"), GrownBytes()
    for so_far in accumulate(pieces):
        told.push(so_far)
        untold.push(so_far)
    assert told.whole() == whole
    assert untold.whole(len(whole)) == whole
    if len(pieces) > 2:
        assert untold.whole() == whole


@settings(deadline=None)
@given(PIECES)
def test_new_pieces_are_joined(pieces: list[bytes]) -> None:
    told, untold = GrownBytes("delta"), GrownBytes()
    for piece in pieces:
        told.push(piece)
        untold.push(piece)
    whole = b"".join(pieces)
    assert told.whole() == whole
    if any(not b.startswith(a) for a, b in pairwise(pieces)):
        assert untold.whole() == whole


def test_a_last_piece_that_only_repeats() -> None:
    grown = GrownBytes()
    for piece in (b"a", b"ab", b"abc", b"abc"):
        grown.push(piece)
    assert grown.whole() == b"abc"


def _ids(count: int) -> bytes:
    return b"".join(index.to_bytes(4, "little") for index in range(count))


def test_ids_count_before_counts_before_the_tokenizer() -> None:
    trace = Trace(0, 0)
    trace.start()
    at = trace.sent_at
    for index, count in enumerate((1, 5, 9)):
        trace.receive(at + 1 + index, b"a b", _ids(count), streaming="cumulative")
    trace.counts = ServerCounts(output_tokens=9)
    record = trace.to_record(at, None)
    assert (record.output_tokens, record.token_source) == (9, "output_ids")
    assert record.ttft_s == pytest.approx(1) and record.e2e_s == pytest.approx(3)
    trace.counts = ServerCounts(output_tokens=8)
    assert trace.to_record(at, None).output_tokens == 9
    trace.ids = None
    record = trace.to_record(at, lambda text: 77)
    assert (record.output_tokens, record.token_source) == (8, "counts")
    trace.counts = ServerCounts()
    record = trace.to_record(at, lambda text: len(text.split()))
    assert record.token_source == "tokenizer" and record.output_tokens is not None
    record = trace.to_record(at, None)
    assert (record.output_tokens, record.token_source) == (None, None)


def test_messages_without_text_are_not_the_first_text() -> None:
    trace = Trace(0, 0)
    trace.start()
    trace.receive(trace.sent_at + 1, b"", _ids(1), streaming="delta")
    trace.receive(trace.sent_at + 2, b"a", _ids(1), streaming="delta")
    record = trace.to_record(trace.sent_at, None)
    assert record.ttft_s == pytest.approx(2) and record.output_tokens == 2
