"""Checks and their order, one measure of error, random tensors, and guarded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dflash_plugins.operation import DType, Specs
from dflash_trt.errors import DflashError, one_line

Array = npt.NDArray[Any]
Item = TypeVar("Item")

SURE = 6
"""A sum of random errors is taken to stay below this many times its root mean square."""

KV_SCALES = np.array([0.03, 0.007], np.float32)
RANDOM_ELEMENTS = 1 << 20
GUARD_BYTES = 4096
GUARD = 0xA5
POISON = 0xFF
"""Every byte of an output before the launch: NaN in each float type, -1 in each integer type."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The error and bound of a case at the element where error minus bound is largest.

    `mismatch` names the first element that exceeds its bound; None if the case passed. A case that
    could not be run has neither error nor bound.
    """

    name: str
    error: float | None
    bound: float | None
    mismatch: str | None


Run = Callable[..., Mapping[str, Array]]
"""Outputs of the named operation over inputs, with attributes and perhaps a `tactic`; aliased ones
are copies.
"""


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison of an operation with what is expected, wherever `Run` runs it."""

    name: str
    find: Callable[[Run], Accuracy | Iterable[Accuracy]]


def check_all(checks: Sequence[Check], run: Run) -> Iterator[Accuracy]:
    """What `checks` find; a failed launch or a stray write is a finding too and ends nothing."""
    for check in spread(checks):
        try:
            found = check.find(run)
            yield from [found] if isinstance(found, Accuracy) else list(found)
        except (AssertionError, DflashError) as error:
            yield Accuracy(check.name, None, None, one_line(error))


def exact(name: str, found: Sequence[str]) -> Accuracy:
    """A case that allows no difference: `error` counts what was found."""
    return Accuracy(name, float(len(found)), 0.0, "; ".join(found) or None)


def fill(specs: Specs, seed: int = 0) -> dict[str, Array]:
    """Random floats, in large tensors repeated; pages in random order; scales of K and V."""
    generator, filled = np.random.default_rng(seed), dict[str, Array]()
    for name, spec in specs.items():
        if name == "page_table":
            pages = generator.permutation(specs["k_cache"].shape[0])
            filled[name] = pages[: math.prod(spec.shape)].reshape(spec.shape).astype(np.int32)
        elif name == "kv_scales":
            filled[name] = KV_SCALES
        elif spec.dtype not in (DType.INT32, DType.INT64):
            count = min(RANDOM_ELEMENTS, math.prod(spec.shape))
            values = generator.standard_normal(count, np.float32).astype(spec.dtype.numpy)
            filled[name] = np.resize(values, spec.shape)
    return filled


def spread(cases: Sequence[Item]) -> list[Item]:
    """The first case, then the one in the middle, then those between, and so on.

    Whoever stops early has seen some of every kind: neighbours in a table are alike.
    """
    bits = max(1, (len(cases) - 1).bit_length())
    places = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [cases[place] for place in places if place < len(cases)]


def judge(name: str, actual: Array, expected: Array, bound: float | Array) -> Accuracy:
    """Compares one case with `expected`; `bound` as for `find_mismatch`."""
    mismatch = find_mismatch(actual, expected, bound)
    error = relative_error(actual, expected)
    limits = np.broadcast_to(bound, error.shape)
    worst = np.unravel_index(np.argmax(error - limits), error.shape)
    return Accuracy(name, float(error[worst]), float(limits[worst]), mismatch)


def relative_error(actual: Array, expected: Array) -> npt.NDArray[np.float64]:
    """|actual - expected| / (|expected| + RMS of expected along the last axis), elementwise.

    The RMS term keeps the error finite where terms of a sum cancel and |expected| is near 0. NaN
    in one array alone is an infinite error, as is a finite value against an infinite one.
    """
    wide, truth = actual.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = relative(np.abs(wide - truth), truth)
    same = (wide == truth) | (np.isnan(wide) & np.isnan(truth))
    return np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))


def relative(absolute: Array, expected: Array) -> npt.NDArray[np.float64]:
    """Converts an absolute error, or a bound on one, to the units of `relative_error`."""
    truth = expected.astype(np.float64)
    size = np.abs(truth) + np.sqrt(np.mean(truth**2, axis=-1, keepdims=True))
    scaled: npt.NDArray[np.float64] = absolute / np.where(size == 0, 1.0, size)
    return scaled


