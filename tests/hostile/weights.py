"""Weights that are no such model's: values, types and shapes."""

from __future__ import annotations

from pathlib import Path
from random import Random

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tests.hostile.case import BUILD, PROMPT, HostileCase
from tests.hostile.values import TEXTS, spoil

COUNT = 100
_VALUES = (np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, 0.0, 1e30)
_TYPES = (np.float16, ml_dtypes.bfloat16, np.float64, np.int8, np.int64, np.bool_, np.uint16)
_AFTER = (
    ("generate", "out/b", *PROMPT),
    ("generate", "out/b", "--temperature", "0.7", *PROMPT),
    ("verify", "out/b", *PROMPT, "--repeats", "0", "--batch", "1"),
)


def make(random: Random, number: int) -> HostileCase:
    """Tensors of the target or the draft changed; then the pair is asked, or verified."""
    after = random.choice(_AFTER)

    def damage(folder: Path) -> None:
        path = folder / "pair" / random.choice(("target", "draft")) / "model.safetensors"
        damage_tensors(random, path)

    return HostileCase(f"weights, then {after[0]}", ("pair",), damage, (BUILD, after))


def damage_tensors(random: Random, path: Path) -> None:
    """Changes some of a safetensors file's tensors."""
    tensors = load_file(path)
    names = random.sample(sorted(tensors), random.choice((1, 1, 3)))
    way = random.randrange(8)
    if way == 7:
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        path.write_bytes(data[:start] + spoil(random, data[start:]))
        return
    for name in names:
        tensors[name] = _changed(random, tensors[name], way)
    if way == 5:
        tensors[random.choice([one for one in TEXTS if one.isprintable()])] = tensors[names[0]]
    elif way == 6:
        for name in names:
            del tensors[name]
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)


def _changed(random: Random, array: npt.NDArray[np.float32], way: int) -> npt.NDArray[np.generic]:
    if array.dtype.kind != "f" and way in (0, 1, 4):
        return array[::-1]
    if way == 0:
        return np.full_like(array, random.choice(_VALUES))
    if way == 1:
        spoilt = array.copy()
        spoilt.flat[random.randrange(array.size)] = random.choice(_VALUES)
        return spoilt
    if way == 2:
        return array.astype(random.choice(_TYPES))
    if way == 3:
        return random.choice(
            (array.T, array[:1], array[:, None], np.repeat(array, 2, 0), array[:0])
        )
    if way == 4:  # any bits are a number
        return np.frombuffer(random.randbytes(array.nbytes), np.float32).reshape(array.shape)
    return array
