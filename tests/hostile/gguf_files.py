"""GGUF files whose header, keys or tensors lie."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.hostile.case import HostileCase
from tests.hostile.values import NUMBERS, TEXTS, spoil
from tests.importing.files import write_gguf

COUNT = 170
_COMMANDS = (("import-gguf", "m.gguf", "-o", "out/hf"),)
_SIZES = (0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
_FITTING = [one for one in NUMBERS if isinstance(one, float) or 0 <= one < 2**32]
_TEXTS = [one for one in TEXTS if "\ud800" not in one]
_KEYS = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "expert_count"),
    *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
)
_TOKENIZER_KEYS = (
    *("ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template"),
    *("ggml.eos_token_id", "ggml.bos_token_id", "ggml.add_bos_token", "ggml.scores"),
)
_TENSORS = ("token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.9.ffn_up.weight")


def make(random: Random, number: int) -> HostileCase:
    """A good file with its bytes or numbers changed, or one written with other keys."""
    way = random.randrange(6)

    def damage(folder: Path) -> None:
        path = folder / "m.gguf"
        if way <= 3:
            data = (folder / "hf/m.gguf").read_bytes()
            path.write_bytes(_damaged(random, data, way))
            return
        keys, tensors = {}, {}
        for _ in range(random.choice((1, 2))):
            key = random.choice((*(f"qwen3.{one}" for one in _KEYS), *_texts()))
            keys[key] = _value(random)
        if way == 5:
            rows = random.choice(((1,), (0, 4), (322, 64), (64, 322), (2, 2, 2, 2)))
            value = random.choice((0.0, 1e-45, np.nan, np.inf))
            tensors[random.choice(_TENSORS)] = np.full(rows, value, np.float32)
        try:
            write_gguf(path, folder / "hf", keys=keys, tensors=tensors)
        except (
            ValueError,
            TypeError,
            KeyError,
            OverflowError,
            struct.error,
        ):  # no file has such a value
            path.write_bytes(b"GGUF" + random.randbytes(100))

    return HostileCase(f"GGUF file, way {way}", ("hf",), damage, _COMMANDS)


def _texts() -> list[str]:
    return [f"tokenizer.{key}" for key in _TOKENIZER_KEYS]


def _value(random: Random) -> Any:
    return random.choice(
        (
            random.choice(_FITTING),
            random.choice(_TEXTS),
            True,
            ["a", "b"] * random.choice((1, 161, 5000)),
            [random.choice((0, 1, 3, 6, 99))] * random.choice((1, 322, 323)),
            [random.choice(_TEXTS)] * 322,
            None,
        )
    )


def _damaged(random: Random, data: bytes, way: int) -> bytes:
    reader_end = data.rfind(b"blk.") + 200  # the last tensor's entry, and then the data
    header, rest = data[:reader_end], data[reader_end:]
    if way == 0:
        return spoil(random, header) + rest
    if way == 1:
        return random.choice((data[: random.randrange(len(data))], data + bytes(5), data * 2))
    changed = bytearray(header)
    for _ in range(random.choice((1, 1, 3))):
        # Lengths, counts, types and offsets are numbers of 4 or 8 bytes, and mostly small.
        form = random.choice("IQ")
        wanted = struct.calcsize(form)
        at = _find_number(random, changed, wanted)
        value = random.choice(_SIZES) % (1 << (8 * wanted))
        struct.pack_into(f"<{form}", changed, at, value)
    return bytes(changed) + rest


def _find_number(random: Random, data: bytearray, size: int) -> int:
    """Where a number of `size` bytes may lie: a byte, and zeros behind it."""
    for _ in range(200):
        at = random.randrange(4, len(data) - size)
        if data[at] and not any(data[at + 1 : at + size]):
            return at
    return 4
