"""Hostile GGUF files: each is refused with one line, before memory is spent."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.building.gguf.gguf_file import read_gguf
from dflash_trt.errors import DflashError
from tests.importing.files import write_gguf
from tests.models.helpers import refused
from tests.reference.checkpoints import write_target

U32, F32_VALUE, BOOL, TEXT, ARRAY = 4, 6, 7, 8, 9
F32, F16, Q8_0, I8 = 0, 1, 8, 24
MEMORY = 4 << 20


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def field(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(key: str, kind: int, count: int, values: bytes = b"") -> bytes:
    return field(key, ARRAY, struct.pack("<IQ", kind, count) + values)


def tensor(
    name: str | bytes = "t", sizes: Sequence[int] = (4,), kind: int = F32, offset: int = 0
) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def build(
    fields: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (tensor(),),
    data: bytes = bytes(32),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file, in which everything may lie."""
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    header = magic + struct.pack("<IQQ", version, num_tensors, num_fields)
    header += b"".join(fields) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


HUGE = 2**63
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "another format": (build(magic=b"PK\3\4"), "not a GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 0) + bytes(64), "big-endian"),
    "2^63 tensors": (build(counts=(HUGE, 0)), "claims 9223372036854775808 tensors"),
    "one tensor too many": (build(counts=(2, 0)), "truncated"),
    "key twice": (build([field("k", U32, bytes(4))] * 2), "Duplicate k"),
    "NaN": (build([field("k", F32_VALUE, struct.pack("<f", float("nan")))]), '"k" is nan'),
    "2^63 numbers": (build([array("k", U32, HUGE)]), "truncated"),
    "alignment 0": (build([field("general.alignment", U32, bytes(4))]), "power of two"),
    "size 0": (build(tensors=[tensor(sizes=(4, 0))]), "sizes [4, 0]"),
    "a type without weights": (build(tensors=[tensor(kind=I8)]), "type 24 is not decoded"),
    "data that ends early": (build(tensors=[tensor(sizes=(9,))]), "truncated"),
    "data that goes on": (build(data=bytes(64)), "32 bytes after the last"),
    "an offset that wraps": (build(tensors=[tensor(offset=2**64 - 32)]), "begins at 184467"),
    "a name twice": (build(tensors=[tensor(), tensor(offset=32)], data=bytes(64)), "given twice"),
    "a hole": (build(tensors=[tensor(), tensor("u", offset=64)], data=bytes(96)), "begins at"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_lies_is_refused_in_little_memory(name: str, tmp_path: Path) -> None:
    read_gguf(_write(tmp_path / "good.gguf", build()))  # imports are no part of the measure
    raw, piece = HOSTILE[name]
    path = _write(tmp_path / "m.gguf", raw)
    tracemalloc.start()
    try:
        with refused(str(path), piece):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    source = write_target(folder / "hf", "llama", num_layers=1, vocab=322, hidden=32, heads=2)
    return write_gguf(folder / "m.gguf", source)


PLACES = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from([0, 1, 127, 128, 255]) | st.integers(0, 255)),
    max_size=4,
)


@settings(max_examples=200)
@given(places=PLACES, end=st.just(1.0) | st.floats(0, 1, exclude_max=True))
def test_damaged_headers_are_read_or_refused(
    model: Path, places: list[tuple[float, int]], end: float
) -> None:
    raw, path = bytearray(model.read_bytes()), model.with_name("damaged.gguf")
    size = min(one.offset for one in read_gguf(model).tensors.values())
    for place, byte in places:
        raw[int(place * (size - 1))] = byte
    path.write_bytes(raw[: int(end * len(raw)) + 1])
    try:
        read_gguf(path)
    except DflashError as error:
        assert error.message.isprintable() and len(error.message) < 600


def _write(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path
