"""A request's sampling parameters, and the bits that graphs which draw are given of them."""

from __future__ import annotations

import reprlib
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.core.arrays import Int64Array
from dflash_trt.errors import DflashError, one_line

_PACKED = struct.Struct("=QdQd")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen from the target's logits.

    Args:
        temperature: finite and >= 0; 0 is greedy, and the other fields then do nothing.
        top_k: keep exactly this many tokens (>= 1); None keeps all.
        top_p: in (0, 1]; of what top_k left, keep the smallest set of likeliest tokens whose
            probability reaches top_p; 1 keeps all.
        min_p: in [0, 1]; keep tokens at least so likely, of what temperature made of the row, as
            min_p times the likeliest one; comes before top_k and top_p (arXiv 2407.01082).
        seed: 0 … 2^64 - 1.

    Equal logits rank by token id, the lower first.

    Raises:
        DflashError: a value outside its range (usage).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (_is_real(self.temperature) and 0 <= self.temperature <= sys.float_info.max):
            raise _refuse("temperature", self.temperature, "a finite number, 0 (greedy) or more")
        if self.top_k is not None and not (_is_integer(self.top_k) and self.top_k >= 1):
            raise _refuse("top_k", self.top_k, "an integer of at least 1, or none to keep all")
        if not (_is_real(self.top_p) and 0 < self.top_p <= 1):
            raise _refuse("top_p", self.top_p, "a number above 0 and at most 1")
        if not (_is_real(self.min_p) and 0 <= self.min_p <= 1):
            raise _refuse("min_p", self.min_p, "a number from 0 (keeps all) to 1")
        if not (_is_integer(self.seed) and 0 <= self.seed < 2**64):
            raise _refuse("seed", self.seed, "an integer from 0 to 2^64 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def narrows(self) -> bool:
        """Whether a draw is from some of the tokens alone."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


def pack_sampling(params: Sequence[SamplingParams]) -> Int64Array:
    """The `sampling` input [B,4] of graphs that draw: seed, temperature, top_k (0: all), top_p.

    It has no place for min_p: the host draws for a request that has one. Bits, not values: TensorRT
    has no float64 and no unsigned 64-bit integers. A top_k past int64 keeps all, as any does that
    no vocabulary reaches.
    """
    rows = []
    for one in params:
        top_k = 0 if one.top_k is None or one.top_k >= 2**63 else one.top_k
        rows.append(_PACKED.pack(one.seed, one.temperature, top_k, one.top_p))
    return np.frombuffer(b"".join(rows), np.int64).reshape(-1, 4)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse(name: str, value: object, wanted: str) -> DflashError:
    shown = one_line(reprlib.repr(value), 60)
    return DflashError(f"{shown} is not {wanted}", where=name, usage=True)