def epsilon(dtype: Any) -> float:
    """The unit roundoff of a float type: half the distance from 1 to the next number."""
    return float(ml_dtypes.finfo(dtype).eps) / 2  # type: ignore[no-untyped-call]


def tiny(dtype: Any) -> float:
    """The absolute error of one rounding among a float type's subnormal numbers."""
    return float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2  # type: ignore[no-untyped-call]


def sum_error(length: int, squares: Array | float, unit: float) -> Array:
    """How far off a sum of `length` terms of either sign may be, by its roundings alone.

    Args:
        length: how many terms are added, at worst one after another.
        squares: the sum of the terms' squares. Terms of either sign cancel, so sums of some of
            them are about as large as its root, in whatever order they are added. For terms of
            one sign, the square of their sum.
        unit: `epsilon` of the type that holds the sum; each addition errs by it at most.

    Each of `length` roundings errs by unit * sqrt(squares) either way, all of them together by
    sqrt(length) times that. More than `SURE` times as much is seen in fewer than 2 exp(-SURE² / 2)
    of all cases (Hoeffding's inequality, for independent roundings of mean zero). Vectors and fused
    multiply-add round less, so the bound holds on every machine. Errors of several causes add up in
    squares.
    """
    bound: Array = SURE * unit * np.sqrt(length * np.asarray(squares, np.float64))
    return bound


def find_mismatch(actual: Array, expected: Array, bound: float | Array) -> str | None:
    """The first element in C order where `actual` is off by more than `bound`, as text; or None.

    Args:
        bound: on `relative_error`; one number, or one for each element.

    Raises:
        ValueError: their shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes {actual.shape} and {expected.shape} differ")
    error = relative_error(actual, expected) if actual.size else np.zeros(actual.shape)
    wrong = np.flatnonzero(error > bound)
    if not wrong.size:
        return None
    coordinate = tuple(int(i) for i in np.unravel_index(wrong[0], actual.shape))
    limit = np.broadcast_to(bound, error.shape)[coordinate]
    return (
        f"first at {coordinate}: {actual[coordinate]} where {expected[coordinate]} was expected "
        f"(error {error[coordinate]:.3g}, bound {limit:.3g})"
    )


def find_other_bits(actual: Array, expected: Array) -> str | None:
    """The first element whose bits differ, as text; or None."""
    if actual.dtype != expected.dtype:
        return f"{actual.dtype} is not {expected.dtype}"
    unsigned = np.dtype(f"u{actual.dtype.itemsize}")
    bits = [np.ascontiguousarray(one).view(unsigned) for one in (actual, expected)]
    wrong = np.argwhere(bits[0] != bits[1])
    if not wrong.size:
        return None
    at = tuple(int(i) for i in wrong[0])
    return f"first at {at}: {actual[at]} where {expected[at]} was expected"


class GuardedBuffer:
    """Bytes for one tensor between two guards.

    Args:
        size: bytes of the tensor.
        contents: its first bytes; None fills it with POISON.
    """

    offset = GUARD_BYTES
    """Where the tensor begins in `memory`."""

    def __init__(self, size: int, contents: bytes | None = None) -> None:
        self.memory = np.full(size + 2 * GUARD_BYTES, GUARD, np.uint8)
        inner = self.inner
        inner[...] = POISON if contents is None else np.frombuffer(contents, np.uint8)

    @property
    def inner(self) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, in place."""
        return self.memory[GUARD_BYTES : self.memory.size - GUARD_BYTES]

    def check(self, name: str) -> None:
        """Raises AssertionError when a guard byte was overwritten; `name` is the tensor's."""
        outside = np.concatenate([self.memory[:GUARD_BYTES], self.memory[-GUARD_BYTES:]])
        touched = np.flatnonzero(outside != GUARD)
        if touched.size:
            at = int(touched[0]) - GUARD_BYTES
            at += self.inner.size if at >= 0 else 0
            raise AssertionError(f"{name}: byte {at} of {self.inner.size} was written")
