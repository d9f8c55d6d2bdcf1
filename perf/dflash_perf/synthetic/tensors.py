"""Writes checkpoints whose weights are random, or holes in files that take no disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
_CHUNK = 1 << 24
_SCALE = 0.01
# Biased exponents of MXFP4 scales as trained weights have them, all in NVFP4's reach.
_EXPONENTS = (127 - 12, 127 - 4)

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name → (safetensors code, shape)."""


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: Tensors,
    *,
    random: bool,
    shard_bytes: float = math.inf,
) -> int:
    """Writes `config` and `tensors`; returns the bytes of weights.

    Args:
        random: False leaves the data as a hole in the file, which takes no disk; True writes
            small random weights of each tensor's type.
        shard_bytes: the most data of a file; with more there are shards and their index.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    shards: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if _encode_header(shards[-1] | {name: tensor})[1] > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    total, places = 0, dict[str, str]()
    for number, shard in enumerate(shards):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        total += _write_file(folder / file, shard, random)
        places |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def _encode_header(tensors: Tensors) -> tuple[bytes, int]:
    """What a .safetensors file of `tensors` begins with, and how many bytes of data follow."""
    header: dict[str, object] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        length = math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + length],
        }
        offset += length
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded, offset


def _write_file(path: Path, tensors: Tensors, random: bool) -> int:
    encoded, size = _encode_header(tensors)
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(encoded)
        # Scales are read when a checkpoint is opened; they have their value in a hole as well.
        for name, (dtype, shape) in tensors.items():
            if random or not shape:
                for left in range(math.prod(shape), 0, -_CHUNK):
                    file.write(_random_bytes(generator, name, dtype, shape, min(left, _CHUNK)))
            else:
                file.seek(math.prod(shape) * _ITEM_BYTES[dtype], 1)
        file.truncate(len(encoded) + size)
    return size


def _random_bytes(
    generator: np.random.Generator, name: str, dtype: str, shape: tuple[int, ...], count: int
) -> bytes:
    """`count` elements of a tensor: small weights, norms about 1, one value for every scale."""
    if not shape:
        return np.float32(_SCALE).tobytes()
    if dtype == "U8" and name.endswith("_scales"):
        return generator.integers(*_EXPONENTS, count, np.uint8).tobytes()
    if dtype == "U8":  # any byte is two codes
        return generator.bytes(count)
    if dtype == "F8_E4M3":  # from 1/16 to 7.5
        return generator.integers(0x18, 0x50, count, np.uint8).tobytes()
    values = generator.standard_normal(count, np.float32) * np.float32(0.1)
    return _encode(values + np.float32(len(shape) == 1), dtype)


def _encode(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Finite `values` as `dtype` stores them; BF16 rounds to the nearest, ties to even."""
    if dtype == "F32":
        return values.tobytes()
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
