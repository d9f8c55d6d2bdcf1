"""Headers of safetensors files that lie about themselves."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile.case import HostileCase, draw_readers
from tests.hostile.values import NUMBERS, TEXTS, changed, encode, odd_value, spoil, spoil_json

COUNT = 170
_DTYPES = ("F32", "F16", "BF16", "F64", "I8", "F8_E4M3", "F4", "U64", "C64", "BOOL", "f32", "", 4)
_LENGTHS = (0, 1, 7, 8, 99_999_999, 100_000_001, 2**31, 2**32, 2**63, 2**64 - 1)


def make(random: Random, number: int) -> HostileCase:
    """A header of the target, the draft, or the bundle, changed in one of nine ways."""
    owner = random.choice(("target", "draft"))

    def damage(folder: Path) -> None:
        path = folder / "pair" / owner / "model.safetensors"
        path.write_bytes(damaged(random, path.read_bytes()))

    return HostileCase(
        f"the header of the {owner}'s weights", ("pair",), damage, draw_readers(random)
    )


def damaged(random: Random, data: bytes) -> bytes:
    """A safetensors file whose header is changed in one of nine ways."""
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    way = random.randrange(9)
    if way == 0:
        return _packed(encode(changed(random, header, ("__metadata__", "x"))), rest)
    if way == 1:
        return _packed(spoil_json(random, data[8 : 8 + length]), rest)
    if way == 2:
        return _packed(data[8 : 8 + length], rest, random.choice(_LENGTHS))
    if way == 3:
        return spoil(random, data[: 8 + length]) + rest
    if way == 4:
        header["__metadata__"] = random.choice(({"format": odd_value(random)}, odd_value(random)))
        return _packed(encode(header), rest)
    if way == 5:
        return _packed(data[8 : 8 + length] + b" " * random.choice((1, 7, 100_000)), rest)
    if way == 6:  # thousands of tensors without a byte
        many = {
            f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(9999)
        }
        return _packed(encode({**many, **header}), rest)
    name = random.choice([key for key in header if key != "__metadata__"])
    _change_tensor(random, header, name)
    return _packed(encode(header), rest + bytes(random.choice((0, 0, 1, 4096))))


def _change_tensor(random: Random, header: dict[str, Any], name: str) -> None:
    tensor = header[name]
    way = random.randrange(6)
    if way == 0:
        tensor["dtype"] = random.choice(_DTYPES)
    elif way == 1:
        shape = tensor["shape"]
        shape[random.randrange(len(shape))] = random.choice(NUMBERS)
    elif way == 2:
        tensor["shape"] = random.choice(
            ([], [1] * 300, [2**31] * 3, [0, 2**63], tensor["shape"][::-1], odd_value(random))
        )
    elif way == 3:
        tensor["data_offsets"][random.randrange(2)] = random.choice(NUMBERS)
    elif way == 4:
        tensor["data_offsets"] = random.choice(
            (tensor["data_offsets"][::-1], [0, 0], [0], [0, 4, 8], "0", header_span(header))
        )
    else:
        header[random.choice((*TEXTS, name + ".", name.upper()))] = header.pop(name)


def header_span(header: dict[str, Any]) -> list[int]:
    """The bytes of all tensors together."""
    ends = [one["data_offsets"][1] for one in header.values() if "data_offsets" in one]
    return [0, max(ends)]


def _packed(header: bytes, rest: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + rest
