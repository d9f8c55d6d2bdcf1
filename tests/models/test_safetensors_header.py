"""Headers: golden offsets, every lie refused by name, and no input that breaks out."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from dflash_trt.errors import DflashError
from dflash_trt.models.safetensors_header import header_sha256, read_header
from tests.models.conftest import safetensors_bytes
from tests.models.helpers import json_values, refused

Hostile = Callable[..., Path]


def tensor(dtype: Any = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_golden_header(hostile: Hostile) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": tensor()}
    path = hostile(header, b"\0" * 8)
    entry = read_header(path)["a"]
    raw = json.dumps(header).encode()
    assert (entry.offset, entry.length, entry.file) == (8 + len(raw), 8, path.resolve())
    assert header_sha256(path) == hashlib.sha256(struct.pack("<Q", len(raw)) + raw).hexdigest()


@pytest.mark.parametrize(
    ("header", "data", "piece"),
    [
        (b"{", b"", "not valid JSON"),
        (b'{"a": 1, "a": 2}', b"", 'key "a" is given twice'),
        ({"a": {"dtype": "F32", "shape": []}}, b"", 'tensor "a": must have exactly'),
        ({"a": tensor(dtype=["F32"])}, b"\0" * 8, "is not supported"),
        ({"a": tensor(shape=[True, 2])}, b"\0" * 8, "shape has true"),
        ({"a": tensor(shape=[2**63])}, b"\0" * 8, "shape has 9223372036854775808"),
        ({"a": tensor(shape=[1] * 33, end=4)}, b"\0" * 4, "at most 32 sizes"),
        ({"a": tensor(shape=[3])}, b"\0" * 8, "needs 12 bytes, data_offsets give 8"),
        ({"a": {**tensor(), "data_offsets": [0]}}, b"\0" * 8, "begin <= end"),
        ({"a": tensor(), "b": tensor(begin=4, end=12)}, b"\0" * 12, 'overlaps tensor "a" by 4'),
        ({"a": tensor(), "b": tensor(begin=12, end=20)}, b"\0" * 20, '"b": leaves a hole of 4'),
        ({"a": tensor()}, b"\0" * 5, "truncated: 3 of"),
        ({"a": tensor()}, b"\0" * 9, "1 bytes after its last tensor"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ must map text to text"),
        ({"bad\nname\ud800": 1}, b"", r"bad\nname\ud800"),
    ],
)
def test_lies_are_refused(hostile: Hostile, header: Any, data: bytes, piece: str) -> None:
    with refused("hostile.safetensors", piece):
        read_header(hostile(header, data))


def test_lying_lengths_allocate_nothing(hostile: Hostile) -> None:
    tracemalloc.start()
    with refused("claims 18446744073709551615 bytes, over the limit of 100000000"):
        read_header(hostile(b"{}", length=2**64 - 1))
    with refused("claims 99999999 bytes but only 2 follow"):
        read_header(hostile(b"{}", length=99_999_999))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


VALID = safetensors_bytes(
    {
        "__metadata__": {"format": "pt"},
        "a": tensor(),
        "b": tensor("BF16", [2, 3], 8, 20),
        "c": tensor("U8", [4], 20, 24),
    },
    b"\0" * 24,
)


HEADERS = json_values(
    ["F32", "BF16", "U8", 0, 4, 8, 2**63],
    ["dtype", "shape", "data_offsets", "a", "__metadata__"],
)


def mutate(edits: list[tuple[int, int]]) -> bytes:
    stored = bytearray(VALID)
    for position, value in edits:
        stored[position % len(stored)] = value
    return bytes(stored)


FILES = st.one_of(
    st.builds(
        mutate,
        st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6),
    ),
    st.binary(max_size=200),
    st.integers(0, 300).map(lambda cut: VALID[:cut]),
    st.builds(safetensors_bytes, HEADERS, st.integers(0, 32).map(bytes)),
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(stored=FILES)
def test_no_bytes_break_out(tmp_path: Path, stored: bytes) -> None:
    """They are either refused with one line or described without a contradiction."""
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(stored)
    tracemalloc.start()
    try:
        entries = read_header(path)
    except DflashError as error:
        assert str(error).isprintable()
    else:
        assert sum(entry.length for entry in entries.values()) <= len(stored)
        assert all(entry.offset + entry.length <= len(stored) for entry in entries.values())
        # What is accepted here, the format's own library accepts and reads the same.
        library = dict(deserialize(stored))  # type: ignore[no-untyped-call]
        assert {n: (e.dtype, list(e.shape)) for n, e in entries.items()} == {
            n: (fields["dtype"], fields["shape"]) for n, fields in library.items()
        }
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000
